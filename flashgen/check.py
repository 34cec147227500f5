"""Is a kernel right? Adversarial inputs, the float64 reference, and the one tolerance rule of the project."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.cases import CASES, Case, modifiers, strided_like, tensors
from flashgen.descales import dequantised
from flashgen.modifiers import NOTHING, Modifiers
from flashgen.reference import plain_attention
from flashgen.reference_backward import tiled_backward
from flashgen.space import Rejection
from flashgen.spec import TORCH_DTYPES, Spec

# Takes flashgen.launch.arguments_of the spec, without the workspace.
Launch = Callable[..., None]

# The accept rule: error <= factor * (error of plain attention in the inputs' dtype) + floor. That of fp8 inputs is in
# fp32 on what they stand for, with scores summed in 14 bits as tensor cores do, P rounded to e4m3 as kernels round it,
# and the output to bf16.
FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
FLOOR = 1e-5
# LSE is fp32 whatever the inputs are, so plain attention in fp32 is its yardstick; 2**-21 is four units in the last
# place, for log-sum-exps of 1e5 and more, where fp32 itself is coarser than the floor. A backward recomputes P from it:
# its relative error is LSE's absolute one, which plain attention, dividing by its own sum, does not have.
LSE_RELATIVE = 2.0**-21


@dataclass(frozen=True)
class Accuracy:
    """The error of a kernel against float64 and what the accept rule allows, on the case where they are closest."""

    max_error: float
    allowed: float


@dataclass(frozen=True)
class Expected:
    """One result of a kernel: its true value, in float64, and how far a kernel may be off."""

    name: str
    value: Tensor
    allowed: float


@dataclass(frozen=True)
class Prepared:
    """One case's inputs and expected results; made once, used by every candidate.

    Attributes:
        inputs: q, k, v; of a backward also o, lse, dO and dLSE.
        expected: o and lse, or dq, dk, dv and, where there is a bias, dbias.
        modifiers: what else the scores go through.
    """

    case: Case
    inputs: tuple[Tensor, ...]
    expected: tuple[Expected, ...]
    modifiers: Modifiers = NOTHING


@functools.lru_cache(maxsize=64)
def prepare(spec: Spec, case: Case, device: str) -> Prepared:
    """Inputs, float64 reference and allowances of one case."""
    return _prepare_forward(spec, case, device) if spec.op == "forward" else _prepare_backward(spec, case, device)


def _prepare_forward(spec: Spec, case: Case, device: str) -> Prepared:
    q, k, v = tensors(spec, case, device)
    shaping = modifiers(spec, case, device, q)
    wide = shaping.to(Tensor.double)
    o, lse = plain_attention(*_widened(torch.float64, q, k, v, shaping), causal=spec.causal, modifiers=wide)
    if spec.dtype == "fp8":
        plain_o, plain_lse = plain_attention(
            *_widened(torch.float32, q, k, v, shaping), causal=spec.causal, fp8=True, modifiers=shaping,
        )  # fmt: skip
        plain_o = plain_o.to(TORCH_DTYPES[spec.out_dtype])
    else:
        plain_o, plain_lse = plain_attention(q, k, v, causal=spec.causal, rounding=_rounding(spec), modifiers=shaping)
    if spec.dtype not in ("fp32", "fp8"):
        _, plain_lse = plain_attention(q.float(), k.float(), v.float(), causal=spec.causal, modifiers=shaping)
    expected = expected_of((o, lse), plain_o, plain_lse)
    return Prepared(case, (q, k, v), expected, shaping)


def expected_of(true: tuple[Tensor, Tensor], plain_o: Tensor, plain_lse: Tensor) -> tuple[Expected, Expected]:
    """Output and log-sum-exp of a forward; plain attention's, in the inputs' dtype and in fp32, say what is allowed."""
    o, lse = true
    finite = LSE_RELATIVE * _largest(lse[lse.isfinite()])
    return (
        Expected("output", o, FORWARD_FACTOR * max_error(plain_o, o) + FLOOR),
        Expected("lse", lse, FORWARD_FACTOR * max_error(plain_lse, lse) + FLOOR + finite),
    )


def _widened(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, shaping: Modifiers) -> list[Tensor]:
    """q, k and v in a wider dtype, fp8 times its descales."""
    numbers = [1.0 if each is None else each for each in shaping.descales or (None, None, None)]
    return [dequantised(*each, dtype) for each in zip((q, k, v), numbers, strict=True)]


def _prepare_backward(spec: Spec, case: Case, device: str) -> Prepared:
    q, k, v = tensors(spec, case, device)
    shaping = modifiers(spec, case, device, q)
    wide = shaping.to(Tensor.double)
    wide_o, wide_lse = plain_attention(q.double(), k.double(), v.double(), causal=spec.causal, modifiers=wide)
    # As wide as the output; another seed than that of q, k and v, and a gradient for the log-sum-exp too.
    generator = torch.Generator(device="cpu").manual_seed(1)
    do = torch.randn(wide_o.shape, generator=generator).to(device, q.dtype)
    dlse = torch.randn(wide_lse.shape, generator=generator).to(device)
    o, lse = wide_o.to(q.dtype), wide_lse.float()
    if spec.precision == "tf32":
        # Its forward has the same coarse scores, and where they are large only its own log-sum-exp normalises them.
        o, lse = plain_attention(q, k, v, causal=spec.causal, rounding=_rounding(spec), modifiers=shaping)
    if case.strided:
        o, do = strided_like(o, (1, 2, 0, 3)), strided_like(do, (2, 0, 1, 3))
    true = _gradients((q.double(), k.double(), v.double()), do.double(), dlse.double(), spec.causal, wide)
    plain = _gradients((q, k, v), do, dlse, spec.causal, shaping, _rounding(spec))
    relative = LSE_RELATIVE * _largest(wide_lse[wide_lse.isfinite()])
    rounded = [0.0] * len(true)
    if shaping.dropout is not None:
        # A kernel has the rounded output in delta, which plain attention does without. Where nothing is dropped, a row
        # of one key has its value, which is not rounded; here it is divided by 1 - p.
        wide_inputs = (q.double(), k.double(), v.double(), o.double(), wide_lse, do.double(), dlse.double())
        found = tiled_backward(*wide_inputs, causal=spec.causal, modifiers=wide)
        rounded = [
            max_error(mine, value) for mine, value in zip(found[: len(true)], true, strict=True) if mine is not None
        ]
    names = ("dq", "dk", "dv") if shaping.bias is None else ("dq", "dk", "dv", "dbias")
    expected = tuple(
        Expected(name, value, GRADIENT_FACTOR * max_error(other, value) + own + FLOOR + relative * _largest(value))
        for name, value, other, own in zip(names, true, plain, rounded, strict=True)
    )
    return Prepared(case, (q, k, v, o, lse, do, dlse), expected, shaping)


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _gradients(
    inputs: tuple[Tensor, ...],
    do: Tensor,
    dlse: Tensor,
    causal: str,
    shaping: Modifiers,
    rounding: Callable[[Tensor], Tensor] = lambda operand: operand,
) -> tuple[Tensor, ...]:
    """By torch's autograd, every product in the dtype of its operands; that of the bias comes last, unsummed."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    if shaping.bias is not None:
        bias = shaping.bias.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        leaves.append(bias)
        shaping = shaping._replace(bias=bias)
    with torch.enable_grad():
        o, lse = plain_attention(*leaves[:3], causal=causal, rounding=rounding, modifiers=shaping)
        # A row that sees no key has a log-sum-exp of -inf, whose gradient autograd would make NaN.
        seen = lse.isfinite()
        return torch.autograd.grad((o, lse[seen]), leaves, (do, dlse.to(lse.dtype)[seen]))


def _rounding(spec: Spec) -> Callable[[Tensor], Tensor]:
    """What tensor cores make of a product's operands: TF32 drops all but 10 bits of fp32's mantissa."""
    if spec.precision != "tf32":
        return lambda operand: operand

    def truncated(operand: Tensor) -> Tensor:
        # The difference is a constant: gradients pass as through a rounding.
        low = operand - (operand.detach().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        return operand - low.detach()

    return truncated


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
        found = compared(case.name, first, second, prepared.expected, f"{spec.slug}, {case.problem}")
        if isinstance(found, Rejection):
            return found
        passed += found
    return max(passed, key=lambda accuracy: accuracy.max_error / accuracy.allowed)


def compared(
    name: str, first: Sequence[Tensor], second: Sequence[Tensor], expected: Sequence[Expected], what: str
) -> list[Accuracy] | Rejection:
    """The accuracy of each result of one case but the log-sum-exp, or why two runs are not right."""
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
        return Rejection("check", "not repeatable", f"{name}: two runs on the same input differ")
    passed = []
    for actual, each in zip(first, expected, strict=True):
        error = max_error(actual, each.value)
        if not error <= each.allowed:
            reason = f"{name}: {each.name} is off by {error:.3g}, allowed {each.allowed:.3g} ({what})"
            return Rejection("check", "wrong numbers", reason)
        if each.name != "lse":
            passed.append(Accuracy(error, each.allowed))
    return passed


def _run(launch: Launch, spec: Spec, prepared: Prepared) -> list[Tensor]:
    """The results of one launch, each written over NaN, a strided one in memory of yet another order."""
    results = [
        # Contiguous, whatever order autograd gave the true values.
        torch.full(
            each.value.shape,
            torch.nan,
            dtype=_dtype(each.name, spec, prepared),
            device=each.value.device,
        )
        for each in prepared.expected
    ]
    for index, each in enumerate(prepared.expected):
        if each.name == "dbias":
            # Blocks that nothing reaches are not written.
            results[index].zero_()
        elif each.name != "lse" and prepared.case.strided:
            results[index] = strided_like(results[index], (2, 1, 0, 3))
    launch(*prepared.inputs, *results, *prepared.modifiers.arguments(spec.causal), spec.head_dim**-0.5)
    return results


def _dtype(name: str, spec: Spec, prepared: Prepared) -> torch.dtype:
    """Of a result that a kernel writes."""
    if name == "dbias" and prepared.modifiers.bias is not None:
        return prepared.modifiers.bias.dtype
    return torch.float32 if name == "lse" else TORCH_DTYPES[spec.out_dtype]
