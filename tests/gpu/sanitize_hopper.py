"""Launches of `hopper_fwd` for NVIDIA's compute-sanitizer, small enough for it; every result is checked.

compute-sanitizer --tool memcheck  python tests/gpu/sanitize_hopper.py
compute-sanitizer --tool racecheck python tests/gpu/sanitize_hopper.py
"""

from __future__ import annotations

import itertools

import torch

from flashgen.benchmark import inputs
from flashgen.check import FLOOR, FORWARD_FACTOR, max_error
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import current_gpu
from flashgen.launch import bind
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Causal, Problem, Spec

FAMILY = FAMILIES["hopper_fwd"]
MASKS: tuple[Causal, ...] = ("none", "bottom_right")
LENGTHS = ((1, 1), (65, 130), (200, 193), (384, 512))


def main() -> None:
    launches = 0
    for head_dim, causal, schedule in itertools.product((64, 128, 256), MASKS, (0, 1, 2)):
        spec = Spec(head_dim=head_dim, head_dim_v=head_dim, dtype="bf16", causal=causal)
        config = Config(**{**FAMILY.default(spec, current_gpu()), "schedule": schedule, "ahead": 0})
        for seq_q, seq_kv in LENGTHS:
            q, k, v = inputs(spec, Problem(1, 4, 2, seq_q, seq_kv), "cuda")
            o, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device="cuda")
            bind(Variant(FAMILY, spec, config), q, k, v, o)(q, k, v, o, lse, spec.head_dim**-0.5)
            true, _ = plain_attention(q.double(), k.double(), v.double(), causal=causal)
            plain, _ = plain_attention(q, k, v, causal=causal)
            allowed = FORWARD_FACTOR * max_error(plain, true) + FLOOR
            assert max_error(o, true) <= allowed, (spec.slug, seq_q, seq_kv)
            launches += 1
    print(f"{launches} launches, all right")


if __name__ == "__main__":
    main()
