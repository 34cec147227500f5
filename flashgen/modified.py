"""Calls with modified scores, forward and backward: judged, then a cached plan and a launch; plain torch on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashgen.cpu import attend_on_cpu, gradients_on_cpu
from flashgen.descales import FP8, Descales, check_descales, descales_from
from flashgen.expressions.given import types_of
from flashgen.gradients import Plan, check_results, remember
from flashgen.modifiers import Modifiers, Options, check_cap, kind_of, modifiers_from
from flashgen.spec import Op
from flashgen.tensors import (
    CPU_DTYPES,
    GPU_DTYPES,
    MAX_SCALE,
    MIN_SCALE,
    check_device,
    check_scale,
    check_tensors,
    empty_gradient,
    empty_output,
    from_tensors,
    positive_scale,
    summed,
    tf32_allowed,
    turned_back,
    with_contiguous_rows,
    with_features,
)  # fmt: skip

_plans: dict[tuple[object, ...], Plan] = {}


def judged(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, layout: str, family: str | None, options: Options,
    descales: Descales | None = None,
) -> Modifiers:  # fmt: skip
    """The options of a call in the form in which kernels take them; everything else about it is checked as well.

    Descales are for fp8 inputs, which need them, even if none is given.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: nothing runs on this device.
    """
    check_descales(q, descales)
    dtypes = GPU_DTYPES if q.is_cuda else CPU_DTYPES
    problem = check_tensors(q, k, v, layout, dtypes if descales is None else (FP8,))
    check_scale(scale, q.dtype)
    check_device(q.device, family)
    modifiers = modifiers_from((problem.batch, problem.heads, problem.seq_q, problem.seq_kv), q, options)
    check_cap(options, scale)
    if descales is None:
        return modifiers
    heads, lengths = (problem.batch, problem.heads, problem.kv_heads), (problem.seq_q, problem.seq_kv)
    return modifiers._replace(descales=descales_from(heads, lengths, q, descales))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
    options: Options,
    descales: Descales | None = None,
) -> tuple[Tensor, Tensor]:
    """`flashgen.attention` with options, without autograd, autocast and tracing; `causal` is a Spec's.

    Returns:
        (output, lse), lse empty when it is not wanted.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: no kernel does this.
    """
    modifiers = judged(q, k, v, scale, layout, family, options, descales)
    if q.is_cuda:
        out, lse = attend_on_gpu(q, k, v, causal, scale, layout, return_lse, family, modifiers)
    else:
        out, lse = attend_on_cpu(q, k, v, causal, scale, layout, modifiers)
    return out, lse if return_lse and lse is not None else q.new_empty(0, dtype=torch.float32)


def attend_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
    modifiers: Modifiers,
) -> tuple[Tensor, Tensor | None]:
    """The same by a kernel, on tensors that have been judged."""
    out = empty_output(q, v)
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        q, scale = positive_scale(q, scale)
    q, k, v = (with_contiguous_rows(tensor) for tensor in (q, k, v))
    rows = q.shape[:3] if layout == "bhsd" else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(rows, dtype=torch.float32, device=q.device) if return_lse else None
    plan = planned("forward", (q, k, v, out), causal, layout, family, modifiers)
    if plan.bound is None:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf) if modifiers.sinks is None else lse.copy_(modifiers.sinks[:, None].expand(rows))
        return out, lse
    plan.bound(q, k, v, out, lse, *modifiers.arguments(causal), q.shape[3] ** -0.5 if scale is None else scale)
    return out, lse


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float | None,
    layout: str,
    options: Options,
    of_bias: bool,
    of_slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbias and dslopes of one call, each like its tensor; bitwise repeatable.

    Args:
        q, k, v, causal, scale, layout: as the forward was called with.
        o, lse: what it returned.
        do, dlse: their gradients, as for `flashgen.gradients.gradients`.
        options: the forward's; sinks are of no concern, since the log-sum-exp includes them.
        of_bias, of_slopes: whether these gradients are wanted; they are empty otherwise. With slopes all
            are computed in plain torch, on a GPU too.

    Raises:
        InputError: the tensors do not fit together.
        UnsupportedError: no kernel does this.
    """
    modifiers = judged(q, k, v, scale, layout, None, options._replace(sinks=None))
    dslopes = None
    if of_slopes or not q.is_cuda:
        dq, dk, dv, dbias, dslopes, _ = gradients_on_cpu(q, k, v, o, lse, do, dlse, causal, scale, layout, modifiers)
    else:
        dq, dk, dv, dbias = gradients_on_gpu(q, k, v, o, lse, do, dlse, causal, scale, layout, modifiers, of_bias)
    return (
        dq, dk, dv, summed(dbias if of_bias else None, options.bias, q),
        summed(dslopes if of_slopes else None, options.alibi_slopes, q),
    )  # fmt: skip


def gradients_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float | None,
    layout: str,
    modifiers: Modifiers,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same by kernels, on tensors that have been judged; the gradient of the bias [batch, heads, seq_q, seq_kv]."""
    check_results(q, v, o, lse, do, dlse, layout)
    results = (empty_gradient(q), empty_gradient(k), empty_gradient(v))
    given = scale
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        # The scores are those of another q, whose gradient is turned back.
        q, scale = positive_scale(q, scale)
    q, k, v, o, do = (with_contiguous_rows(tensor) for tensor in (q, k, v, o, do))
    dbias, extra = None, []
    if modifiers.bias is not None:
        shape, dtype = modifiers.bias.shape, modifiers.bias.dtype
        # Blocks of scores that nothing reaches are not written. Nothing is where nobody wants it: empty tensors are
        # null pointers.
        dbias = torch.zeros(shape, dtype=dtype, device=q.device) if of_bias else modifiers.bias.new_empty(0)
        extra = [torch.empty(shape, dtype=dtype, device="meta")]
    plan = planned("backward", (q, k, v, o, do, *results, *extra), causal, layout, None, modifiers)
    if plan.bound is None:
        return results[0].zero_(), results[1].zero_(), results[2].zero_(), dbias
    workspace = torch.empty(plan.workspace, dtype=torch.float32, device=q.device)
    plan.bound(
        q, k, v, o, lse.contiguous(), do, None if dlse is None else dlse.to(torch.float32).contiguous(), *results,
        *([] if dbias is None else [dbias]), workspace, *modifiers.arguments(causal),
        q.shape[3] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    dq, dk, dv = results
    return turned_back(dq, given), dk, dv, dbias


def forget() -> None:
    """Drop all plans."""
    _plans.clear()


def planned(
    op: Op,
    tensors: Sequence[Tensor],
    causal: str,
    layout: str,
    family: str | None,
    modifiers: Modifiers,
    varlen: bool = False,
) -> Plan:
    """The plan for a call on these tensors, of those that a kernel is bound to the ones that are no modifiers."""
    q, k, v = tensors[:3]
    key = (
        op, causal, layout, family, varlen, q.dtype is torch.float32 and tf32_allowed(),
        *((each.shape, each.stride(), each.dtype, each.device, each.data_ptr() & 15) for each in tensors),
        *(kind_of(each) for each in (*modifiers, *(modifiers.descales or ()))), types_of(modifiers.mod_tensors),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is not None:
        return plan
    # Imported here: rendering and reading YAML are for the first call of a kind, not for `import flashgen`.
    from flashgen.launch import laid_out, workspace_size
    from flashgen.plans import as_bhsd, select_and_bind

    plain, problem = from_tensors(q, k, v, causal=False if causal == "none" else causal, layout=layout)
    spec = replace(with_features(replace(plain, op=op), modifiers), varlen=varlen)
    places = laid_out(spec)
    main = len(laid_out(spec.plain))
    # Where sequences start and end comes last, and no kernel is bound to it.
    named = dict(zip(spec.modifiers, modifiers.arguments(causal), strict=not varlen))
    views = [*as_bhsd(layout, *tensors[:main]), *tensors[main:]]
    for name in places[len(views) :]:
        view = named[name]
        assert isinstance(view, Tensor)
        views.append(view)
    nothing = any(tensor.numel() == 0 for tensor in tensors)
    selection, bound, keep = select_and_bind(spec, problem, family, views, nothing)
    launched = op == "backward" and bound is not None
    plan = Plan(selection, bound, workspace_size(selection.variant, views[0]) if launched else 0)
    if keep:
        remember(_plans, key, plan)
    return plan
