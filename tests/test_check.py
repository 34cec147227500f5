"""The judge of kernels: every way to be wrong is refused with its reason, and rounding alone is accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashgen import check as check_module
from flashgen.cases import CASES, SMALL_CASES, Case, strided_like, tensors
from flashgen.check import FLOOR, Accuracy, check, max_error, prepare
from flashgen.problem import Problem
from flashgen.reference import plain_attention, tiled_attention
from flashgen.space import Rejection
from flashgen.spec import TORCH_DTYPES, Causal, DType, Spec

BF16 = Spec(head_dim=32, head_dim_v=48, dtype="bf16", causal="bottom_right")

Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _launch(kernel: Kernel) -> check_module.Launch:
    """A function of tensors as a launch that writes its outputs."""

    def launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, scale: float) -> None:
        result, result_lse = kernel(q, k, v, scale)
        o.copy_(result)
        assert lse is not None
        lse.copy_(result_lse)

    return launch


def _right(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return tiled_attention(q, k, v, causal=BF16.causal, scale=scale)


def _refused(kernel: Kernel | check_module.Launch, *words: str, launch: bool = False) -> None:
    result = check(kernel if launch else _launch(kernel), BF16, "cpu", SMALL_CASES)  # type: ignore[arg-type]
    assert isinstance(result, Rejection), result
    assert result.stage == "check"
    assert all(word in f"{result.kind}: {result.reason}" for word in words), result


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_online_softmax_is_accepted(dtype: DType, causal: Causal) -> None:
    spec = Spec(head_dim=40, head_dim_v=24, dtype=dtype, causal=causal)
    launch = _launch(lambda q, k, v, scale: tiled_attention(q, k, v, causal=causal, scale=scale))
    result = check(launch, spec, "cpu", SMALL_CASES)
    assert isinstance(result, Accuracy), result
    assert 0 < result.max_error <= result.allowed < 1


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_plain_attention_uses_half_of_what_is_allowed(dtype: DType) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        # The LSE is fp32 whatever the inputs are.
        lse = plain_attention(q.float(), k.float(), v.float(), scale=scale)[1]
        return plain_attention(q, k, v, scale=scale)[0], lse

    result = check(_launch(kernel), Spec(head_dim=40, head_dim_v=24, dtype=dtype), "cpu", SMALL_CASES)
    assert isinstance(result, Accuracy), result
    assert result.max_error == pytest.approx((result.allowed - FLOOR) / 2)


def test_larger_cases_accept_the_right_kernel() -> None:
    assert isinstance(check(_launch(_right), BF16, "cpu", CASES), Accuracy)


def test_an_exact_kernel_has_a_finite_allowance() -> None:
    case = Case("one key", Problem(1, 1, 1, 1, 1))
    result = check(_launch(_right), BF16, "cpu", (case,))
    assert isinstance(result, Accuracy)
    assert result.max_error == 0
    assert result.allowed == pytest.approx(FLOOR)


def test_wrong_scale() -> None:
    _refused(lambda q, k, v, scale: _right(q, k, v, 64**-0.5), "wrong numbers", "off by", "allowed", "d32v48_bf16")


def test_scale_ignored() -> None:
    _refused(lambda q, k, v, scale: _right(q, k, v, 1.0), "wrong numbers", "tail")


def test_tail_not_masked() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        missing = -k.shape[2] % 64
        k, v = (torch.nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in (k, v))
        return tiled_attention(q, k, v, scale=scale)

    spec = replace(BF16, causal="none")
    result = check(_launch(kernel), spec, "cpu", SMALL_CASES)
    assert isinstance(result, Rejection)
    assert result.kind == "wrong numbers" and result.reason.startswith("tail: output is off by")


def test_wrong_alignment_of_the_diagonal() -> None:
    _refused(
        lambda q, k, v, scale: tiled_attention(q, k, v, causal="top_left", scale=scale), "wrong numbers", "tail: output"
    )


def test_a_row_that_is_never_written() -> None:
    def launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, scale: float) -> None:
        result, result_lse = _right(q, k, v, scale)
        o[:, :, :-1] = result[:, :, :-1]
        assert lse is not None
        lse.copy_(result_lse)

    _refused(launch, "wrong numbers", "output is off by inf", launch=True)


def test_an_lse_that_is_never_written() -> None:
    def launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, scale: float) -> None:
        o.copy_(_right(q, k, v, scale)[0])

    _refused(launch, "wrong numbers", "lse is off by inf", launch=True)


def test_empty_rows_that_are_not_zero() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = _right(q, k, v, scale)
        empty = lse == -torch.inf
        return torch.where(empty[..., None], v.mean(2)[:, :, None], o), lse

    result = check(_launch(kernel), BF16, "cpu", [case for case in SMALL_CASES if case.name == "empty rows"])
    assert isinstance(result, Rejection)
    assert result.reason.startswith("empty rows: output")


def test_two_runs_that_differ_in_one_bit() -> None:
    runs = itertools.count()

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = _right(q, k, v, scale)
        if next(runs) % 2:
            o.view(torch.int16)[0, 0, -1, 0] ^= 1
        return o, lse

    _refused(kernel, "not repeatable", "two runs on the same input differ", "tail")


@pytest.mark.parametrize("factor", [1 / 0.6931471805599453, 0.6931471805599453])
def test_lse_of_the_wrong_base(factor: float) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = _right(q, k, v, scale)
        return o, lse * factor

    _refused(kernel, "wrong numbers", "lse is off by")


def test_strides_that_are_assumed() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return _right(q, torch.as_strided(k, k.shape, k.contiguous().stride()), v, scale)

    _refused(kernel, "wrong numbers", "gqa, strided: output")


def test_heads_that_are_interleaved() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        # Query head h must read key head h // group, not h % kv_heads.
        group = q.shape[1] // k.shape[1]
        return _right(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), scale)

    result = check(_launch(kernel), BF16, "cpu", CASES)
    assert isinstance(result, Rejection)
    assert result.kind == "wrong numbers" and "output" in result.reason


def test_scores_in_fp16() -> None:
    spec = replace(BF16, dtype="fp16", causal="none")

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = plain_attention(q, k, v, scale=scale)
        return o, lse.half().float()

    result = check(_launch(kernel), spec, "cpu", SMALL_CASES)
    assert isinstance(result, Rejection)
    assert "lse" in result.reason


def test_an_exception_is_the_callers() -> None:
    def launch(*arguments: object) -> None:
        raise ZeroDivisionError("from the kernel")

    with pytest.raises(ZeroDivisionError, match="from the kernel"):
        check(launch, BF16, "cpu", SMALL_CASES)


def test_tf32_is_measured_against_tf32() -> None:
    ieee = Spec(head_dim=32, head_dim_v=32, dtype="fp32")
    case = SMALL_CASES[0]
    exact, rounded = prepare(ieee, case, "cpu"), prepare(replace(ieee, precision="tf32"), case, "cpu")
    assert torch.equal(exact.expected[0].value, rounded.expected[0].value)
    assert 10 * exact.expected[0].allowed < rounded.expected[0].allowed < 0.02


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_allowances_are_twice_the_error_of_plain_attention(dtype: DType) -> None:
    spec = replace(BF16, dtype=dtype)
    prepared = prepare(spec, SMALL_CASES[0], "cpu")
    o, _ = plain_attention(*prepared.inputs, causal=spec.causal)
    output, lse = prepared.expected
    assert output.allowed == 2 * max_error(o, output.value) + 1e-5
    assert output.value.dtype == lse.value.dtype == torch.float64


@pytest.mark.parametrize("case", [*CASES, *SMALL_CASES], ids=lambda case: f"{case.name} {case.problem.seq_kv}")
def test_cases_are_what_they_say(case: Case) -> None:
    q, k, v = tensors(BF16, case, "cpu")
    sizes = case.problem
    assert q.shape == (sizes.batch, sizes.heads, sizes.seq_q, 32)
    assert k.shape == (sizes.batch, sizes.kv_heads, sizes.seq_kv, 32)
    assert v.shape == (sizes.batch, sizes.kv_heads, sizes.seq_kv, 48)
    assert all(tensor.dtype == TORCH_DTYPES["bf16"] and tensor.isfinite().all() for tensor in (q, k, v))
    assert all(tensor.is_contiguous() != case.strided for tensor in (q, k, v))
    assert 0.7 * case.magnitude < q.float().std() < 1.4 * case.magnitude
    assert torch.equal(q, tensors(BF16, case, "cpu")[0])
    assert not torch.equal(q, tensors(BF16, case, "cpu", seed=1)[0])


def test_both_lists_hold_every_kind_of_case() -> None:
    for cases in (CASES, SMALL_CASES):
        problems = [case.problem for case in cases]
        assert any(case.strided for case in cases) and any(case.magnitude > 10 for case in cases)
        assert any(problem.seq_q == 1 for problem in problems)
        assert any(problem.seq_q > problem.seq_kv for problem in problems)
        assert any(problem.heads > problem.kv_heads > 1 for problem in problems) or cases is SMALL_CASES
        assert any(problem.batch > 1 for problem in problems)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 2, 3)])
def test_strided_views_lie_in_poison(order: tuple[int, ...]) -> None:
    values = torch.randn(2, 3, 5, 8)
    view = strided_like(values, order)
    assert torch.equal(view, values)
    assert view.stride(3) == 1 and not view.is_contiguous()
    assert sorted(view.stride(), reverse=True) == [view.stride(axis) for axis in order]
    memory = torch.empty(0).set_(view.untyped_storage())
    assert int(memory.isnan().sum()) == memory.numel() - values.numel() > 0


def test_largest_error() -> None:
    inf, nan = float("inf"), float("nan")
    for actual, expected, error in (
        ([1.0, 2.0], [1.5, 2.0], 0.5),
        ([-inf, 1.0], [-inf, 1.0], 0.0),
        ([inf], [-inf], inf),
        ([0.0], [-inf], inf),
        ([nan, 1.0], [1.0, 1.0], inf),
        ([1.0], [nan], inf),
        ([], [], 0.0),
    ):
        assert max_error(torch.tensor(actual), torch.tensor(expected)) == error
