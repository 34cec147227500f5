"""Attention in plain torch, forward and backward: the truth for kernels, and what CPU tensors run on.

Imports nothing of ours. Shapes: q [batch, heads, seq_q, head_dim], k [batch, kv_heads, seq_kv, head_dim],
v [batch, kv_heads, seq_kv, head_dim_v]; heads is a multiple of kv_heads, query head h reads key head
h // (heads // kv_heads). `causal` is "none", "bottom_right" (key j visible to row i iff j <= i + seq_kv - seq_q) or
"top_left" (j <= i). A row that sees no key has output 0 and LSE -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def visible_keys(seq_q: int, seq_kv: int, causal: str, device: torch.device | None = None) -> Tensor:
    """Which keys each row sees: bool [seq_q, seq_kv]."""
    if causal == "none":
        return torch.ones(seq_q, seq_kv, dtype=torch.bool, device=device)
    diagonal = seq_kv - seq_q if causal == "bottom_right" else 0
    return torch.ones(seq_q, seq_kv, dtype=torch.bool, device=device).tril(diagonal)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    rounding: Callable[[Tensor], Tensor] = lambda operand: operand,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v with the whole score matrix in memory, every step in the inputs' dtype.

    Run on float64 inputs it is the reference; run on the inputs' own dtype it is the yardstick of the accept rule.
    `rounding` is applied to the operands of both products, as tensor cores round fp32 to TF32.

    Returns:
        o [batch, heads, seq_q, head_dim_v] in the inputs' dtype, and lse [batch, heads, seq_q] (natural log) in
        fp32, or fp64 for fp64 inputs.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = rounding(q), rounding(k), rounding(v)
    scores = (_grouped(q, k) @ k[:, :, None].transpose(-1, -2)) * scale
    seen = visible_keys(q.shape[2], k.shape[2], causal, q.device)
    p, lse = _softmax(_statistics_dtype(scores).masked_fill(~seen, -math.inf))
    o = rounding(p.to(v.dtype)) @ v[:, :, None]
    return o.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    block_kv: int = 512,
) -> tuple[Tensor, Tensor]:
    """The same, block by block with the online softmax: no seq_q x seq_kv matrix is ever stored.

    FlashAttention-2 (Dao 2023), algorithm 1, with the running maximum and sum carried apart (Milakov and Gimelshein
    2018): a stored log-sum-exp cannot stand in for the maximum. Statistics and accumulator are fp32, or fp64 for
    fp64 inputs. Returns as `plain_attention`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = _grouped(q, k).to(wide) * scale
    row_max = torch.full(grouped.shape[:-1], -math.inf, dtype=wide, device=q.device)
    row_sum = torch.zeros_like(row_max)
    acc = torch.zeros(*grouped.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
    seq_kv = k.shape[2]
    for start in range(0, seq_kv, block_kv):
        keys = slice(start, start + block_kv)
        scores = grouped @ k[:, :, None, keys].to(wide).transpose(-1, -2)
        scores = scores.masked_fill(_hidden(scores, seq_kv, start, causal), -math.inf)
        new_max = torch.maximum(row_max, scores.amax(-1))
        safe_max = new_max.masked_fill(new_max == -math.inf, 0.0)
        p = torch.exp(scores - safe_max[..., None])
        rescale = torch.exp(row_max - safe_max)
        row_sum = row_sum * rescale + p.sum(-1)
        acc = acc * rescale[..., None] + p @ v[:, :, None, keys].to(wide)
        row_max = new_max
    empty = row_sum == 0
    o = acc / row_sum.masked_fill(empty, 1.0)[..., None]
    lse = row_max + torch.log(row_sum)
    return o.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def tiled_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: str = "none",
    scale: float | None = None,
    block_kv: int = 512,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention, block by block: P is recomputed from the log-sum-exp, never stored.

    FlashAttention-2 (Dao 2023), algorithm 2. delta, the sum of dO * O over a row, takes all keys: that of one block is
    another number. The log-sum-exp is differentiable: its gradient enters delta.

    Args:
        o, lse: what the forward returned.
        do: gradient of o.
        dlse: gradient of lse; None is zero.

    Returns:
        dq, dk and dv, shaped and typed as q, k and v; sums, those over a group's heads included, are fp32, or fp64 for
        fp64 inputs. A row that sees no key has dq 0 and adds nothing to dk and dv.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, do, o = _grouped(q, k).to(wide), _grouped(do, k).to(wide), _grouped(o, k).to(wide)
    delta = (do * o).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - _grouped(dlse[..., None], k)
    lse = _grouped(lse[..., None], k)
    dq = torch.zeros_like(queries)
    dk = torch.zeros(k.shape, dtype=wide, device=k.device)
    dv = torch.zeros(v.shape, dtype=wide, device=v.device)
    # Scaled before the product, as in the forward: of large scores another rounding is another P.
    scaled = queries * scale
    for start in range(0, k.shape[2], block_kv):
        block = slice(start, start + block_kv)
        keys, values = k[:, :, None, block].to(wide), v[:, :, None, block].to(wide)
        scores = scaled @ keys.transpose(-1, -2)
        hidden = _hidden(scores, k.shape[2], start, causal)
        p = torch.exp(scores - lse).masked_fill(hidden, 0.0)
        ds = (p * (do @ values.transpose(-1, -2) - delta)).masked_fill(hidden, 0.0)
        dv[:, :, block] = torch.einsum("bhgij,bhgid->bhjd", p, do)
        dk[:, :, block] = torch.einsum("bhgij,bhgid->bhjd", ds, queries) * scale
        dq += ds @ keys * scale
    return dq.to(q.dtype).reshape(q.shape), dk.to(k.dtype), dv.to(v.dtype)


def _hidden(scores: Tensor, seq_kv: int, start: int, causal: str) -> Tensor:
    """Which scores of one block of keys, from `start` on, the mask hides: bool, the last two dimensions of scores."""
    seq_q, block_kv = scores.shape[-2:]
    if causal == "none":
        return torch.zeros((), dtype=torch.bool, device=scores.device)
    diagonal = (seq_kv - seq_q if causal == "bottom_right" else 0) - start
    return ~torch.ones(seq_q, block_kv, dtype=torch.bool, device=scores.device).tril(diagonal)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """q, or what has its rows, as [batch, kv_heads, group, seq_q, head_dim]: keys broadcast over it without a copy."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads = k.shape[1]
    return q.reshape(batch, kv_heads, heads // max(kv_heads, 1), seq_q, head_dim)


def _statistics_dtype(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and natural log-sum-exp over the last dimension; empty rows give 0 and -inf."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), lse
