"""Attention and its gradients for CPU tensors, in plain torch: results laid out as a kernel's would be.

Without autocast, which would make bf16 of the fp32 products inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.descales import dequantised
from flashgen.modifiers import NOTHING, Modifiers
from flashgen.reference import tiled_attention
from flashgen.reference_backward import Gradients, tiled_backward
from flashgen.tensors import empty_gradient, empty_output


def attend_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    layout: str,
    modifiers: Modifiers = NOTHING,
) -> tuple[Tensor, Tensor]:
    """(o, lse), arguments as for `flashgen.attention`; `causal` is a Spec's. fp8 inputs are computed in fp32."""
    views = [_turned(layout, each) for each in (q, k, v)]
    if modifiers.descales is not None:
        numbers = [1.0 if each is None else each for each in modifiers.descales]
        views = [dequantised(*each, torch.float32) for each in zip(views, numbers, strict=True)]
    with torch.autocast("cpu", enabled=False):
        result, lse = tiled_attention(*views, causal=causal, scale=scale, modifiers=modifiers)
    return empty_output(q, v).copy_(_turned(layout, result)), lse


def gradients_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float | None,
    layout: str,
    modifiers: Modifiers = NOTHING,
) -> Gradients:
    """Arguments as for `flashgen.gradients.gradients`; those of modifiers are as tiled_backward returns them."""
    q_view, k_view, v_view, o, do = (_turned(layout, each) for each in (q, k, v, o, do))
    with torch.autocast("cpu", enabled=False):
        results = tiled_backward(
            q_view, k_view, v_view, o, lse, do, dlse, causal=causal, scale=scale, modifiers=modifiers
        )
    dq, dk, dv = (
        empty_gradient(tensor).copy_(_turned(layout, result))
        for tensor, result in zip((q, k, v), results[:3], strict=True)
    )
    return results._replace(dq=dq, dk=dk, dv=dv)


def _turned(layout: str, tensor: Tensor) -> Tensor:
    """From or to [batch, heads, seq, head_dim]: both are the same turn."""
    return tensor if layout == "bhsd" else tensor.transpose(1, 2)
