"""Whether what is compared computes the same: some rows of every result against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashgen.check import FLOOR, GRADIENT_FACTOR, max_error
from flashgen.mods import mask_mod, score_mod

# So many rows, spread over the first sequence, are compared, whatever the length.
ROWS = 32
NAMES = ("output", "dq", "dk", "dv")


class Truth:
    """The output in some rows and, where wanted, the gradients of q, k and v of a loss in these rows alone.

    In these rows dO is random and elsewhere 0, so that dK and dV, too, take no more than these rows.

    Args:
        q, k, v: [batch, heads or kv_heads, seq, width], as every implementation gets them.
        causal, options: what the scores go through (flashgen.mods).
        gradients: whether gradients are of concern.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any], gradients: bool
    ) -> None:
        self._inputs, self._gradients = (q, k, v), gradients
        self._rows = torch.linspace(0, q.shape[2] - 1, min(ROWS, q.shape[2]), device=q.device).long()
        generator = torch.Generator(q.device).manual_seed(5)
        shape = (1, q.shape[1], len(self._rows), v.shape[3])
        self._do = torch.randn(shape, device=q.device, generator=generator).to(q.dtype)
        exact, plain = (self._results(dtype, causal, options) for dtype in (torch.float64, q.dtype))
        self._expected = [
            # Few rows may be lucky: what rounding the result costs is allowed in any case.
            (value, GRADIENT_FACTOR * max(max_error(other, value), _rounding(value, q.dtype)) + FLOOR)
            for value, other in zip(exact, plain, strict=True)
        ]

    def _results(self, dtype: torch.dtype, causal: bool, options: Mapping[str, Any]) -> list[Tensor]:
        leaves = [each[:1].detach().to(dtype).requires_grad_() for each in self._inputs]
        q, k, v = leaves
        o = _rows_of(q, k, v, self._rows, causal, options)
        if not self._gradients:
            return [o.detach()]
        return [o.detach(), *torch.autograd.grad(o, leaves, self._do.to(dtype))]

    def refutes(self, forward: Callable[[], Tensor]) -> str | None:
        """Why what an implementation computes is wrong, or None; `forward` returns [batch, heads, seq_q, width]."""
        with torch.set_grad_enabled(self._gradients):
            o = forward()
        found = [o.detach()[:1, :, self._rows]]
        if self._gradients:
            do = torch.zeros_like(o)
            do[:1, :, self._rows] = self._do
            found += [each[:1] for each in torch.autograd.grad(o, self._inputs, do)]
        for name, actual, (expected, allowed) in zip(NAMES, found, self._expected, strict=False):
            error = max_error(actual, expected)
            if not error <= allowed:
                return f"wrong: {name} is off by {error:.3g}, allowed {allowed:.3g}"
        return None


def _rounding(value: Tensor, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * value.abs().max().item() if value.numel() else 0.0


def _rows_of(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, causal: bool, options: Mapping[str, Any]) -> Tensor:
    """Attention of some rows of one batch entry, scores and probabilities whole; sums over scores in fp32 at least."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q[:, :, rows] @ keys.transpose(2, 3)) * q.shape[3] ** -0.5
    scores = scores if q.dtype == torch.float64 else scores.float()
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=q.device), torch.arange(q.shape[1], device=q.device)
    places = b, h[:, None, None], rows[:, None], torch.arange(k.shape[2], device=q.device)
    score, seen = score_mod(options), mask_mod(causal, options)
    if score is not None:
        scores = score(scores, *places)
    if seen is not None:
        scores = scores.masked_fill(~seen(*places), -torch.inf)
    logits = scores
    if "sinks" in options:
        sinks = options["sinks"].to(scores.dtype)[:, None, None]
        logits = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    lse = logits.logsumexp(-1, keepdim=True)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0))
    return p.to(v.dtype) @ values
