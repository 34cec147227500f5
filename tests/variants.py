"""Variants for the tests of rendering and compiling, and tasks that child processes run on them."""

from __future__ import annotations

import hashlib
from typing import Any

from flashgen.compile import compile_kernel, compile_resources, kernel_resources
from flashgen.families import FAMILIES, Variant
from flashgen.families.hopper_bwd import HOPPER_BWD
from flashgen.families.hopper_bwd_fused import HOPPER_BWD_FUSED
from flashgen.families.hopper_fwd import HOPPER_FWD
from flashgen.hardware import Gpu
from flashgen.resources import Resources
from flashgen.space import Config
from flashgen.spec import Spec

TRITON_FWD, TRITON_BWD = FAMILIES["triton_fwd"], FAMILIES["triton_bwd"]
TRITON_DECODE = FAMILIES["triton_decode"]


def variant(
    spec: Spec,
    block_q: int = 64,
    block_kv: int = 32,
    num_warps: int = 4,
    num_stages: int = 2,
    *,
    index_bits: int = 32,
    advance: int = 0,
) -> Variant:
    """A variant of `triton_fwd`."""
    config = Config(
        block_q=block_q,
        block_kv=block_kv,
        num_warps=num_warps,
        num_stages=num_stages,
        index_bits=index_bits,
        advance=advance,
    )
    return Variant(TRITON_FWD, spec, config)


# What scores can go through in both directions; the bias in another type than the inputs.
EXPRESSIONS: dict[str, Any] = {
    "score_mod": "((score * score) + mod0[head, (kv_idx - q_idx)])",
    "mask_mod": "((kv_idx <= q_idx) | (kv_idx < mod1[batch]))",
    "mod_tensors": "bf16[2] int64[1]",
}
EVERYTHING: dict[str, Any] = {
    "softcap": True, "alibi": True, "bias": "fp32", "window": True, "mask": True, "segments": True,
}  # fmt: skip

# One golden file each; all of them run on sm_80 and sm_90.
GOLDEN = (
    variant(Spec(dtype="bf16"), 128, 64, 8, 3),
    variant(Spec(dtype="bf16", causal="bottom_right"), 128, 64, 8, 2, index_bits=64, advance=1),
    variant(Spec(head_dim=64, head_dim_v=64, dtype="fp16", causal="top_left"), 128, 64, 4, 3, advance=1),
    variant(Spec(head_dim=72, head_dim_v=40, dtype="fp16", causal="bottom_right"), 64, 32, 4, 2, index_bits=64),
    variant(Spec(head_dim=64, head_dim_v=64, dtype="fp32"), 32, 32, 4, 2),
    variant(Spec("forward", 64, 64, "bf16", "bottom_right", **EVERYTHING, sinks=True), 64, 32, 4, 2),
    variant(Spec("forward", 64, 64, "fp16", softcap=True, window=True), 128, 64, 8, 2, advance=1),
    variant(Spec("forward", 64, 64, "bf16", dropout=True), 128, 64, 8, 2),
    variant(Spec("forward", 64, 64, "bf16", **EXPRESSIONS), 64, 64, 4, 2),
)


def compiled_hash(which: Variant, gpu: Gpu) -> str:
    """The machine code of a variant, as a hash."""
    return hashlib.sha256(compile_kernel(which, gpu).asm["cubin"]).hexdigest()


def backward(spec: Spec, dkdv: tuple[int, int, int, int], dq: tuple[int, int, int, int]) -> Variant:
    """A variant of `triton_bwd`; for each kernel (block_q, block_kv, num_warps, num_stages)."""
    return Variant(TRITON_BWD, spec, Config(**dict(zip(TRITON_BWD.choices, (*dkdv, *dq), strict=True))))


BACKWARD_GOLDEN = (
    backward(Spec("backward", 64, 64, "bf16", "bottom_right"), (64, 128, 8, 2), (128, 64, 8, 2)),
    backward(Spec("backward", 72, 40, "fp16"), (32, 128, 8, 3), (64, 32, 4, 2)),
    # Wide heads: one sum after the other.
    backward(Spec("backward", 256, 256, "bf16"), (32, 64, 4, 2), (64, 32, 4, 2)),
    backward(Spec("backward", 64, 64, "bf16", "bottom_right", **EVERYTHING), (32, 64, 4, 2), (64, 32, 4, 2)),
    backward(Spec("backward", 64, 64, "fp16", softcap=True, window=True), (64, 128, 8, 2), (128, 64, 8, 2)),
    backward(Spec("backward", 64, 64, "bf16", dropout=True), (32, 128, 8, 2), (64, 64, 4, 2)),
    backward(Spec("backward", 64, 64, "bf16", **EXPRESSIONS), (32, 64, 4, 2), (64, 32, 4, 2)),
)


def hopper(spec: Spec, *numbers: int, resident: int = 1, pack: int = 0) -> Variant:
    """A variant of `hopper_fwd`, its other choices in their order."""
    return Variant(HOPPER_FWD, spec, Config(**dict(zip(HOPPER_FWD.choices, (*numbers, resident, pack), strict=True))))


HOPPER_GOLDEN = (
    hopper(Spec(dtype="bf16"), 2, 128, 2, 1, 1, 0, 0),
    hopper(Spec(dtype="bf16", causal="bottom_right"), 2, 128, 2, 1, 1, 1, 0),
    hopper(Spec(head_dim=64, head_dim_v=64, dtype="fp16"), 3, 128, 2, 1, 0, 0, 0),
    hopper(Spec(head_dim=256, head_dim_v=256, dtype="bf16", causal="top_left"), 2, 64, 2, 0, 0, 1, 1),
    hopper(Spec(head_dim=72, head_dim_v=40, dtype="fp16", causal="bottom_right"), 2, 128, 2, 2, 0, 1, 0),
    hopper(Spec(head_dim=64, head_dim_v=64, dtype="bf16", causal="bottom_right"), 1, 128, 2, 2, 0, 0, 0, resident=2),
    hopper(Spec(head_dim=64, head_dim_v=64, dtype="bf16"), 1, 64, 2, 1, 1, 0, 0, resident=3),
    hopper(
        Spec(head_dim=64, head_dim_v=64, dtype="fp16", causal="bottom_right"), 1, 64, 2, 1, 1, 0, 0, resident=2, pack=1
    ),
    hopper(Spec(dtype="fp8"), 2, 128, 3, 1, 1, 1, 0),
    hopper(Spec(dtype="fp8", causal="bottom_right", descale="block"), 2, 128, 3, 2, 1, 1, 0, pack=1),
    hopper(Spec(head_dim=64, head_dim_v=48, dtype="fp8", causal="top_left", descale="head"), 3, 64, 3, 2, 0, 0, 0),
)


def hopper_resources(which: int, gpu: Gpu) -> Resources:
    """What a golden file of `hopper_fwd` compiles to, for heads in groups of 4."""
    return kernel_resources(HOPPER_GOLDEN[which], gpu, "kernel", group=4)


def hopper_backward(spec: Spec, *numbers: int) -> Variant:
    """A variant of `hopper_bwd`, its choices in their order."""
    return Variant(HOPPER_BWD, spec, Config(**dict(zip(HOPPER_BWD.choices, numbers, strict=True))))


HOPPER_BACKWARD_GOLDEN = (
    hopper_backward(Spec("backward", dtype="bf16", causal="bottom_right"), 64, 2, 2, 128, 2, 2),
    hopper_backward(Spec("backward", 64, 64, "fp16"), 128, 2, 2, 128, 2, 2),
    hopper_backward(Spec("backward", 72, 40, "fp16", "top_left"), 64, 3, 2, 64, 3, 2),
    # Wide heads: one sum after the other.
    hopper_backward(Spec("backward", 256, 256, "bf16", "bottom_right"), 64, 2, 1, 64, 2, 1),
)


def hopper_backward_resources(which: int, gpu: Gpu) -> tuple[Resources, ...]:
    """What a golden file of `hopper_bwd` compiles to."""
    return compile_resources(HOPPER_BACKWARD_GOLDEN[which], gpu)


def hopper_backward_fused(spec: Spec, *numbers: int) -> Variant:
    """A variant of `hopper_bwd_fused`, its choices in their order."""
    return Variant(HOPPER_BWD_FUSED, spec, Config(**dict(zip(HOPPER_BWD_FUSED.choices, numbers, strict=True))))


HOPPER_BACKWARD_FUSED_GOLDEN = (
    hopper_backward_fused(Spec("backward", dtype="bf16", causal="bottom_right"), 0, 1, 1, 0, 0),
    hopper_backward_fused(Spec("backward", dtype="bf16"), 0, 1, 1, 0, 1),
    hopper_backward_fused(Spec("backward", 64, 64, "fp16"), 1, 0, 0, 1, 1),
    hopper_backward_fused(Spec("backward", 72, 40, "fp16", "top_left"), 1, 1, 1, 1, 0),
)


def hopper_backward_fused_resources(which: int, gpu: Gpu) -> tuple[Resources, ...]:
    """What a golden file of `hopper_bwd_fused` compiles to."""
    return compile_resources(HOPPER_BACKWARD_FUSED_GOLDEN[which], gpu)


def decode(spec: Spec, *numbers: int) -> Variant:
    """A variant of `triton_decode`, its choices in their order."""
    return Variant(TRITON_DECODE, spec, Config(**dict(zip(TRITON_DECODE.choices, numbers, strict=True))))


# What a spec of decode can have.
SERVED: dict[str, Any] = {
    "softcap": True, "alibi": True, "window": True, "sinks": True, "varlen": True, "paged": True, "appended": True,
}  # fmt: skip
DECODE_GOLDEN = (
    decode(Spec("decode", dtype="bf16", causal="bottom_right"), 64, 64, 4, 4, 2),
    decode(Spec("decode", 64, 64, "fp16", paged=True), 64, 128, 8, 3, 1),
    decode(Spec("decode", 72, 40, "bf16", "bottom_right", **SERVED), 32, 64, 4, 3, 2),
    decode(Spec("decode", dtype="bf16", paged=True, cache="int8", descale="token"), 16, 64, 4, 3, 2),
    decode(Spec("decode", 64, 64, "fp32", appended=True), 16, 64, 4, 2, 2),
    decode(Spec("decode", 576, 512, "bf16", "bottom_right", paged=True), 16, 32, 8, 2, 1),
)
