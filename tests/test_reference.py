"""The truth: plain and tiled attention against torch, closed forms and the formulas that people get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashgen.reference import plain_attention, tiled_attention, visible_keys
from flashgen.spec import Causal

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
SIZES = [(1, 1), (7, 7), (1, 20), (3, 5), (5, 3), (33, 64), (64, 33), (65, 130)]

both = pytest.mark.parametrize("attend", [plain_attention, tiled_attention])
every_causal = pytest.mark.parametrize("causal", CAUSAL)


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _qkv(seq_q: int, seq_kv: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _random(2, heads, seq_q, 24, seed=1),
        _random(2, kv_heads, seq_kv, 24, seed=2),
        _random(2, kv_heads, seq_kv, 40, seed=3),
    )


def _by_torch(q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output of torch's own attention, and LSE from its scores."""
    seen = visible_keys(q.shape[2], k.shape[2], causal)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("bhid,bhjd->bhij", q, keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    return o, scores.masked_fill(~seen, -math.inf).logsumexp(-1)


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@both
@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), SIZES)
def test_as_torch(attend: object, causal: Causal, seq_q: int, seq_kv: int) -> None:
    assert callable(attend)
    for scale in (None, 0.3, 1e-3):
        q, k, v = _qkv(seq_q, seq_kv)
        o, lse = attend(q, k, v, causal=causal, scale=scale)
        expected, expected_lse = _by_torch(q, k, v, causal, scale)
        _close(o, expected)
        _close(lse, expected_lse)


@pytest.mark.parametrize("seq", [1, 8])
def test_top_left_is_torchs_is_causal(seq: int) -> None:
    q, k, v = _qkv(seq, 5, kv_heads=4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    _close(plain_attention(q, k, v, causal="top_left")[0], expected)


@every_causal
@pytest.mark.parametrize("block_kv", [1, 3, 16, 130, 512])
def test_block_size_changes_nothing(causal: Causal, block_kv: int) -> None:
    q, k, v = _qkv(33, 130)
    o, lse = tiled_attention(q, k, v, causal=causal, block_kv=block_kv)
    expected, expected_lse = plain_attention(q, k, v, causal=causal)
    _close(o, expected)
    _close(lse, expected_lse)


@both
@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "causal", "mean", "seen"),
    [
        (3, 5, "bottom_right", [1, 1.5, 2], [3, 4, 5]),
        (3, 5, "top_left", [0, 0.5, 1], [1, 2, 3]),
        (5, 3, "bottom_right", [0, 0, 0, 0.5, 1], [0, 0, 1, 2, 3]),
        (5, 3, "top_left", [0, 0.5, 1, 1, 1], [1, 2, 3, 3, 3]),
        (1, 20, "bottom_right", [9.5], [20]),
        (1, 20, "none", [9.5], [20]),
    ],
)
def test_mean_of_the_visible_keys(
    attend: object, seq_q: int, seq_kv: int, causal: Causal, mean: list[float], seen: list[int]
) -> None:
    assert callable(attend)
    q, k = torch.zeros(1, 1, seq_q, 8, dtype=torch.float64), _random(1, 1, seq_kv, 8)
    v = torch.arange(seq_kv, dtype=torch.float64)[None, None, :, None]
    o, lse = attend(q, k, v, causal=causal)
    _close(o[0, 0, :, 0], torch.tensor(mean, dtype=torch.float64))
    _close(lse[0, 0], torch.tensor(seen, dtype=torch.float64).log())


@both
def test_softmax_by_hand(attend: object) -> None:
    assert callable(attend)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([2.0, 1.0, 5.0, 3.0], dtype=torch.float64)[None, None, :, None]
    p, lse = attend(q, k, torch.eye(4, dtype=torch.float64)[None, None], scale=1.0)
    assert [round(value, 4) for value in p.flatten().tolist()] == [0.0414, 0.0152, 0.831, 0.1125]
    assert lse.item() == pytest.approx(math.log(math.exp(2) + math.exp(1) + math.exp(5) + math.exp(3)), rel=1e-14)


@both
@every_causal
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seq_q", "seq_kv"),
    [(0, 2, 1, 8, 8), (2, 0, 0, 8, 8), (2, 2, 1, 0, 8), (2, 2, 1, 8, 0), (1, 1, 1, 0, 0)],
)
def test_nothing_to_attend(
    attend: object, causal: Causal, batch: int, heads: int, kv_heads: int, seq_q: int, seq_kv: int
) -> None:
    assert callable(attend)
    k = torch.ones(batch, kv_heads, seq_kv, 16)
    o, lse = attend(torch.ones(batch, heads, seq_q, 16), k, k[..., :5], causal=causal)
    assert torch.equal(o, torch.zeros(batch, heads, seq_q, 5))
    assert torch.equal(lse, torch.full((batch, heads, seq_q), -math.inf))


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_the_results(attend: object, dtype: torch.dtype) -> None:
    assert callable(attend)
    q, k, v = (tensor.to(dtype) for tensor in _qkv(17, 19))
    o, lse = attend(q, k, v, causal="bottom_right")
    assert o.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected, _ = plain_attention(q.double(), k.double(), v.double(), causal="bottom_right")
    assert (o.double() - expected).abs().max() <= 8 * torch.finfo(dtype).eps


def test_tiles_keep_fp32_statistics() -> None:
    # Raw scores of 1.28e6 overflow fp16; every key is equal, so the output is the mean of v.
    q = torch.full((1, 1, 4, 128), 100.0, dtype=torch.float16)
    v = _random(1, 1, 4, 128, dtype=torch.float16)
    o, lse = tiled_attention(q, q, v)
    torch.testing.assert_close(o, v.float().mean(2, keepdim=True).expand(o.shape).half(), rtol=1e-3, atol=1e-3)
    assert lse.isfinite().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_either_sign_may_be_huge(sign: float) -> None:
    q, k = torch.full((1, 1, 2, 16), 100.0), torch.full((1, 1, 6, 16), sign * 100.0)
    v = _random(1, 1, 6, 16, dtype=torch.float32)
    o, lse = tiled_attention(q, k, v, scale=1.0, block_kv=4)
    torch.testing.assert_close(o, v.mean(2, keepdim=True).expand(o.shape))
    torch.testing.assert_close(lse, torch.full_like(lse, sign * 160000.0 + math.log(6)))


@both
def test_query_heads_share_keys_in_groups(attend: object) -> None:
    assert callable(attend)
    q, k, v = _qkv(5, 7, heads=6, kv_heads=2)
    o, lse = attend(q, k, v, causal="bottom_right")
    for head in range(6):
        one = slice(head, head + 1)
        shared = slice(head // 3, head // 3 + 1)
        alone, alone_lse = attend(q[:, one], k[:, shared], v[:, shared], causal="bottom_right")
        _close(o[:, one], alone)
        _close(lse[:, one], alone_lse)


@both
def test_hidden_keys_do_not_matter(attend: object) -> None:
    assert callable(attend)
    q, k, v = _qkv(4, 6)
    expected, expected_lse = attend(q, k, v, causal="top_left")
    k, v = k.clone(), v.clone()
    k[:, :, 4:] = 1e6
    v[:, :, 4:] = 1e6
    o, lse = attend(q, k, v, causal="top_left")
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)


def test_a_nan_in_a_hidden_key_stays_hidden() -> None:
    q, k, v = _qkv(4, 6)
    expected, expected_lse = plain_attention(q, k, v, causal="top_left")
    k = k.clone()
    k[:, :, 4:] = math.nan
    for attend in (plain_attention, tiled_attention):
        o, lse = attend(q, k, v, causal="top_left")
        _close(o, expected)
        _close(lse, expected_lse)


@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(3, 5), (5, 3), (4, 4)])
def test_gradients(causal: Causal, seq_q: int, seq_kv: int) -> None:
    q = _random(1, 2, seq_q, 3, seed=1).requires_grad_()
    k = _random(1, 1, seq_kv, 3, seed=2).requires_grad_()
    v = _random(1, 1, seq_kv, 2, seed=3).requires_grad_()

    def both_results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = tiled_attention(q, k, v, causal=causal, block_kv=2)
        # The LSE of an empty row is -inf, which has no difference quotient.
        return o, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(both_results, (q, k, v))


def test_rows_that_see_nothing_have_no_gradient() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in _qkv(5, 3))
    o, _ = tiled_attention(q, k, v, causal="bottom_right", block_kv=2)
    o.sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None and tensor.grad.isfinite().all()
    assert q.grad is not None and not q.grad[:, :, :2].any() and q.grad[:, :, 2:].any()


BLOCKS = 4
BLOCK = 64


def _four_blocks() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_random(1, 2, BLOCKS * BLOCK, 64, seed=seed) for seed in (1, 2, 3))
    return q, k, v


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.split(BLOCK, dim=2)


def _merged_with_a_bare_logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A popular mistake: log(sum) without the maximum is carried on in the maximum's place."""
    o = torch.zeros_like(q)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    for keys, values in zip(_blocks(k), _blocks(v), strict=True):
        scores = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
        new_max = torch.maximum(lse, scores.amax(-1))
        p = torch.exp(scores - new_max[..., None])
        carried = torch.exp(lse) * torch.exp(lse - new_max)
        total = carried + p.sum(-1)
        o = (o * carried[..., None] + p @ values) / total[..., None]
        lse = torch.log(total)
    return o, lse


def test_log_sum_exp_cannot_stand_in_for_the_maximum() -> None:
    q, k, v = _four_blocks()
    expected, expected_lse = _by_torch(q, k, v, "none", None)
    wrong, wrong_lse = _merged_with_a_bare_logarithm(q, k, v)
    assert (wrong - expected).abs().max() > 0.1
    assert (wrong_lse - expected_lse).abs().max() > 1
    # One block hides the mistake in the output; the LSE is wrong even then.
    one, one_lse = _merged_with_a_bare_logarithm(q, k[:, :, :BLOCK], v[:, :, :BLOCK])
    right_one, right_lse = _by_torch(q, k[:, :, :BLOCK], v[:, :, :BLOCK], "none", None)
    _close(one, right_one)
    assert (one_lse - right_lse).abs().max() > 1

    o, lse = tiled_attention(q, k, v, block_kv=BLOCK)
    _close(o, expected)
    _close(lse, expected_lse)


def test_delta_of_one_block_is_not_delta() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in _four_blocks())
    o, lse = tiled_attention(q, k, v, block_kv=BLOCK)
    do = _random(*o.shape, seed=4)
    o.backward(do)
    scale = q.shape[-1] ** -0.5
    with torch.no_grad():
        right, wrong = torch.zeros_like(q), torch.zeros_like(q)
        delta = (do * o).sum(-1, keepdim=True)
        for keys, values in zip(_blocks(k), _blocks(v), strict=True):
            p = torch.exp(q @ keys.transpose(-1, -2) * scale - lse[..., None])
            dp = do @ values.transpose(-1, -2)
            right += p * (dp - delta) @ keys * scale
            wrong += p * (dp - (p * dp).sum(-1, keepdim=True)) @ keys * scale
    assert q.grad is not None
    _close(q.grad, right)
    assert (q.grad - wrong).abs().max() > 0.01
