"""`flashgen.merge`: attention over all keys from its results over two sets of them."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from flashgen.errors import InputError
from flashgen.spec import Layout


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """What attention over two disjoint sets of keys together returns, from what it returned for each of them.

    In plain torch, on any device, in fp32 or, for an fp64 log-sum-exp, fp64; differentiable. Sinks count as keys: only
    one of the two calls may have been given them.

    Args:
        o1, o2: outputs [batch, heads, seq_q, head_dim_v] of one floating dtype (`layout="bshd"`: [batch, seq_q, heads,
            head_dim_v]).
        lse1, lse2: their natural log-sum-exps [batch, heads, seq_q], fp32 or fp64, in either layout.
        layout: of the outputs.

    Returns:
        (o, lse) like them; a row that saw no key in either is 0, and its lse -inf.

    Raises:
        InputError: the tensors do not fit together.
    """
    _check(o1, lse1, o2, lse2, layout)
    wide = torch.promote_types(lse1.dtype, lse2.dtype)
    lse1, lse2 = lse1.to(wide), lse2.to(wide)
    # A constant: whatever is subtracted cancels.
    top = torch.maximum(lse1, lse2).detach()
    top = top.masked_fill(top == -math.inf, 0.0)
    weight1, weight2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = weight1 + weight2
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    lse = (top + torch.log(total)).masked_fill(blind, -math.inf)
    share1, share2 = ((each / total)[..., None] for each in (weight1, weight2))
    if layout == "bshd":
        share1, share2 = share1.transpose(1, 2), share2.transpose(1, 2)
    return (o1.to(wide) * share1 + o2.to(wide) * share2).to(o1.dtype), lse


def _check(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, layout: str) -> None:
    named = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, but got {type(tensor).__name__}.")
        if tensor.device != o1.device:
            raise InputError(f"{name} must be on o1's device {o1.device}, but got {tensor.device}. Move it there.")
    if layout not in get_args(Layout):
        raise InputError(f"layout must be 'bhsd' or 'bshd', but got {layout!r}.")
    if o1.dim() != 4 or o1.shape != o2.shape:
        raise InputError(
            f"o1 and o2 must have one shape of 4 dimensions, but got {tuple(o1.shape)} and {tuple(o2.shape)}."
        )
    if o1.dtype != o2.dtype or not o1.is_floating_point():
        raise InputError(
            f"o1 and o2 must have one floating dtype, but got {o1.dtype} and {o2.dtype}. Cast one of them."
        )
    batch, first, second = o1.shape[:3]
    rows = (batch, first, second) if layout == "bhsd" else (batch, second, first)
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if tuple(lse.shape) != rows or lse.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"{name} must be [batch, heads, seq_q] = {list(rows)} in float32 or float64, but got "
                f"{tuple(lse.shape)} in {lse.dtype} (layout={layout!r})."
            )
