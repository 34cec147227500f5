"""Calls with every option, for the tests of what comes after their judgement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen import features as known

# What `attention` has options for.
FEATURES = tuple(name for name in known.FEATURES if name != "varlen")
# Of a call's arguments.
DIFFERENTIABLE = ("q", "k", "v", "alibi_slopes", "bias", "sinks")
Three = tuple[Tensor, Tensor, Tensor]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tensors(seq_q: int = 4, seq_kv: int = 6, dtype: torch.dtype = torch.float64, layout: str = "bhsd") -> Three:
    """q, k and v of 2 x 4 heads, which share 2 key heads; head_dim 3, head_dim_v 2."""
    drawn = (random(2, 4, seq_q, 3, seed=1), random(2, 2, seq_kv, 3, seed=2), random(2, 2, seq_kv, 2, seed=3))
    q, k, v = (each if layout == "bhsd" else each.transpose(1, 2).contiguous() for each in drawn)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def options(*features: str, seq_q: int = 4, seq_kv: int = 6, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The options that ask for these features of such tensors; with a window of both sides some rows see little."""
    known: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 0.7},
        "alibi": {"alibi_slopes": random(4, seed=5, dtype=torch.float32).abs()},
        "bias": {"bias": random(2, 4, seq_q, seq_kv, seed=6, dtype=dtype)},
        "window": {"window": (2, 1)},
        "mask": {"mask": random(2, 1, seq_q, seq_kv, seed=7) > -0.5},
        "segments": {
            "segment_ids_q": torch.arange(seq_q).expand(2, seq_q) // 3,
            "segment_ids_kv": torch.arange(seq_kv).expand(2, seq_kv) // 4,
        },
        "dropout": {"dropout_p": 0.4, "dropout_seed": torch.tensor([2**40 + 7, 11])},
        "sinks": {"sinks": random(4, seed=8, dtype=dtype)},
        "score_mod": {"score_mod": "score * (1.0 + 0.1 * head) + 0.1 * (kv_idx - q_idx)"},
        "mask_mod": {"mask_mod": "(kv_idx + 1 < q_idx) | (kv_idx % 4 < 3)"},
    }
    found: dict[str, Any] = {}
    for feature in features:
        found |= known[feature]
    return found
