"""The truth about gradients: tiled backward against autograd of plain attention, in float64, and closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen import reference_backward
from flashgen.modifiers import Modifiers
from flashgen.reference import plain_attention, tiled_attention
from flashgen.spec import Causal

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
# seq_q > seq_kv has rows that see nothing under a bottom-right mask.
SIZES = [(1, 1), (7, 7), (1, 20), (3, 5), (5, 3), (33, 64), (64, 33), (65, 130)]

every_causal = pytest.mark.parametrize("causal", CAUSAL)


def tiled_backward(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return reference_backward.tiled_backward(*arguments, **options)[:3]


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _qkv(seq_q: int, seq_kv: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k = _random(2, heads, seq_q, 24, seed=1), _random(2, kv_heads, seq_kv, 24, seed=2)
    return q, k, _random(2, kv_heads, seq_kv, 40, seed=3)


def _by_autograd(
    inputs: tuple[Tensor, Tensor, Tensor], do: Tensor, dlse: Tensor | None, causal: str, scale: float | None = None
) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    o, lse = plain_attention(*leaves, causal=causal, scale=scale)
    return torch.autograd.grad((o, lse), leaves, (do, torch.zeros_like(lse) if dlse is None else dlse))


def _close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), SIZES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_as_autograd(causal: Causal, seq_q: int, seq_kv: int, heads: int, kv_heads: int) -> None:
    q, k, v = _qkv(seq_q, seq_kv, heads, kv_heads)
    do, gradient = _random(2, heads, seq_q, 40, seed=4), _random(2, heads, seq_q, seed=5)
    for scale, dlse in ((None, None), (0.3, gradient)):
        o, lse = tiled_attention(q, k, v, causal=causal, scale=scale)
        actual = tiled_backward(q, k, v, o, lse, do, dlse, causal=causal, scale=scale)
        _close(actual, _by_autograd((q, k, v), do, dlse, causal, scale))


@every_causal
@pytest.mark.parametrize("block_kv", [1, 3, 16, 130, 512])
def test_block_size_changes_nothing(causal: Causal, block_kv: int) -> None:
    q, k, v = _qkv(33, 130)
    o, lse = tiled_attention(q, k, v, causal=causal)
    do, dlse = _random(*o.shape, seed=4), _random(*lse.shape, seed=5)
    actual = tiled_backward(q, k, v, o, lse, do, dlse, causal=causal, block_kv=block_kv)
    _close(actual, tiled_backward(q, k, v, o, lse, do, dlse, causal=causal))


def test_rows_that_see_nothing_have_no_gradient() -> None:
    q, k, v = _qkv(5, 3)
    o, lse = tiled_attention(q, k, v, causal="bottom_right")
    do, dlse = _random(*o.shape, seed=4), _random(*lse.shape, seed=5)
    dq, dk, dv = tiled_backward(q, k, v, o, lse, do, dlse, causal="bottom_right")
    assert not dq[:, :, :2].any() and dq[:, :, 2:].all()
    do[:, :, :2], dlse[:, :, :2] = 1e6, 1e6
    _close(tiled_backward(q, k, v, o, lse, do, dlse, causal="bottom_right"), (dq, dk, dv))


@every_causal
def test_gradient_of_the_log_sum_exp_alone(causal: Causal) -> None:
    # d lse_i / d s_ij is P_ij: with q = 0 every row spreads its gradient evenly over the keys that it sees.
    q, k, v = torch.zeros(1, 1, 4, 8, dtype=torch.float64), _random(1, 1, 6, 8), _random(1, 1, 6, 8)
    o, lse = tiled_attention(q, k, v, causal=causal)
    ones = torch.ones_like(lse)
    dq, dk, dv = tiled_backward(q, k, v, o, lse, torch.zeros_like(o), ones, causal=causal, scale=0.5)
    seen = {"none": [6, 6, 6, 6], "bottom_right": [3, 4, 5, 6], "top_left": [1, 2, 3, 4]}[causal]
    means = torch.stack([0.5 * k[0, 0, :count].mean(0) for count in seen])[None, None]
    _close((dq, dk, dv), (means, torch.zeros_like(k), torch.zeros_like(v)))


@every_causal
def test_what_v_receives_is_what_the_rows_give(causal: Causal) -> None:
    q, k, v = _qkv(9, 5, heads=2)
    o, lse = tiled_attention(q, k, v, causal=causal)
    do = _random(*o.shape, seed=4)
    _, _, dv = tiled_backward(q, k, v, o, lse, do, causal=causal)
    given = do.masked_fill((lse == -math.inf)[..., None], 0.0)
    _close((dv.sum(2),), (given.sum(2),))


@every_causal
def test_equal_values_leave_nothing_to_learn(causal: Causal) -> None:
    q, k, v = _qkv(9, 5)
    v = v[:, :, :1].expand(v.shape)
    o, lse = tiled_attention(q, k, v, causal=causal)
    dq, dk, _ = tiled_backward(q, k, v, o, lse, torch.ones(()).expand(o.shape).double(), causal=causal)
    _close((dq, dk), (torch.zeros_like(q), torch.zeros_like(k)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_and_accuracy_of_the_results(dtype: torch.dtype) -> None:
    inputs = q, k, v = tuple(tensor.to(dtype) for tensor in _qkv(17, 19, heads=8, kv_heads=1))
    o, lse = tiled_attention(q, k, v, causal="bottom_right")
    do = _random(*o.shape, dtype=dtype, seed=4)
    expected = _by_autograd(tuple(tensor.double() for tensor in inputs), do.double(), None, "bottom_right")
    for actual, exact in zip(tiled_backward(q, k, v, o, lse, do, causal="bottom_right"), expected, strict=True):
        assert actual.dtype == dtype
        # The output that delta is made of is rounded, and so are the sums: a group sum in 16 bits would be far off.
        # Sums of 136 products in fp32 have errors of their own, in the order in which this CPU adds them up.
        units = 8 if dtype == torch.float32 else 4
        assert (actual.double() - exact).abs().max() <= units * torch.finfo(dtype).eps * exact.abs().max()


@every_causal
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seq_q", "seq_kv"),
    [(0, 2, 1, 8, 8), (2, 0, 0, 8, 8), (2, 2, 1, 0, 8), (2, 2, 1, 8, 0), (1, 1, 1, 0, 0)],
)
def test_nothing_to_attend(causal: Causal, batch: int, heads: int, kv_heads: int, seq_q: int, seq_kv: int) -> None:
    q, k = torch.ones(batch, heads, seq_q, 16), torch.ones(batch, kv_heads, seq_kv, 16)
    o, lse = tiled_attention(q, k, k[..., :5], causal=causal)
    dq, dk, dv = tiled_backward(q, k, k[..., :5], o, lse, torch.ones_like(o), causal=causal)
    for gradient, tensor in ((dq, q), (dk, k), (dv, k[..., :5])):
        assert torch.equal(gradient, torch.zeros_like(tensor))


@pytest.mark.parametrize("sink", [None, -math.inf, 1.0])
def test_a_row_whose_bias_is_minus_infinity_has_no_gradient(sink: float | None) -> None:
    q, k, v, do = (torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    bias = torch.zeros(1, 2, 5, 5)
    bias[:, :, 2] = -math.inf
    modifiers = Modifiers(bias=bias, sinks=None if sink is None else torch.full((2,), sink))
    o, lse = tiled_attention(q, k, v, modifiers=modifiers)
    gradients = reference_backward.tiled_backward(q, k, v, o, lse, do, modifiers=modifiers)
    assert all(each.isfinite().all() for each in gradients if each is not None)
    assert gradients.dbias is not None
    assert not gradients.dq[:, :, 2].any() and not gradients.dbias[:, :, 2].any()
