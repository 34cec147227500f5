"""Which probabilities generated kernels drop, in Triton's interpreter: read off their results, tile by tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreted import Interpreter, interpreter_of, random
from torch import Tensor

import flashgen
from flashgen.check import FLOOR, max_error
from flashgen.dropout import Dropout, kept
from flashgen.modifiers import Modifiers, Options, modifiers_from
from flashgen.space import Config
from flashgen.spec import Spec
from flashgen.varlen import Lengths, _views

SEED = torch.tensor([-0x123456789ABCDEF, 0x89ABCDEF])
# A width that takes a row of the identity, a length of its own beside it.
WIDE, LONG = 64, 75
MASK = kept(Dropout(0.4, SEED), (2, 3), LONG, range(WIDE))


@pytest.fixture(scope="module")
def forward() -> Iterator[Interpreter]:
    with interpreter_of("forward") as running:
        yield running


@pytest.fixture(scope="module")
def backward() -> Iterator[Interpreter]:
    with interpreter_of("backward") as running:
        yield running


def _config(block_q: int, block_kv: int) -> Config:
    return Config(block_q=block_q, block_kv=block_kv, num_warps=4, num_stages=2, index_bits=32, advance=0)


def _backward_config(*blocks: int) -> Config:
    names = ("dkdv_block_q", "dkdv_block_kv", "dq_block_q", "dq_block_kv")
    return Config(
        **dict(zip(names, blocks, strict=True)), dkdv_num_warps=4, dkdv_num_stages=2, dq_num_warps=4, dq_num_stages=2
    )


def _modifiers(q: Tensor, seq_kv: int, **options: Any) -> Modifiers:
    given = Options(dropout_p=0.4, dropout_seed=SEED, **options)
    return modifiers_from((*q.shape[:3], seq_kv), q, given)  # type: ignore[arg-type]


def _identity(batch: int, heads: int, rows: int) -> Tensor:
    return torch.eye(rows, WIDE).expand(batch, heads, rows, WIDE).contiguous()


@pytest.mark.parametrize("blocks", [(16, 16), (16, 128), (64, 32), (128, 64)])
def test_the_forward_drops_what_the_reference_drops(forward: Interpreter, blocks: tuple[int, int]) -> None:
    q, k, v = torch.zeros(2, 3, LONG, 16), torch.zeros(2, 1, WIDE, 16), _identity(2, 1, WIDE)
    spec = Spec("forward", 16, WIDE, "fp32", dropout=True)
    o, lse = torch.full((2, 3, LONG, WIDE), torch.nan), torch.full((2, 3, LONG), torch.nan)
    forward.launcher(spec, _config(*blocks))(q, k, v, o, lse, *_modifiers(q, WIDE).arguments("none"), 1.0)
    # Equal scores, and the values of key j in column j.
    assert torch.equal(o != 0, MASK)
    torch.testing.assert_close(o, MASK / (WIDE * 0.6))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(WIDE)))


@pytest.mark.parametrize("blocks", [(16, 64, 16, 128), (128, 16, 32, 16)])
def test_the_backward_drops_what_the_forward_dropped(backward: Interpreter, blocks: tuple[int, int, int, int]) -> None:
    launch = backward.launcher(Spec("backward", WIDE, WIDE, "fp32", dropout=True), _backward_config(*blocks))
    nothing, ones, one = torch.zeros(1, 2, LONG, WIDE), torch.ones(1, 2, LONG, WIDE), _identity(1, 2, WIDE)

    def gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
        seq_kv = k.shape[2]
        lse = torch.full((1, 2, q.shape[2]), math.log(seq_kv))
        results = [torch.full_like(each, torch.nan) for each in (q, k, v)]
        given = _modifiers(q, seq_kv).arguments("none")
        launch(q, k, v, torch.zeros_like(do), lse, do, None, *results, *given, 1.0)
        return results

    # dP is the same everywhere: row i of dQ is that of dS, with keys in columns.
    dq, _, _ = gradients(nothing, one, ones[:, :, :WIDE], ones / WIDE)
    torch.testing.assert_close(dq, kept(Dropout(0.4, SEED), (1, 2), LONG, range(WIDE)) / (WIDE * 0.6))
    # Row j of dK is column j of dS, with rows in columns; that of dV is P's.
    _, dk, dv = gradients(one, nothing, ones, one)
    columns = kept(Dropout(0.4, SEED), (1, 2), WIDE, range(LONG)).transpose(2, 3) / (LONG * 0.6)
    torch.testing.assert_close(dk, columns)
    torch.testing.assert_close(dv, columns)


@pytest.mark.parametrize("p", [1.0, 1 - 2**-40, 1e-12])
def test_all_and_nothing(forward: Interpreter, backward: Interpreter, p: float) -> None:
    q, k, v = random(1, 2, 19, 16), random(1, 1, 37, 16, seed=1), random(1, 1, 37, 16, seed=2)
    modifiers = modifiers_from((1, 2, 19, 37), q, Options(dropout_p=p, dropout_seed=SEED))
    o, lse = torch.full_like(q, torch.nan), torch.full((1, 2, 19), torch.nan)
    spec = Spec("forward", 16, 16, "fp32", dropout=True)
    forward.launcher(spec, _config(16, 32))(q, k, v, o, lse, *modifiers.arguments("none"), 0.25)
    expected, true_lse = flashgen.attention(q.double(), k.double(), v.double(), return_lse=True)
    assert max_error(o, expected if p < 0.5 else torch.zeros_like(expected)) <= FLOOR
    assert max_error(lse, true_lse) <= FLOOR
    results = [torch.full_like(each, torch.nan) for each in (q, k, v)]
    launch = backward.launcher(spec.backward, _backward_config(16, 32, 16, 32))
    launch(q, k, v, o, lse, torch.ones_like(q), None, *results, *modifiers.arguments("none"), 0.25)
    assert all(each.isfinite().all() and each.any() == (p < 0.5) for each in results)


def test_sequences_drop_as_the_batch_that_they_are(forward: Interpreter, backward: Interpreter) -> None:
    q_starts, k_starts = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in ((5, 0, 33, 18), (20, 4, 40, 1))
    )
    q, do = (random(56, 4, 16, seed=seed) for seed in (0, 3))
    k, v = (random(65, 2, 16, seed=seed) for seed in (1, 2))
    used = torch.tensor([20, 4, 37, 1], dtype=torch.int32)
    lengths = Lengths(q_starts, k_starts, used, 33, 40)
    leaves = [each.double().requires_grad_() for each in (q, k, v)]
    how: dict[str, Any] = {"causal": True, "seqused_k": used, "dropout_p": 0.4, "dropout_seed": SEED}
    true, true_lse = flashgen.attention_varlen(*leaves, q_starts, k_starts, 33, 40, return_lse=True, **how)
    true_gradients = torch.autograd.grad(true, leaves, do.double())

    modifiers = _modifiers(q.new_empty(4, 4, 33, 16), 40)
    given = (*modifiers.arguments("bottom_right"), *lengths.arguments(q, k))
    o, lse = torch.zeros(56, 4, 16), torch.full((4, 56), -math.inf)
    spec = Spec("forward", 16, 16, "fp32", "bottom_right", dropout=True, varlen=True)
    launch = forward.launcher(spec, _config(16, 32))
    launch(*_views(lengths, q, k, v, o), lse, *given, 0.25)
    assert max_error(o, true) <= FLOOR and max_error(lse, true_lse) <= FLOOR
    results = [torch.zeros_like(each) for each in (q, k, v)]
    *views, o_view, do_view, dq, dk, dv = _views(lengths, q, k, v, o, do, *results)
    launch = backward.launcher(spec.backward, _backward_config(16, 32, 32, 16))
    launch(*views, o_view, lse, do_view, None, dq, dk, dv, *given, 0.25)
    for actual, expected in zip(results, true_gradients, strict=True):
        assert max_error(actual, expected) <= FLOOR
