"""Gradients of attention in plain torch: the truth for kernels' gradients, and what CPU tensors have.

Shapes and options as in flashgen.reference. FlashAttention-2 (Dao 2023), algorithm 2. delta, the sum of dO * O over a
row, takes all keys: that of one block is another number. The log-sum-exp is differentiable: its gradient enters delta.
A sink is a key whose value is 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.modifiers import NOTHING, Modifiers
from flashgen.reference import distances, dropped, grouped, modified, stays_of, visible_keys


class Gradients(NamedTuple):
    """Of q, k and v, as they are; of bias, slopes and sinks as Modifiers have them, where there are any."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dslopes: Tensor | None = None
    dsinks: Tensor | None = None


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
    modifiers: Modifiers = NOTHING,
) -> Gradients:
    """Gradients of attention, block by block: P is recomputed from the log-sum-exp, never stored.

    Args:
        o, lse: what the forward returned.
        do: gradient of o.
        dlse: gradient of lse; None is zero.

    Returns:
        the gradients; sums, those over a group's heads included, are fp32, or fp64 for fp64 inputs. A row that sees no
        key has dq 0 and adds nothing to dk and dv.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    seq_kv = k.shape[2]
    queries, do = grouped(q, k).to(wide), grouped(do, k).to(wide)
    delta = _delta(do.flatten(1, 2), o, dlse)
    dq = torch.zeros_like(queries)
    dk, dv = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (k, v))
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(-inf - -inf) would be NaN where a row sees nothing
    dbias, dslopes = (
        None if each is None else torch.zeros(each.shape, dtype=wide, device=q.device)
        for each in (modifiers.bias, modifiers.alibi_slopes)
    )
    # Scaled before the product, as in the forward: of large scores another rounding is another P.
    scaled = queries * scale
    for start in range(0, seq_kv, block_kv):
        block = slice(start, start + block_kv)
        keys, values = k[:, :, None, block].to(wide), v[:, :, None, block].to(wide)
        scores = (scaled @ keys.transpose(-1, -2)).flatten(1, 2)
        scores, slope = modified(scores, seq_kv, modifiers, block, derived=True)
        hidden = ~visible_keys(q.shape[2], seq_kv, causal, q.device, modifiers, block, (q.shape[0], q.shape[1]))
        p = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0.0)
        stays = stays_of(p, seq_kv, modifiers, block)
        dp = dropped((do @ values.transpose(-1, -2)).flatten(1, 2), stays)
        ds = (p * (dp - delta)).masked_fill(hidden, 0.0)
        if dbias is not None:
            dbias[..., block] = ds
        if dslopes is not None:
            dslopes -= (ds * distances(scores, seq_kv, block)).sum((-1, -2))
        # What is hidden may be infinite before the cap, whose slope there is 0, or NaN.
        ds = grouped((ds * slope).masked_fill(hidden, 0.0), k)
        dv[:, :, block] = torch.einsum("bhgij,bhgid->bhjd", grouped(dropped(p, stays), k), do)
        dk[:, :, block] = torch.einsum("bhgij,bhgid->bhjd", ds, queries) * scale
        dq += ds @ keys * scale
    dsinks = None if modifiers.sinks is None else _of_sinks(modifiers.sinks, lse, delta)
    return Gradients(dq.to(q.dtype).reshape(q.shape), dk.to(k.dtype), dv.to(v.dtype), dbias, dslopes, dsinks)


def _delta(do: Tensor, o: Tensor, dlse: Tensor | None) -> Tensor:
    """[batch, heads, seq_q, 1]."""
    delta = (do * o.to(do.dtype)).sum(-1, keepdim=True)
    return delta if dlse is None else delta - dlse[..., None]


def _of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the sinks, [heads]."""
    return -(torch.exp(sinks[:, None] - lse) * delta[..., 0]).sum((0, 2))
