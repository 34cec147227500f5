"""`attention()`: a small key -> a cached plan -> one launch. Nothing on this path renders, reads files or tunes."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashgen.errors import InputError, UnsupportedError
from flashgen.hardware import gpu_of
from flashgen.reference import tiled_attention
from flashgen.tensors import (
    MAX_SCALE,
    MIN_SCALE,
    causal_from,
    check_scale,
    check_tensors,
    empty_output,
    from_tensors,
    positive_scale,
    tf32_allowed,
    with_contiguous_rows,
)  # fmt: skip

if TYPE_CHECKING:
    from flashgen.launch import Bound
    from flashgen.select import Selection

CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Plans are small and quick to make again; a service that meets ever new lengths must not grow for ever.
MAX_PLANS = 8192

_NO_BACKWARD = (
    "flashgen has no backward kernel yet, but an input requires a gradient. "
    "Call under torch.no_grad(), or detach the inputs."
)


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
    bound: Bound | None
    scale: float
    out_shape: tuple[int, ...] | None
    lse_shape: tuple[int, int, int]
    copies: bool


_plans: dict[tuple[object, ...], Plan] = {}
_planning = threading.Lock()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    family: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v, by the fastest kernel known for this GPU; for CPU tensors, up to fp64, in plain torch.

    Args:
        q: [batch, heads, seq_q, head_dim], any strides; fp16, bf16 or fp32.
        k: [batch, kv_heads, seq_kv, head_dim]; query head h reads key head h // (heads // kv_heads).
        v: [batch, kv_heads, seq_kv, head_dim_v].
        causal: True or "bottom_right" shows row i the keys j <= i + (seq_kv - seq_q); "top_left" j <= i.
        scale: multiplies the scores; default head_dim ** -0.5. Used as given: 0, negative, any that fp32 can hold.
        layout: "bshd" for tensors [batch, seq, heads, head_dim]; the output has the inputs' layout.
        return_lse: return (output, lse) with the natural log-sum-exp of the scores, fp32 [batch, heads, seq_q].
        family: run this kernel family or raise; None chooses, and `flashgen.explain` says how.

    Returns:
        [batch, heads, seq_q, head_dim_v] in the inputs' dtype. A row that sees no key is 0 and its lse -inf.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: no kernel does this.
    """
    if torch.compiler.is_compiling() or not (isinstance(q, Tensor) and q.is_cuda):
        return _off_the_hot_path(q, k, v, causal, scale, layout, return_lse, family)
    try:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise UnsupportedError(_NO_BACKWARD)
        pointers = q.data_ptr() | k.data_ptr() | v.data_ptr()
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, pointers & 15, causal, layout, return_lse, family,
            q.dtype is torch.float32 and tf32_allowed(),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        # Not tensors, or options that no dict can hold: validation says which.
        from_tensors(q, k, v, causal=causal, layout=layout)
        raise
    if plan is None:
        plan = _plan(key, q, k, v, causal, layout, return_lse, family)
    if plan.copies:
        q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    if scale is None:
        scale = plan.scale
    elif not (type(scale) is float and MIN_SCALE <= scale <= MAX_SCALE):
        q, scale = positive_scale(q, scale)
        return attention(q, k, v, causal=causal, scale=scale, layout=layout, return_lse=return_lse, family=family)
    out = torch.empty_like(q) if plan.out_shape is None else q.new_empty(plan.out_shape)
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
) -> Selection:
    """Which kernel `attention` would launch for these tensors, from which file and why, and what was refused.

    Arguments as for `attention`; nothing is launched. `str()` of the result is meant for people.
    """
    from flashgen.select import select

    spec, problem = from_tensors(q, k, v, causal=causal, layout=layout)
    if not q.is_cuda:
        raise InputError(
            f"explain is about kernels on a GPU, but the tensors are on {q.device}: plain torch runs there."
        )
    return select(spec, problem, gpu_of(q.device.index), family)


def forget() -> None:
    """Drop all plans, so that newly tuned configs and changed files are seen."""
    from flashgen.select import forget_selections

    with _planning:
        forget_selections()
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
    from flashgen.launch import bind
    from flashgen.select import give_up, select

    spec, problem = from_tensors(q, k, v, causal=causal, layout=layout)
    copies = any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in (q, k, v))
    if copies:
        q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    out = empty_output(q, v)
    like_q = spec.head_dim == spec.head_dim_v and torch.empty_like(q).stride() == out.stride()
    out_shape = None if like_q else tuple(out.shape)
    with _planning:
        # A capture must not read files; what is chosen then without them is not kept for later.
        capturing = torch.cuda.is_current_stream_capturing()
        selection = select(spec, problem, gpu_of(q.device.index), family, read_files=not capturing)
        bound = None
        if out.numel():
            views = [tensor if layout == "bhsd" else tensor.transpose(1, 2) for tensor in (q, k, v, out)]
            try:
                bound = bind(selection.variant, *views)
            except UnsupportedError:
                raise
            except Exception as error:  # whatever a compiler does with a config that was tuned under another version
                if selection.method == "default":
                    raise
                selection = give_up(selection, spec, family, f"{type(error).__name__}: {error}")
                warnings.warn(f"{selection.notes[0]}. Using {selection.variant.slug}. Tune again.", stacklevel=3)
                bound = bind(selection.variant, *views)
        lse_shape = (problem.batch, problem.heads, problem.seq_q)
        plan = Plan(selection, bound, spec.head_dim**-0.5, out_shape, lse_shape, copies)
        if not capturing:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def _off_the_hot_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: object,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls that launch nothing here: traced ones become one operator, CPU tensors run in plain torch."""
    mask = causal_from(causal)
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise UnsupportedError(_NO_BACKWARD)
        # The operator validates when it runs; symbolic sizes are nothing to judge.
        traced: tuple[Tensor, Tensor] = torch.ops.flashgen.forward(q, k, v, mask, scale, layout, return_lse, family)
        return traced if return_lse else traced[0]
    check_tensors(q, k, v, layout, CPU_DTYPES)
    check_scale(scale, q.dtype)
    if q.device.type != "cpu":
        raise UnsupportedError(f"flashgen runs on CUDA and CPU tensors, but got {q.device}. Move them to one of these.")
    if family is not None:
        raise UnsupportedError(f"family={family!r} runs on a GPU, but the tensors are on the CPU. Leave family out.")
    out = empty_output(q, v)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    result, lse = tiled_attention(q, k, v, causal=mask, scale=scale)
    if result.requires_grad:
        out = result.transpose(1, 2) if layout == "bshd" else result
    else:
        out.copy_(result.transpose(1, 2) if layout == "bshd" else result)
    return (out, lse) if return_lse else out
