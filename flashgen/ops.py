"""`torch.ops.flashgen.forward`: attention as one opaque operator, for torch.compile and torch.export."""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.dispatch import attention
from flashgen.tensors import empty_output


@torch.library.custom_op("flashgen::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
) -> tuple[Tensor, Tensor]:
    """`attention` with one return type: (output, lse), lse empty when it is not wanted."""
    mask = False if causal == "none" else causal
    result = attention(q, k, v, causal=mask, scale=scale, layout=layout, return_lse=return_lse, family=family)
    if isinstance(result, tuple):
        return result
    return result, q.new_empty(0, dtype=torch.float32)


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
) -> tuple[Tensor, Tensor]:
    batch, first, second = q.shape[:3]
    heads, seq_q = (first, second) if layout == "bhsd" else (second, first)
    lse_shape = (batch, heads, seq_q) if return_lse else (0,)
    lse_dtype = torch.float64 if return_lse and q.dtype == torch.float64 else torch.float32
    return empty_output(q, v), q.new_empty(lse_shape, dtype=lse_dtype)
