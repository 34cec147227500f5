"""Attention with modified scores by generated kernels, in Triton's interpreter on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import LENGTHS, WINDOWS, Interpreter, assert_right, interpreter_of, random, spec_of, walked
from torch import Tensor

from flashgen.cases import SMALL_CASES, strided_like
from flashgen.check import FLOOR, max_error
from flashgen.combinations import together
from flashgen.modifiers import Modifiers, Options, modifiers_from
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Causal, DType, Spec


def _config(block_q: int = 16, block_kv: int = 16, advance: int = 0) -> Config:
    return Config(block_q=block_q, block_kv=block_kv, num_warps=4, num_stages=2, index_bits=32, advance=advance)


SMALL = _config()

SINGLE: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "bias": {"bias": "fp32"},
    "window": {"window": True},
    "mask": {"mask": True},
    "segments": {"segments": True},
    "dropout": {"dropout": True},
    "sinks": {"sinks": True},
}
SEVERAL: dict[str, dict[str, Any]] = {
    "dropout, mask, sinks": {"dropout": True, "mask": True, "sinks": True},
    "mask, segments, sinks": {"mask": True, "segments": True, "sinks": True},
    "all": {name: value for each in SINGLE.values() for name, value in each.items()},
}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreter_of("forward") as running:
        yield running


@pytest.mark.parametrize("feature", SINGLE)
def test_every_feature(interpreter: Interpreter, feature: str) -> None:
    spec = Spec("forward", 16, 16, "fp32", **SINGLE[feature])
    assert_right(interpreter.launcher(spec, SMALL), spec, SMALL_CASES)


@pytest.mark.parametrize("pair", walked("forward"), ids="+".join)
def test_every_pair(interpreter: Interpreter, pair: tuple[str, str]) -> None:
    spec = together(*pair, head_dim=24, head_dim_v=40, dtype="fp32")
    # Where rows end depends on causal.
    cases = SMALL_CASES if spec.causal == "bottom_right" else SMALL_CASES[2:4]
    assert_right(interpreter.launcher(spec, _config(16, 32, advance=1)), spec, cases)


@pytest.mark.parametrize("features", SEVERAL)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_several_features(interpreter: Interpreter, dtype: DType, features: str) -> None:
    causal: Causal = "bottom_right" if dtype == "bf16" else "none"
    spec = Spec("forward", 24, 40, dtype, causal, **SEVERAL[features])
    if spec.bias != "none" and not spec.mask:
        spec = replace(spec, bias=dtype)
    assert_right(interpreter.launcher(spec, _config(16, 32, advance=1)), spec, SMALL_CASES[2:4])


class Call:
    """One forward, with its modifiers, on random fp32 tensors."""

    def __init__(self, problem: Problem, causal: Causal = "none", **options: Any) -> None:
        self.q = random(problem.batch, problem.heads, problem.seq_q, 16)
        self.k, self.v = (random(problem.batch, problem.kv_heads, problem.seq_kv, 16, seed=seed) for seed in (1, 2))
        self.causal = causal
        sizes = (problem.batch, problem.heads, problem.seq_q, problem.seq_kv)
        self.modifiers = modifiers_from(sizes, self.q, Options(**options))

    def run(self, interpreter: Interpreter, config: Config = SMALL, **other: Any) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, written over NaN; `other` modifiers in place of its own."""
        modifiers: Modifiers = self.modifiers._replace(**other)
        spec = spec_of("forward", self.q, self.v, modifiers, self.causal)
        o, lse = torch.full(self.q.shape, torch.nan), torch.full(self.q.shape[:3], torch.nan)
        interpreter.launcher(spec, config)(self.q, self.k, self.v, o, lse, *modifiers.arguments(self.causal), 0.25)
        return o, lse

    def assert_right(self, interpreter: Interpreter, config: Config = SMALL) -> None:
        inputs = (each.double() for each in (self.q, self.k, self.v))
        truth = plain_attention(*inputs, causal=self.causal, modifiers=self.modifiers.to(Tensor.double))
        for name, actual, expected in zip(("o", "lse"), self.run(interpreter, config), truth, strict=True):
            error = max_error(actual, expected)
            assert error <= FLOOR, f"{name} is off by {error:.3g}"


@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_every_place_of_the_window_in_a_block(
    interpreter: Interpreter, causal: Causal, window: tuple[int | None, int | None]
) -> None:
    for seq_q, seq_kv in LENGTHS:
        for config in (_config(16, 32, advance=1), _config(32, 16)):
            Call(Problem(1, 1, 1, seq_q, seq_kv), causal, window=window).assert_right(interpreter, config)


def test_tiles_larger_than_the_sequence(interpreter: Interpreter) -> None:
    call = Call(
        Problem(1, 2, 1, 21, 33), "bottom_right", window=(9, None), softcap=3.0,
        segment_ids_q=torch.ones(1, 21, dtype=torch.int32), segment_ids_kv=torch.ones(1, 33, dtype=torch.int32),
    )  # fmt: skip
    call.assert_right(interpreter, _config(128, 64))


@pytest.mark.parametrize("softcap", [2.0**-60, 0.1, 30.0, 1e4, 2.0**60])
def test_every_soft_cap(interpreter: Interpreter, softcap: float) -> None:
    # A cap of 2**60 leaves the scores as they are.
    Call(Problem(1, 1, 1, 21, 33), softcap=softcap).assert_right(interpreter)


def test_a_bias_of_minus_infinity_is_a_mask(interpreter: Interpreter) -> None:
    mask = random(1, 2, 35, 49, seed=5) > 0
    # Some rows see nothing, and some blocks of keys are seen by no row.
    mask[:, :, 3:7] = False
    mask[..., :32] = False
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    for options in ({"mask": mask}, {"bias": bias}, {"bias": bias, "mask": mask}):
        call = Call(Problem(1, 2, 1, 35, 49), **options)
        call.assert_right(interpreter)
        o, lse = call.run(interpreter)
        assert not o[:, :, 3:7].any() and (lse[:, :, 3:7] == -math.inf).all()


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_sinks_take_their_part(interpreter: Interpreter, softcap: float | None) -> None:
    sinks = torch.tensor([-math.inf, -3.0, 0.0, 100.0])
    mask = torch.ones(21, 33, dtype=torch.bool)
    mask[::4] = False
    call = Call(Problem(1, 4, 2, 21, 33), softcap=softcap, sinks=sinks, mask=mask)
    call.assert_right(interpreter)
    o, lse = call.run(interpreter)
    # What sees nothing else is left with the sink.
    assert not o[:, :, ::4].any()
    torch.testing.assert_close(lse[0, :, ::4], sinks[:, None].expand(4, 6), rtol=1e-6, atol=0)
    # A sink of -inf is none.
    without, without_lse = call.run(interpreter, sinks=None)
    assert max_error(o[:, 0], without[:, 0]) <= FLOOR and max_error(lse[:, 0], without_lse[:, 0]) <= FLOOR


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 0, 3), (1, 0, 2, 3)])
def test_layouts_of_modifiers_change_no_bit(interpreter: Interpreter, order: tuple[int, ...]) -> None:
    bias, mask = random(2, 2, 21, 33, seed=6), random(2, 2, 21, 33, seed=7) > -1
    slopes = random(2, 2, seed=8).abs()
    call = Call(Problem(2, 2, 1, 21, 33), bias=bias, mask=mask, alibi_slopes=slopes)
    expected = call.run(interpreter)
    wide = torch.ones(2, 21, 33, 4, dtype=torch.bool)
    wide[..., ::2] = mask.permute(0, 2, 3, 1)
    actual = call.run(
        interpreter, bias=strided_like(bias, order), mask=wide[..., ::2].permute(0, 3, 1, 2),
        alibi_slopes=torch.stack([slopes.T, torch.full_like(slopes, torch.nan)], -1)[..., 0].T,
    )  # fmt: skip
    assert all(map(torch.equal, actual, expected))


def _ids(first: int, others: int) -> Tensor:
    return torch.tensor([[0] * first + [1] * others], dtype=torch.int32)


BLOCKS = torch.block_diag(torch.ones(32, 32), torch.ones(32, 32)).bool()


@pytest.mark.parametrize(
    "options",
    [
        {"window": (8, 8)},
        {"mask": BLOCKS},
        {"segment_ids_q": _ids(32, 32), "segment_ids_kv": _ids(32, 32)},
    ],
    ids=", ".join,
)
def test_blocks_that_nothing_sees_are_not_read(interpreter: Interpreter, options: dict[str, Any]) -> None:
    call = Call(Problem(1, 2, 1, 64, 64), softcap=5.0, bias=random(1, 2, 64, 64, seed=6), **options)
    expected = call.run(interpreter)
    for each in (call.k, call.v):
        each[:, :, 48 if "window" in options else 32 :] = torch.nan
    for mine, clean in zip(call.run(interpreter), expected, strict=True):
        assert torch.equal(mine[:, :, :32], clean[:, :, :32])
