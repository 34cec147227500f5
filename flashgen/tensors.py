"""A caller's tensors and options -> Spec and Problem; the only place that judges them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor

from flashgen.descales import FP8
from flashgen.errors import InputError, UnsupportedError
from flashgen.expressions.given import types_of
from flashgen.modifiers import Modifiers
from flashgen.problem import Problem
from flashgen.spec import DTYPE_NAMES, BiasDType, Causal, Descale, Layout, Spec

# fp8 is taken where descales are, forward only.
GPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES = (*GPU_DTYPES, torch.float64)
# Normal fp32 numbers with room for the factor log2(e), and for a log-sum-exp in units of scores before their scale.
MIN_SCALE, MAX_SCALE = 2.0**-100, 2.0**126


def causal_from(value: object) -> Causal:
    """Translate the public `causal=` argument: False, True (bottom-right), or the alignment's name."""
    if isinstance(value, str):
        if value in ("bottom_right", "top_left"):
            return cast(Causal, value)
    elif value is not None and value in (0, 1):
        return "bottom_right" if value else "none"
    raise InputError(f"causal must be False, True, 'bottom_right' or 'top_left', but got {value!r}.")


def check_scale(scale: object, dtype: torch.dtype) -> None:
    """Refuse a softmax scale that is no finite number, or out of the range in which fp32 holds all that kernels need.

    None means head_dim ** -0.5.
    """
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) < math.inf:
        raise InputError(f"scale must be None or a finite number, but got {scale!r}.")
    if dtype != torch.float64 and scale != 0 and not MIN_SCALE <= abs(scale) <= MAX_SCALE:
        raise InputError(
            f"the scale of {dtype} inputs must be 0 or between {MIN_SCALE:.3g} and {MAX_SCALE:.3g} in size, "
            f"but got {scale!r}. Scale q instead."
        )


def tf32_allowed() -> bool:
    """Whether the caller lets fp32 matmuls round to TF32; torch's old and new switches both set what is read here."""
    matmul: Any = torch.backends.cuda.matmul
    return bool(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


def check_device(device: torch.device, family: str | None) -> None:
    """Refuse devices that nothing runs on, and a kernel family by name where no kernel runs."""
    if device.type not in ("cuda", "cpu"):
        raise UnsupportedError(f"flashgen runs on CUDA and CPU tensors, but got {device}. Move them to one of these.")
    if family is not None and device.type == "cpu":
        raise UnsupportedError(f"family={family!r} runs on a GPU, but the tensors are on the CPU. Leave family out.")


def check_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    dtypes: Collection[torch.dtype],
) -> Problem:
    """Validate the tensors of one call and return its sizes; shapes as in `from_tensors`.

    Raises:
        InputError: rank, dtype, device, shape or head counts do not fit together.
    """
    named = {"q": q, "k": k, "v": v}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} must be a torch.Tensor, but got {type(tensor).__name__}.")
        if tensor.dim() != 4:
            raise InputError(
                f"{name} must have 4 dimensions [batch, heads, seq, head_dim], but got shape {tuple(tensor.shape)}. "
                "Add the missing dimensions with unsqueeze, or pass layout='bshd' for [batch, seq, heads, head_dim]."
            )
    if layout not in get_args(Layout):
        raise InputError(f"layout must be 'bhsd' or 'bshd', but got {layout!r}.")
    _check_same(named, "dtype", "Cast them to one.")
    _check_same(named, "device", "Move them to one device.")
    if q.dtype not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise InputError(f"dtype must be one of {names} on {q.device.type}, but got {q.dtype}. Cast q, k and v.")

    seq_axis, head_axis = (2, 1) if layout == "bhsd" else (1, 2)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InputError(f"q, k and v must have one batch size, but got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}.")
    for axis, what in ((head_axis, "heads"), (seq_axis, "length")):
        if k.shape[axis] != v.shape[axis]:
            raise InputError(
                f"k and v must agree in {what}, but got {k.shape[axis]} and {v.shape[axis]} (layout={layout!r})."
            )
    if q.shape[3] != k.shape[3] or 0 in (q.shape[3], v.shape[3]):
        raise InputError(
            "q and k must have one head_dim and all head dims must be at least 1, "
            f"but got q {q.shape[3]}, k {k.shape[3]} and v {v.shape[3]}."
        )
    return Problem(q.shape[0], q.shape[head_axis], k.shape[head_axis], q.shape[seq_axis], k.shape[seq_axis])


def from_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: object = False,
    layout: str = "bhsd",
) -> tuple[Spec, Problem]:
    """Validate one call and say what a kernel has to compute for it.

    Args:
        q: [batch, heads, seq_q, head_dim] (`layout="bshd"`: [batch, seq_q, heads, head_dim]).
        k: [batch, kv_heads, seq_kv, head_dim] in the same layout.
        v: [batch, kv_heads, seq_kv, head_dim_v] in the same layout.
        causal: False, True, "bottom_right" or "top_left".
        layout: order of the four dimensions.

    Raises:
        InputError: the tensors or an option do not fit together.
    """
    problem = check_tensors(q, k, v, layout, DTYPE_NAMES.keys())
    tf32 = q.dtype == torch.float32 and tf32_allowed()
    spec = Spec(
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=DTYPE_NAMES[q.dtype],
        causal=causal_from(causal),
        precision="tf32" if tf32 else "ieee",
    )
    return spec, problem


def with_features(spec: Spec, modifiers: Modifiers) -> Spec:
    """The spec of the same call with these modifiers; of a backward without the sinks, which need no kernel there."""
    return replace(
        spec,
        softcap=modifiers.softcap is not None,
        alibi=modifiers.alibi_slopes is not None,
        bias="none" if modifiers.bias is None else cast(BiasDType, DTYPE_NAMES[modifiers.bias.dtype]),
        window=modifiers.window is not None,
        mask=modifiers.mask is not None,
        segments=modifiers.segment_ids_q is not None,
        dropout=modifiers.dropout is not None,
        sinks=modifiers.sinks is not None and spec.op != "backward",
        score_mod=modifiers.score_mod or "none",
        mask_mod=modifiers.mask_mod or "none",
        mod_tensors=" ".join(f"{name}[{rank}]" for name, rank in types_of(modifiers.mod_tensors)) or "none",
        descale=_descale(modifiers),
    )


def _descale(modifiers: Modifiers) -> Descale:
    """What has a descale of its own; all three of them have one form."""
    first = None if modifiers.descales is None else modifiers.descales.q
    if not isinstance(first, Tensor):
        return "tensor"
    return "head" if first.dim() == 2 else "block"


def _check_same(named: dict[str, torch.Tensor], attribute: str, way_out: str) -> None:
    values = {name: getattr(tensor, attribute) for name, tensor in named.items()}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name} {value}" for name, value in values.items())
        raise InputError(f"q, k and v must share one {attribute}, but got {listed}. {way_out}")


def has_contiguous_rows(tensor: Tensor) -> bool:
    """Whether the last dimension is contiguous; of a single column any stride is."""
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def with_contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it when its last dimension is strided."""
    return tensor if has_contiguous_rows(tensor) else tensor.contiguous()


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale, which the kernels need: their maximum is that of the unscaled scores."""
    check_scale(scale, q.dtype)
    if scale == 0:
        return torch.zeros_like(q), 1.0
    if scale > 0:
        return q, float(scale)
    # torch has no arithmetic of fp8: the sign is the first bit.
    return (q.view(torch.uint8).bitwise_xor(128).view(FP8) if q.dtype == FP8 else -q), -float(scale)


def turned_back(dq: Tensor, scale: float | None) -> Tensor:
    """The gradient of q from that of the q that `positive_scale` made of it."""
    return dq if scale is None or scale > 0 else -dq if scale < 0 else dq.zero_()


def has_memory(*tensors: Tensor) -> bool:
    """Whether all tensors have data to point to; fake ones, those that vmap wraps and many subclasses have none."""
    try:
        return all(tensor.data_ptr() != 0 or tensor.numel() == 0 for tensor in tensors)
    except RuntimeError:
        return False


def as_autocast(tensor: Tensor, device: str) -> Tensor:
    """The tensor in autocast's dtype, as SDPA takes it: everything but fp64 is cast, and fp8, which has descales."""
    if tensor.device.type != device or not tensor.is_floating_point() or tensor.dtype in (torch.float64, FP8):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def empty_gradient(tensor: Tensor) -> Tensor:
    """The uninitialised gradient of a tensor: in its memory order, with contiguous rows."""
    gradient = torch.empty_like(tensor)
    return gradient if has_contiguous_rows(gradient) else tensor.new_empty(tensor.shape)


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """The uninitialised output of a call: q's memory order where v is as wide as q, else contiguous.

    Kernels write rows that are contiguous; where rows of q overlap, `empty_like` may lay out another dimension last.
    That of fp8 inputs is bf16.
    """
    dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    if q.shape[-1] == v.shape[-1]:
        out = torch.empty_like(q, dtype=dtype)
        if has_contiguous_rows(out):
            return out
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


def summed(gradient: Tensor | None, like: Tensor | None, q: Tensor) -> Tensor:
    """The gradient of what was broadcast; empty where nobody wants it."""
    # torch adds 16-bit numbers up in fp32.
    return q.new_empty(0) if gradient is None or like is None else gradient.sum_to_size(like.shape).to(like.dtype)
