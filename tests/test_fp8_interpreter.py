"""Attention of fp8 inputs by generated kernels, in Triton's interpreter on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import mods
import pytest
import torch
from interpreted import Interpreter, assert_right, interpreter_of
from torch import Tensor

from flashgen.cases import SMALL_CASES, Case
from flashgen.check import max_error
from flashgen.descales import BLOCK, FP8, Descales, dequantised
from flashgen.dropout import Dropout
from flashgen.modifiers import Modifiers
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Causal, Descale, Spec

# Keys and rows in more than one block of a descale.
BLOCKS = Case("blocks", Problem(1, 2, 1, 140, 290))


def _config(block_q: int = 16, block_kv: int = 16, advance: int = 0) -> Config:
    return Config(block_q=block_q, block_kv=block_kv, num_warps=4, num_stages=2, index_bits=32, advance=advance)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreter_of("forward") as running:
        yield running


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_one_number_for_each_tensor(interpreter: Interpreter, causal: Causal) -> None:
    spec = Spec("forward", 16, 16, "fp8", causal)
    assert_right(interpreter.launcher(spec, _config()), spec, SMALL_CASES)


@pytest.mark.parametrize(
    ("descale", "causal"), [("head", "bottom_right"), ("block", "none"), ("block", "bottom_right")]
)
def test_numbers_of_heads_and_blocks(interpreter: Interpreter, descale: Descale, causal: Causal) -> None:
    spec = Spec("forward", 24, 40, "fp8", causal, descale=descale)
    assert_right(interpreter.launcher(spec, _config(32, 64, advance=1)), spec, (*SMALL_CASES[2:], BLOCKS))


FEATURES: tuple[dict[str, Any], ...] = (
    {"softcap": True, "window": True},
    {"bias": "bf16", "mask": True, "sinks": True},
    {"alibi": True, "segments": True},
    {"dropout": True, "window": True},
    {"softcap": True, "dropout": True, **mods.features("score_mod", "table")},
    {"sinks": True, **mods.features("mask_mod", "dilated")},
)


@pytest.mark.parametrize("features", FEATURES, ids=", ".join)
@pytest.mark.parametrize("descale", ["tensor", "head", "block"])
def test_features(interpreter: Interpreter, descale: Descale, features: dict[str, Any]) -> None:
    spec = Spec("forward", 16, 16, "fp8", "bottom_right", descale=descale, **features)
    cases = (SMALL_CASES[2], BLOCKS) if descale == "block" else SMALL_CASES[2:4]
    assert_right(interpreter.launcher(spec, _config(32, 32)), spec, cases)


def _run(
    interpreter: Interpreter, q: Tensor, k: Tensor, v: Tensor, descales: Descales, scale: float = 0.25
) -> tuple[Tensor, Tensor]:
    rank = descales.q.dim() if isinstance(descales.q, Tensor) else 0
    kinds: dict[int, Descale] = {0: "tensor", 2: "head", 3: "block"}
    spec = Spec("forward", q.shape[3], v.shape[3], "fp8", descale=kinds[rank])
    o = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=torch.bfloat16)
    lse = torch.full(q.shape[:3], torch.nan)
    interpreter.launcher(spec, _config(16, 32))(q, k, v, o, lse, *descales, scale)
    return o, lse


def _draw(*shape: int, seed: int, magnitude: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude).to(FP8)


@pytest.mark.parametrize("magnitude", [1.0, 20.0, 200.0])
def test_logits_of_every_size(interpreter: Interpreter, magnitude: float) -> None:
    """P stays in e4m3's range whatever the maximum rounds to; the log-sum-exp is as exact as fp32 is."""
    q, k, v = (_draw(1, 1, 32, 16, seed=seed, magnitude=magnitude) for seed in range(3))
    for number in (1.0, 2.0**8):
        o, lse = _run(interpreter, q, k, v, Descales(number, number, 1.0))
        wide = [dequantised(each, factor, torch.float64) for each, factor in ((q, number), (k, number), (v, 1.0))]
        exact, exact_lse = plain_attention(*wide, scale=0.25)
        assert max_error(lse, exact_lse) <= 2.0**-20 * exact_lse.abs().max().item() + 1e-5
        assert max_error(o, exact) <= 0.08 * v.float().abs().max().item()


def test_small_probabilities_count(interpreter: Interpreter) -> None:
    """Thousands of keys of little weight each: below e4m3's smallest number if P were not scaled."""
    q = torch.zeros(1, 1, 16, 16)
    q[..., 0] = 1.0
    k = torch.zeros(1, 1, 1025, 16)
    k[:, :, 0, 0] = 8.0
    v = torch.ones(1, 1, 1025, 16)
    v[:, :, 0] = 0.0
    o, _ = _run(interpreter, *(each.to(FP8) for each in (q, k, v)), Descales(1.0, 1.0, 1.0), scale=1.0)
    others = 1024 / (1024 + math.e**8)
    assert max_error(o, torch.full(o.shape, others)) <= 0.06 * others


def test_zero_is_a_descale(interpreter: Interpreter) -> None:
    """A block of zeros may have the number 0: scores and values are 0, and nothing is NaN."""
    q, k, v = (_draw(1, 1, 2 * BLOCK, 16, seed=seed) for seed in range(3))
    numbers = torch.tensor([[[0.0, 1.0]]])
    o, lse = _run(interpreter, q, k, v, Descales(numbers, numbers, numbers))
    wide = [dequantised(each, numbers, torch.float64) for each in (q, k, v)]
    exact, exact_lse = plain_attention(*wide, scale=0.25)
    assert max_error(lse, exact_lse) <= 1e-5 and max_error(o, exact) <= 0.02
    o, lse = _run(interpreter, q, k, v, Descales(0.0, 1.0, 1.0))
    assert max_error(lse, torch.full(lse.shape, math.log(2 * BLOCK))) <= 1e-5


def test_negative_numbers_give_nan(interpreter: Interpreter) -> None:
    q, k, v = (_draw(1, 2, 16, 16, seed=seed) for seed in range(3))
    good, bad = torch.ones(1, 2), torch.tensor([[1.0, -1.0]])
    for numbers in (Descales(bad, good, good), Descales(good, bad, good), Descales(good, good, bad)):
        o, _ = _run(interpreter, q, k, v, numbers)
        assert o[:, 0].isfinite().all() and o[:, 1].isnan().all()


def test_sequences_behind_each_other(interpreter: Interpreter) -> None:
    """Of different lengths, one empty, each head of each with its own descales, some probabilities dropped."""
    lengths_q, lengths_k, heads, width = (20, 0, 37), (33, 5, 18), 2, 16
    starts_q, starts_k = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in (lengths_q, lengths_k)
    )
    q, k, v = (
        _draw(sum(lengths), heads, width, seed=seed) for seed, lengths in enumerate((lengths_q, lengths_k, lengths_k))
    )
    numbers = [torch.randn(3, heads, generator=torch.Generator().manual_seed(seed)).exp2() for seed in range(3)]
    dropout = Dropout(0.3, torch.tensor([5, 7]))
    given = Modifiers(dropout=dropout, descales=Descales(*numbers)).arguments("bottom_right")
    spec = Spec("forward", width, width, "fp8", "bottom_right", dropout=True, varlen=True, descale="head")
    o = torch.zeros(sum(lengths_q), heads, width, dtype=torch.bfloat16)
    lse = torch.full((heads, sum(lengths_q)), torch.nan)

    def view(tensor: Tensor, longest: int) -> Tensor:
        return tensor.as_strided((3, heads, longest, width), (0, width, heads * width, 1))

    views = view(q, 37), view(k, 33), view(v, 33), view(o, 37)
    empty = torch.empty(0, dtype=torch.int32)
    interpreter.launcher(spec, _config(16, 32))(*views, lse, *given, starts_q, starts_k, empty, 57, 56, 0.25)
    for index in range(3):
        rows, keys = (slice(int(each[index]), int(each[index + 1])) for each in (starts_q, starts_k))
        wide = [
            dequantised(each[some].transpose(0, 1)[None], number[index : index + 1], torch.float64)
            for each, some, number in zip((q, k, v), (rows, keys, keys), numbers, strict=True)
        ]
        own = Modifiers(dropout=dropout._replace(first=index))
        call: dict[str, Any] = {"causal": "bottom_right", "scale": 0.25, "modifiers": own}
        exact, exact_lse = plain_attention(*wide, **call)
        rounded, _ = plain_attention(*wide, **call, fp8=True)
        largest = exact.abs().max().item() if exact.numel() else 0.0
        assert max_error(lse[:, rows], exact_lse[0]) <= 1e-5
        # The interpreter truncates bf16.
        allowed = 2 * max_error(rounded, exact) + 2.0**-7 * largest
        assert max_error(o[rows].transpose(0, 1), exact[0]) <= allowed
