"""A call of attention: a small key -> a cached plan -> one launch. Nothing on this path renders, reads or tunes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashgen.cpu import attend_on_cpu
from flashgen.descales import FP8, Descales, Number, check_descales, descales_from
from flashgen.errors import InputError
from flashgen.expressions.given import written
from flashgen.gradients import forget as forget_gradients
from flashgen.gradients import remember
from flashgen.kvcache import forget as forget_kvcache
from flashgen.modified import attend as attend_modified
from flashgen.modified import forget as forget_modified
from flashgen.modifiers import Options, modifiers_from
from flashgen.spec import Op
from flashgen.tensors import (
    CPU_DTYPES,
    MAX_SCALE,
    MIN_SCALE,
    causal_from,
    check_device,
    check_scale,
    check_tensors,
    empty_output,
    from_tensors,
    has_contiguous_rows,
    has_memory,
    positive_scale,
    tf32_allowed,
    with_contiguous_rows,
    with_features,
)  # fmt: skip

if TYPE_CHECKING:
    from flashgen.select import Selection


@dataclass(frozen=True)
class Plan:
    """What one kind of call needs.

    Attributes:
        selection: the variant and why it was chosen.
        bound: the kernel bound to this layout; None when there is nothing to compute.
        scale: the default softmax scale.
        out_shape: shape of a contiguous output; None for one in q's own memory order.
        lse_shape: [batch, heads, seq_q].
        copies: a tensor's last dimension is strided, so it is copied first.
    """

    selection: Selection
    bound: Callable[..., None] | None
    scale: float
    out_shape: tuple[int, ...] | None
    lse_shape: tuple[int, int, int]
    copies: bool


_plans: dict[tuple[object, ...], Plan] = {}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flashgen.attention` without autograd, autocast and tracing: the hot path.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: no kernel does this.
        RuntimeError: from torch, for a tensor without memory: a fake one, or one that vmap wraps.
    """
    if not q.is_cuda:
        check_device(q.device, family)
        check_tensors(q, k, v, layout, CPU_DTYPES)
        check_scale(scale, q.dtype)
        result = attend_on_cpu(q, k, v, causal_from(causal), scale, layout)
        return result if return_lse else result[0]
    try:
        q_pointer, k_pointer, v_pointer = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not (q_pointer and k_pointer and v_pointer) and not has_memory(q, k, v):
            raise RuntimeError("a tensor has no memory of its own")
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, q_pointer & 15, k_pointer & 15, v_pointer & 15, causal, layout, return_lse,
            family, q.dtype is torch.float32 and tf32_allowed(),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        # Not tensors, or options that no dict can hold: validation says which.
        from_tensors(q, k, v, causal=causal, layout=layout)
        raise
    if plan is None:
        if q.dtype is FP8:
            # Its plans are those of calls with descales.
            given = (causal_from(causal), scale, layout, return_lse, family, Options(), Descales())
            result = attend_modified(q, k, v, *given)
            return result if return_lse else result[0]
        plan = _plan(key, q, k, v, causal, layout, return_lse, family)
    if scale is None:
        scale = plan.scale
    elif not (type(scale) is float and MIN_SCALE <= scale <= MAX_SCALE):
        q, scale = positive_scale(q, scale)
        return attend(q, k, v, causal, scale, layout, return_lse, family)
    out = torch.empty_like(q) if plan.out_shape is None else q.new_empty(plan.out_shape)
    if plan.copies:
        q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device) if return_lse else None
    if plan.bound is not None:
        plan.bound(q, k, v, out, lse, scale)
    return out if lse is None else (out, lse)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    layout: str = "bhsd",
    family: str | None = None,
    op: Op = "forward",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    segment_ids_q: Tensor | None = None,
    segment_ids_kv: Tensor | None = None,
    score_mod: object = None,
    mask_mod: object = None,
    mod_tensors: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0,
    dropout_seed: object = None,
    generator: torch.Generator | None = None,
    descale_q: Number | None = None,
    descale_k: Number | None = None,
    descale_v: Number | None = None,
) -> Selection:
    """Which kernel `attention` would launch for these tensors, from which file and why, and what was refused.

    Arguments as for `attention`; nothing is launched. `op="backward"` explains the kernel for its gradients, which
    `attention` chooses on its own. `str()` of the result is meant for people.
    """
    from flashgen.plans import select_for

    spec, problem = from_tensors(q, k, v, causal=causal, layout=layout)
    if not q.is_cuda:
        raise InputError(
            f"explain is about kernels on a GPU, but the tensors are on {q.device}: plain torch runs there."
        )
    seed = q.new_empty(2, dtype=torch.int64)  # whatever it is, and whatever was given
    options = Options(
        softcap, alibi_slopes, bias, window, mask, segment_ids_q, segment_ids_kv, dropout_p, seed, sinks,
        *written(score_mod, mask_mod, mod_tensors),
    )  # fmt: skip
    modifiers = modifiers_from((problem.batch, problem.heads, problem.seq_q, problem.seq_kv), q, options)
    descales = Descales(descale_q, descale_k, descale_v)
    check_descales(q, descales)
    heads, lengths = (problem.batch, problem.heads, problem.kv_heads), (problem.seq_q, problem.seq_kv)
    modifiers = modifiers._replace(descales=descales_from(heads, lengths, q, descales) if q.dtype == FP8 else None)
    spec = with_features(replace(spec, op=op), modifiers)
    return select_for(spec, problem, family, [with_contiguous_rows(each) for each in (q, k, v)])


def forget() -> None:
    """Drop all plans, so that newly tuned configs and changed files are seen."""
    from flashgen.select import forget_selections

    forget_selections()
    forget_gradients()
    forget_modified()
    forget_kvcache()
    _plans.clear()


def _plan(
    key: tuple[object, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: object,
    layout: str,
    return_lse: bool,
    family: str | None,
) -> Plan:
    """Validate, select, compile and bind; remembered under the key."""
    # Imported here: rendering and reading YAML are for the first call of a kind, not for `import flashgen`.
    from flashgen.plans import as_bhsd, select_and_bind

    spec, problem = from_tensors(q, k, v, causal=causal, layout=layout)
    out = empty_output(q, v)
    like_q = spec.head_dim == spec.head_dim_v and torch.empty_like(q).stride() == out.stride()
    out_shape = None if like_q else tuple(out.shape)
    copies = not all(has_contiguous_rows(tensor) for tensor in (q, k, v))
    if copies:
        q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    selection, bound, keep = select_and_bind(spec, problem, family, as_bhsd(layout, q, k, v, out), out.numel() == 0)
    lse_shape = (problem.batch, problem.heads, problem.seq_q)
    plan = Plan(selection, bound, spec.head_dim**-0.5, out_shape, lse_shape, copies)
    if keep:
        remember(_plans, key, plan)
    return plan
