"""Gradients of modified scores by generated kernels, in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import LENGTHS, WINDOWS, Interpreter, assert_right, interpreter_of, random, spec_of, walked
from torch import Tensor

from flashgen.cases import Case, strided_like
from flashgen.check import FLOOR, max_error
from flashgen.combinations import together
from flashgen.modifiers import Modifiers, Options, modifiers_from
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.reference_backward import Gradients, tiled_backward
from flashgen.space import Config
from flashgen.spec import Causal, DType, Spec


def _config(dkdv: tuple[int, int] = (16, 16), dq: tuple[int, int] = (16, 16)) -> Config:
    return Config(
        dkdv_block_q=dkdv[0],
        dkdv_block_kv=dkdv[1],
        dkdv_num_warps=4,
        dkdv_num_stages=2,
        dq_block_q=dq[0],
        dq_block_kv=dq[1],
        dq_num_warps=4,
        dq_num_stages=2,
    )


SMALL = _config()
# As SMALL_CASES, with fewer blocks.
CASES = (
    Case("empty rows", Problem(1, 1, 1, 40, 17)),
    Case("gqa, strided", Problem(1, 2, 1, 19, 37), strided=True),
    Case("large logits", Problem(1, 1, 1, 17, 35), magnitude=40.0),
)
BATCHED = (Case("gqa in batches", Problem(2, 3, 1, 18, 33)), CASES[1])

SINGLE: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "bias": {"bias": "fp32"},
    "window": {"window": True},
    "mask": {"mask": True},
    "segments": {"segments": True},
    "dropout": {"dropout": True},
}
SEVERAL: dict[str, dict[str, Any]] = {
    "mask, segments, bias": {"mask": True, "segments": True, "bias": "fp32"},
    "all": {name: value for each in SINGLE.values() for name, value in each.items()},
}
NAMES = ("dq", "dk", "dv", "dbias")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreter_of("backward") as running:
        yield running


@pytest.mark.parametrize("feature", SINGLE)
def test_every_feature(interpreter: Interpreter, feature: str) -> None:
    spec = Spec("backward", 16, 16, "fp32", **SINGLE[feature])
    assert_right(interpreter.launcher(spec, SMALL), spec, CASES)


@pytest.mark.parametrize("pair", walked("backward"), ids="+".join)
def test_every_pair(interpreter: Interpreter, pair: tuple[str, str]) -> None:
    spec = together(*pair, "backward", head_dim=24, head_dim_v=40, dtype="fp32")
    # Where rows end depends on causal.
    cases = CASES[1:2] if spec.causal == "none" else CASES[:2]
    assert_right(interpreter.launcher(spec, _config((16, 32), (32, 16))), spec, cases)


@pytest.mark.parametrize("features", SEVERAL)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_several_features(interpreter: Interpreter, dtype: DType, features: str) -> None:
    causal: Causal = "bottom_right" if dtype == "bf16" else "none"
    spec = Spec("backward", 24, 40, dtype, causal, **SEVERAL[features])
    if spec.bias != "none" and not spec.mask:
        spec = replace(spec, bias=dtype)
    assert_right(interpreter.launcher(spec, _config((16, 32), (32, 16))), spec, BATCHED)


def test_wide_heads_take_two_passes(interpreter: Interpreter) -> None:
    spec = Spec("backward", 160, 160, "fp32", "bottom_right", **SEVERAL["all"])
    assert_right(interpreter.launcher(spec, SMALL), spec, CASES[1:2])


class Call:
    """One backward, with its modifiers, on random fp32 tensors."""

    def __init__(self, problem: Problem, causal: Causal = "none", **options: Any) -> None:
        batch, heads, kv_heads = problem.batch, problem.heads, problem.kv_heads
        self.q, self.do = (random(batch, heads, problem.seq_q, 16, seed=seed) for seed in (0, 1))
        self.k, self.v = (random(batch, kv_heads, problem.seq_kv, 16, seed=seed) for seed in (2, 3))
        self.dlse = random(batch, heads, problem.seq_q, seed=4)
        self.causal = causal
        self.modifiers = modifiers_from((batch, heads, problem.seq_q, problem.seq_kv), self.q, Options(**options))
        self.o, self.lse = (each.float() for each in self._forward())

    def _wide(self) -> tuple[Tensor, ...]:
        return tuple(each.double() for each in (self.q, self.k, self.v))

    def _forward(self) -> tuple[Tensor, Tensor]:
        return plain_attention(*self._wide(), causal=self.causal, modifiers=self.modifiers.to(Tensor.double))

    def truth(self) -> Gradients:
        o, lse = self._forward()
        return tiled_backward(
            *self._wide(), o, lse, self.do.double(), self.dlse.double(), causal=self.causal,
            modifiers=self.modifiers.to(Tensor.double),
        )  # fmt: skip

    def run(
        self, interpreter: Interpreter, config: Config = SMALL, dbias: object = "zeros", **other: Any
    ) -> dict[str, Any]:
        """The gradients by name, written over NaN, dbias over what is given; `other` modifiers in place of its own."""
        modifiers: Modifiers = self.modifiers._replace(**other)
        spec = spec_of("backward", self.q, self.v, modifiers, self.causal)
        gradients: list[Any] = [torch.full(each.shape, torch.nan) for each in (self.q, self.k, self.v)]
        if modifiers.bias is not None:
            gradients.append(torch.zeros(modifiers.bias.shape) if dbias == "zeros" else dbias)
        interpreter.launcher(spec, config)(
            self.q, self.k, self.v, self.o, self.lse, self.do, self.dlse, *gradients,
            *modifiers.arguments(self.causal), 0.25,
        )  # fmt: skip
        return dict(zip(NAMES, gradients, strict=False))

    def assert_right(self, interpreter: Interpreter, config: Config = SMALL) -> None:
        actual = self.run(interpreter, config)
        for name, expected in self.truth()._asdict().items():
            if expected is not None and name in NAMES:
                error = max_error(actual[name], expected)
                assert error <= FLOOR, f"{name} is off by {error:.3g}"


@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_every_place_of_the_window_in_a_block(
    interpreter: Interpreter, causal: Causal, window: tuple[int | None, int | None]
) -> None:
    for seq_q, seq_kv in LENGTHS:
        call = Call(Problem(1, 1, 1, seq_q, seq_kv), causal, window=window)
        call.assert_right(interpreter, _config((16, 32), (32, 16)))


def test_tiles_larger_than_the_sequence(interpreter: Interpreter) -> None:
    call = Call(
        Problem(1, 2, 1, 21, 33), "bottom_right", window=(9, None), softcap=3.0,
        segment_ids_q=torch.ones(1, 21, dtype=torch.int32), segment_ids_kv=torch.ones(1, 33, dtype=torch.int32),
    )  # fmt: skip
    call.assert_right(interpreter, _config((128, 64), (64, 128)))


@pytest.mark.parametrize("softcap", [2.0**-60, 0.1, 30.0, 1e4, 2.0**60])
def test_every_soft_cap(interpreter: Interpreter, softcap: float) -> None:
    # A cap of 2**60 leaves the scores as they are.
    Call(Problem(1, 1, 1, 21, 33), softcap=softcap).assert_right(interpreter)


def test_a_bias_of_minus_infinity_is_a_mask(interpreter: Interpreter) -> None:
    mask = random(1, 2, 35, 49) > 0
    # Some rows see nothing, and some blocks of keys are seen by no row.
    mask[:, :, 3:7] = False
    mask[..., 16:32] = False
    masked = Call(Problem(1, 2, 1, 35, 49), mask=mask)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    biased = Call(Problem(1, 2, 1, 35, 49), bias=bias)
    masked.assert_right(interpreter)
    biased.assert_right(interpreter)
    actual = biased.run(interpreter)
    for name, expected in masked.run(interpreter).items():
        assert max_error(actual[name], expected) <= FLOOR
    assert not actual["dbias"][~mask].any() and not actual["dq"][:, :, 3:7].any()


@pytest.mark.parametrize("absent", [None, torch.empty(0, 0, 0, 0)], ids=["none", "null"])
def test_gradient_of_the_bias_may_be_unwanted(interpreter: Interpreter, absent: Tensor | None) -> None:
    call = Call(Problem(1, 2, 1, 21, 33), bias=random(1, 2, 21, 33), softcap=5.0)
    expected = call.run(interpreter)
    actual = call.run(interpreter, dbias=absent)
    assert all(torch.equal(actual[name], expected[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 0, 3), (1, 0, 2, 3)])
def test_layouts_of_modifiers_change_no_bit(interpreter: Interpreter, order: tuple[int, ...]) -> None:
    bias, mask = random(2, 2, 21, 33), random(2, 2, 21, 33, seed=7) > -1
    slopes = random(2, 2, seed=8).abs()
    call = Call(Problem(2, 2, 1, 21, 33), bias=bias, mask=mask, alibi_slopes=slopes)
    expected = call.run(interpreter)
    dbias = strided_like(torch.zeros_like(bias), order[::-1] if order[3] != 3 else order)
    around = int(torch.empty(0).set_(dbias.untyped_storage()).isnan().sum())
    wide = torch.ones(2, 21, 33, 4, dtype=torch.bool)
    wide[..., ::2] = mask.permute(0, 2, 3, 1)
    actual = call.run(
        interpreter, dbias=dbias, bias=strided_like(bias, order), mask=wide[..., ::2].permute(0, 3, 1, 2),
        alibi_slopes=torch.stack([slopes.T, torch.full_like(slopes, torch.nan)], -1)[..., 0].T,
    )  # fmt: skip
    assert all(map(torch.equal, actual.values(), expected.values()))
    assert int(torch.empty(0).set_(dbias.untyped_storage()).isnan().sum()) == around


def _ids(first: int, others: int) -> Tensor:
    return torch.tensor([[0] * first + [1] * others], dtype=torch.int32)


BLOCKS = torch.block_diag(torch.ones(32, 32), torch.ones(32, 32)).bool()


@pytest.mark.parametrize(
    "options",
    [
        {"window": (8, 8)},
        {"mask": BLOCKS},
        {"segment_ids_q": _ids(32, 32), "segment_ids_kv": _ids(32, 32)},
        {"segment_ids_q": _ids(32, 32), "segment_ids_kv": _ids(32, 32), "mask": BLOCKS | BLOCKS.flip(0)},
    ],
    ids=", ".join,
)
def test_blocks_that_nothing_sees_are_not_read(interpreter: Interpreter, options: dict[str, Any]) -> None:
    call = Call(Problem(1, 2, 1, 64, 64), softcap=5.0, bias=random(1, 2, 64, 64), **options)
    expected = call.run(interpreter)
    for each in (call.q, call.k, call.v, call.do, call.lse, call.dlse, call.o):
        each[:, :, 48 if "window" in options else 32 :] = torch.nan
    actual = call.run(interpreter)
    assert all(torch.equal(actual[name][:, :, :32], expected[name][:, :, :32]) for name in NAMES)


def test_rows_that_see_only_a_sink_have_no_gradient(interpreter: Interpreter) -> None:
    mask = torch.ones(35, 33, dtype=torch.bool)
    mask[::3] = False
    call = Call(Problem(1, 2, 1, 35, 33), mask=mask, sinks=torch.tensor([-1.0, 2.0]))
    assert call.lse.isfinite().all()
    truth = call.truth()
    actual = call.run(interpreter, sinks=None)
    for name in ("dq", "dk", "dv"):
        assert max_error(actual[name], getattr(truth, name)) <= FLOOR
    assert not actual["dq"][:, :, ::3].any()
