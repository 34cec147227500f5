"""Attention in plain torch, forward and backward: the truth for kernels, and what CPU tensors run on.

Shares no mathematics with the kernels. Shapes: q [batch, heads, seq_q, head_dim], k [batch, kv_heads, seq_kv,
head_dim], v [batch, kv_heads, seq_kv, head_dim_v]; heads is a multiple of kv_heads, query head h reads key head h //
(heads // kv_heads). `causal` is "none", "bottom_right" (key j visible to row i iff j <= i + seq_kv - seq_q) or
"top_left" (j <= i). `modifiers` are in the form of flashgen.modifiers. A row that sees no key has output 0 and LSE
-inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashgen.dropout import kept
from flashgen.expressions.evaluate import evaluate
from flashgen.expressions.given import derivative_of, mask_of, score_of, types_of
from flashgen.modifiers import NOTHING, Modifiers


def visible_keys(
    seq_q: int,
    seq_kv: int,
    causal: str,
    device: torch.device | None = None,
    modifiers: Modifiers = NOTHING,
    keys: slice = slice(None),
    heads: tuple[int, int] = (1, 1),
) -> Tensor:
    """Which of these keys each row sees: bool [seq_q, keys], or [batch, heads or 1, seq_q, keys] where that differs.

    `heads` has the sizes of batch and heads, which an expression may ask for.
    """
    first, stop, _ = keys.indices(seq_kv)
    distance = torch.arange(first, stop, device=device) - torch.arange(seq_q, device=device)[:, None]
    if causal != "top_left":
        distance = distance - (seq_kv - seq_q)
    seen = torch.ones_like(distance, dtype=torch.bool) if causal == "none" else distance <= 0
    if modifiers.window is not None:
        left, right = modifiers.window
        seen = seen & (distance >= -left) & (distance <= right)
    if modifiers.mask is not None:
        seen = seen & modifiers.mask[..., keys]
    if modifiers.segment_ids_q is not None and modifiers.segment_ids_kv is not None:
        same = modifiers.segment_ids_q[:, :, None] == modifiers.segment_ids_kv[:, None, keys]
        seen = seen & same[:, None]
    if modifiers.mask_mod is not None:
        condition = mask_of(modifiers.mask_mod, types_of(modifiers.mod_tensors))
        places = _places(*heads, seq_q, seq_kv, keys, device)
        seen = seen & evaluate(condition, places, modifiers.mod_tensors, torch.float64)
    return seen


def _places(
    batch: int, heads: int, seq_q: int, seq_kv: int, keys: slice, device: torch.device | None
) -> dict[str, Tensor]:
    """What an expression may name, but for the score: for [batch, heads, seq_q, keys]."""
    first, stop, _ = keys.indices(seq_kv)
    return {
        "batch": torch.arange(batch, device=device)[:, None, None, None],
        "head": torch.arange(heads, device=device)[:, None, None],
        "q_idx": torch.arange(seq_q, device=device)[:, None],
        "kv_idx": torch.arange(first, stop, device=device),
        "seq_q": torch.tensor(seq_q, device=device),
        "seq_kv": torch.tensor(seq_kv, device=device),
    }


def modified(
    scores: Tensor, seq_kv: int, modifiers: Modifiers, keys: slice = slice(None), derived: bool = False
) -> tuple[Tensor, Tensor | float]:
    """Scaled scores [batch, heads, seq_q, keys] with all that is done to them; `derived`: and the derivative by what
    they were.
    """
    slope: Tensor | float = 1.0
    if modifiers.score_mod is not None:
        batch, heads, seq_q, _ = scores.shape
        places = _places(batch, heads, seq_q, seq_kv, keys, scores.device) | {"score": scores}
        given = (modifiers.score_mod, types_of(modifiers.mod_tensors))
        if derived:
            slope = evaluate(derivative_of(*given), places, modifiers.mod_tensors, scores.dtype)
        scores = evaluate(score_of(*given), places, modifiers.mod_tensors, scores.dtype).expand(scores.shape)
    if modifiers.softcap is not None:
        capped = torch.tanh(scores / modifiers.softcap)
        scores, slope = capped * modifiers.softcap, slope * (1 - capped**2)
    if modifiers.alibi_slopes is not None:
        scores = scores - modifiers.alibi_slopes[..., None, None] * distances(scores, seq_kv, keys)
    if modifiers.bias is not None:
        scores = scores + modifiers.bias[..., keys].to(scores.dtype)
    return scores, slope


def stays_of(p: Tensor, seq_kv: int, modifiers: Modifiers, keys: slice = slice(None)) -> Tensor | None:
    """What dropout multiplies P [batch, heads, seq_q, keys] with, 0 or 1 / (1 - p); None where there is no dropout."""
    if modifiers.dropout is None:
        return None
    places = range(*keys.indices(seq_kv))
    return kept(modifiers.dropout, p.shape[:2], p.shape[2], places).to(p.dtype) * modifiers.dropout.scale


def dropped(values: Tensor, stays: Tensor | None) -> Tensor:
    """P, or the gradient of what it became, where `stays` says so."""
    return values if stays is None else values * stays


def distances(scores: Tensor, seq_kv: int, keys: slice) -> Tensor:
    """How far each of these keys is from a row's own, [seq_q, keys], as ALiBi counts."""
    first, stop, _ = keys.indices(seq_kv)
    seq_q = scores.shape[-2]
    rows = torch.arange(seq_q, device=scores.device)[:, None] + (seq_kv - seq_q)
    return (torch.arange(first, stop, device=scores.device) - rows).abs()


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    rounding: Callable[[Tensor], Tensor] = lambda operand: operand,
    fp8: bool = False,
    modifiers: Modifiers = NOTHING,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v with the whole score matrix in memory, every step in the inputs' dtype.

    Run on float64 inputs it is the reference; run on the inputs' own dtype it is the yardstick of the accept rule.
    `rounding` is applied to the operands of both products, as tensor cores round fp32 to TF32; `fp8` has scores
    as `summed_in_14_bits` and P as `rounded_to_e4m3`.

    Returns:
        o [batch, heads, seq_q, head_dim_v] in the inputs' dtype, and lse [batch, heads, seq_q] (natural log) in
        fp32, or fp64 for fp64 inputs.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = rounding(q), rounding(k), rounding(v)
    products = summed_in_14_bits if fp8 else torch.matmul
    scores = _statistics_dtype(products(grouped(q, k), k[:, :, None].transpose(-1, -2)) * scale).flatten(1, 2)
    scores, _ = modified(scores, k.shape[2], modifiers)
    seen = visible_keys(q.shape[2], k.shape[2], causal, q.device, modifiers, heads=(q.shape[0], q.shape[1]))
    p, lse = _softmax(scores.masked_fill(~seen, -math.inf), modifiers.sinks)
    # Rounded before, since the row's largest one, of which rounding takes its unit, may be dropped.
    p = dropped(rounded_to_e4m3(p) if fp8 else p, stays_of(p, k.shape[2], modifiers))
    o = rounding(grouped(p.to(v.dtype), k)) @ v[:, :, None]
    return o.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def summed_in_14_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """rows [..., m, width] @ columns [..., width, n] as Hopper's tensor cores add fp8 products up.

    DeepSeek-V3 (2024), sections 3.3.2 and 3.5.2, measured it: 32 products and the sum so far are shifted to the largest
    exponent among them, and what lies more than 13 bits below it is cut off.
    """
    total = rows.new_zeros(*rows.shape[:-1], columns.shape[-1])
    for first in range(0, rows.shape[-1], 32):
        part = slice(first, first + 32)
        factors = rows[..., None, part], columns[..., part, :].transpose(-1, -2)[..., None, :, :]
        terms = torch.cat([factors[0] * factors[1], total[..., None]], -1)
        # A product's exponent is the sum of its factors', be it 2 or more.
        exponents = torch.cat(
            [torch.frexp(factors[0])[1] + torch.frexp(factors[1])[1] - 1, torch.frexp(total[..., None])[1]], -1
        )
        largest = exponents.masked_fill(terms == 0, -128).amax(-1, keepdim=True)
        unit = torch.ldexp(torch.ones_like(terms[..., :1]), largest - 14)
        total = (torch.trunc(terms / unit) * unit).sum(-1)
    return total


def rounded_to_e4m3(p: Tensor) -> Tensor:
    """P [..., keys] as fp8 holds it: relative to the row's largest one, which is 128 of e4m3's 448."""
    if p.shape[-1] == 0:
        return p
    unit = p.amax(-1, keepdim=True) / 128
    return (p / unit.masked_fill(unit == 0, 1.0)).to(torch.float8_e4m3fn).to(p.dtype) * unit


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    block_kv: int = 512,
    modifiers: Modifiers = NOTHING,
) -> tuple[Tensor, Tensor]:
    """The same, block by block with the online softmax: no seq_q x seq_kv matrix is ever stored.

    FlashAttention-2 (Dao 2023), algorithm 1, with the running maximum and sum carried apart (Milakov and Gimelshein
    2018): a stored log-sum-exp cannot stand in for the maximum. Statistics and accumulator are fp32, or fp64 for
    fp64 inputs. Returns as `plain_attention`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = grouped(q, k).to(wide) * scale
    row_max = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)
    row_sum = torch.zeros_like(row_max)
    if modifiers.sinks is not None:
        row_max = row_max.zero_() + modifiers.sinks[:, None]
        row_sum += 1
    acc = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
    seq_kv = k.shape[2]
    for start in range(0, seq_kv, block_kv):
        keys = slice(start, start + block_kv)
        scores = (queries @ k[:, :, None, keys].to(wide).transpose(-1, -2)).flatten(1, 2)
        scores, _ = modified(scores, seq_kv, modifiers, keys)
        seen = visible_keys(q.shape[2], seq_kv, causal, q.device, modifiers, keys, (q.shape[0], q.shape[1]))
        scores = scores.masked_fill(~seen, -math.inf)
        new_max = torch.maximum(row_max, scores.amax(-1))
        safe_max = new_max.masked_fill(new_max == -math.inf, 0.0)
        p = torch.exp(scores - safe_max[..., None])
        rescale = torch.exp(row_max - safe_max)
        row_sum = row_sum * rescale + p.sum(-1)
        p = dropped(p, stays_of(p, seq_kv, modifiers, keys))
        acc = acc * rescale[..., None] + (grouped(p, k) @ v[:, :, None, keys].to(wide)).flatten(1, 2)
        row_max = new_max
    empty = row_sum == 0
    o = acc / row_sum.masked_fill(empty, 1.0)[..., None]
    lse = row_max + torch.log(row_sum)
    return o.to(q.dtype), lse


def grouped(q: Tensor, k: Tensor) -> Tensor:
    """q, or what has its rows, as [batch, kv_heads, group, seq_q, head_dim]: keys broadcast over it without a copy."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads = k.shape[1]
    return q.reshape(batch, kv_heads, heads // max(kv_heads, 1), seq_q, head_dim)


def _statistics_dtype(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities and natural log-sum-exp over the last dimension; empty rows give 0 and -inf."""
    seen = scores
    if sinks is not None:
        seen = torch.cat([scores, sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    if seen.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -math.inf)
    lse = torch.logsumexp(seen, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), lse
