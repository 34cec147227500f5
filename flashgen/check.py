"""Is a kernel right? Adversarial inputs, the float64 reference, and the one tolerance rule of the project."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.reference import plain_attention
from flashgen.space import Rejection
from flashgen.spec import TORCH_DTYPES, Problem, Spec

Launch = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", float], None]

# The accept rule: error <= factor * (error of plain attention in the inputs' dtype) + floor.
FORWARD_FACTOR = 2.0
FLOOR = 1e-5
# LSE is fp32 whatever the inputs are, so plain attention in fp32 is its yardstick; 2**-21 is four units in the last
# place, for log-sum-exps of 1e5 and more, where fp32 itself is coarser than the floor.
LSE_RELATIVE = 2.0**-21


@dataclass(frozen=True)
class Case:
    """One input on which kernels have broken.

    Attributes:
        name: what it is about.
        problem: its sizes.
        magnitude: standard deviation of q; scores grow with it.
        strided: q, k, v and o are each a view of another memory order with NaN in the gaps.
    """

    name: str
    problem: Problem
    magnitude: float = 1.0
    strided: bool = False


# Lengths around 64 and 128 leave a tail in every block size; seq_q > seq_kv has rows that see nothing when causal.
CASES = (
    Case("tail", Problem(2, 2, 2, 113, 241)),
    Case("one row", Problem(2, 4, 2, 1, 129)),
    Case("empty rows", Problem(1, 3, 1, 200, 77)),
    Case("gqa, strided", Problem(2, 6, 2, 130, 190), strided=True),
    Case("large logits", Problem(1, 2, 2, 128, 256), magnitude=40.0),
    Case("long", Problem(1, 2, 1, 640, 1024)),
    # An error that compounds once per block of keys shows only over many of them.
    Case("many keys", Problem(1, 1, 1, 16, 16384), magnitude=4.0),
)
# Triton's interpreter takes about a second for 256 x 256.
SMALL_CASES = (
    Case("tail", Problem(1, 2, 2, 33, 49)),
    Case("one row", Problem(1, 2, 1, 1, 35)),
    Case("empty rows", Problem(1, 1, 1, 40, 17)),
    Case("gqa, strided", Problem(2, 3, 1, 19, 37), strided=True),
    Case("large logits", Problem(1, 1, 1, 32, 48), magnitude=40.0),
)


@dataclass(frozen=True)
class Accuracy:
    """The error of a kernel against float64 and what the accept rule allows, on the case where they are closest."""

    max_error: float
    allowed: float


@dataclass(frozen=True)
class Prepared:
    """One case's tensors, reference and allowance; made once, used by every candidate."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    allowed_o: float
    allowed_lse: float


def tensors(spec: Spec, case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a case: fresh random values, [batch, heads, seq, head_dim], views of poisoned memory if strided."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sizes = case.problem
    dtype = TORCH_DTYPES[spec.dtype]

    def draw(heads: int, seq: int, width: int, order: tuple[int, ...], magnitude: float = 1.0) -> Tensor:
        values = torch.randn(sizes.batch, heads, seq, width, generator=generator) * magnitude
        values = values.to(device, dtype)
        return strided_like(values, order) if case.strided else values

    # Each tensor has a memory order of its own: equal layouts hide swapped strides.
    q = draw(sizes.heads, sizes.seq_q, spec.head_dim, (0, 2, 1, 3), case.magnitude)
    k = draw(sizes.kv_heads, sizes.seq_kv, spec.head_dim, (2, 0, 1, 3))
    v = draw(sizes.kv_heads, sizes.seq_kv, spec.head_dim_v, (1, 0, 2, 3))
    return q, k, v


def strided_like(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values as a view whose memory has the dimensions in `order`, with NaN between and after them."""
    shape = [values.shape[axis] for axis in order]
    shape[2] += 3
    shape[3] += 16
    buffer = torch.full(shape, torch.nan, dtype=values.dtype, device=values.device)
    back = [order.index(axis) for axis in range(4)]
    view = buffer.permute(back)[tuple(slice(0, n) for n in values.shape)]
    view.copy_(values)
    return view


@functools.lru_cache(maxsize=64)
def prepare(spec: Spec, case: Case, device: str) -> Prepared:
    """Tensors, float64 reference and allowance of one case."""
    q, k, v = tensors(spec, case, device)
    wide = [tensor.double() for tensor in (q, k, v)]
    o, lse = plain_attention(*wide, causal=spec.causal)
    plain_o, plain_lse = plain_attention(q, k, v, causal=spec.causal, rounding=_rounding(spec))
    if spec.dtype != "fp32":
        _, plain_lse = plain_attention(q.float(), k.float(), v.float(), causal=spec.causal)
    finite = lse.isfinite()
    largest = lse[finite].abs().max().item() if finite.any() else 0.0
    return Prepared(
        case, q, k, v, o, lse,
        allowed_o=FORWARD_FACTOR * max_error(plain_o, o) + FLOOR,
        allowed_lse=FORWARD_FACTOR * max_error(plain_lse, lse) + FLOOR + LSE_RELATIVE * largest,
    )  # fmt: skip


def _rounding(spec: Spec) -> Callable[[Tensor], Tensor]:
    """What tensor cores make of a product's operands: TF32 drops all but 10 bits of fp32's mantissa."""
    if spec.precision != "tf32":
        return lambda operand: operand
    return lambda operand: (operand.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; equal infinities differ by 0, and a NaN anywhere makes it infinite."""
    difference = (actual.double() - expected.double()).abs()
    difference = difference.masked_fill(actual.double() == expected.double(), 0.0)
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item() if difference.numel() else 0.0


def check(launch: Launch, spec: Spec, device: str, cases: Sequence[Case] = CASES) -> Accuracy | Rejection:
    """Run a kernel on every case, twice, into NaN-filled outputs.

    Returns:
        The tightest Accuracy, or a Rejection naming case, error and allowance.
    """
    passed: list[Accuracy] = []
    for case in cases:
        prepared = prepare(spec, case, device)
        first, second = _run(launch, spec, prepared), _run(launch, spec, prepared)
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
            return Rejection("check", "not repeatable", f"{case.name}: two runs on the same input differ")
        errors = (
            ("output", max_error(first[0], prepared.o), prepared.allowed_o),
            ("lse", max_error(first[1], prepared.lse), prepared.allowed_lse),
        )
        for name, error, allowed in errors:
            if not error <= allowed:
                sizes = prepared.case.problem
                return Rejection(
                    "check",
                    "wrong numbers",
                    f"{case.name}: {name} is off by {error:.3g}, allowed {allowed:.3g} ({spec.slug}, {sizes})",
                )
        passed.append(Accuracy(errors[0][1], errors[0][2]))
    return max(passed, key=lambda accuracy: accuracy.max_error / accuracy.allowed)


def _run(launch: Launch, spec: Spec, prepared: Prepared) -> tuple[Tensor, Tensor]:
    sizes = prepared.case.problem
    shape = (sizes.batch, sizes.heads, sizes.seq_q, spec.head_dim_v)
    o = torch.full(shape, torch.nan, dtype=prepared.q.dtype, device=prepared.q.device)
    if prepared.case.strided:
        o = strided_like(o, (2, 1, 0, 3))
    lse = torch.full(shape[:3], torch.nan, dtype=torch.float32, device=prepared.q.device)
    launch(prepared.q, prepared.k, prepared.v, o, lse, spec.head_dim**-0.5)
    return o, lse
