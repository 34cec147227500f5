"""Launches for NVIDIA's compute-sanitizer, small enough for it; every result is checked.

compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py forward backward modified
compute-sanitizer --tool racecheck python tests/gpu/sanitize.py forward
compute-sanitizer --tool racecheck python tests/gpu/sanitize.py decode
for pair in 0 1 2 3 4 5 6 7 8 9 10 11; do compute-sanitizer python tests/gpu/sanitize.py modified:$pair & done
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flashgen.benchmark import inputs
from flashgen.cases import Case
from flashgen.check import FLOOR, FORWARD_FACTOR, Accuracy, check, max_error
from flashgen.check_decode import check_decode
from flashgen.decode_cases import DECODE_CASES
from flashgen.evaluate import with_workspace
from flashgen.families import FAMILIES, Family, Variant
from flashgen.hardware import current_gpu
from flashgen.launch import bind, launcher
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Causal, Spec

MASKS: tuple[Causal, ...] = ("none", "bottom_right")
LENGTHS = ((1, 1), (65, 130), (200, 193), (384, 512))
CASES = tuple(Case(f"{q}x{k}", Problem(1, 4, 2, q, k)) for q, k in LENGTHS)
PAIRS = (
    ("softcap", "window"), ("alibi", "bias"), ("mask", "sinks"), ("window", "segments"), ("bias", "softcap"),
    ("mask", "alibi"), ("segments", "bias"), ("window", "sinks"), ("dropout", "window"), ("score_mod", "mask_mod"),
    ("mask_mod", "segments"), ("wide", "softcap"),
)  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "bias": {"bias": "bf16"},
    "score_mod": {"score_mod": "(score + mod0[head, (q_idx - kv_idx)])", "mod_tensors": "fp32[2]"},
    "mask_mod": {"mask_mod": "((kv_idx <= q_idx) | (kv_idx < 70))"},
    "wide": {"head_dim": 320, "head_dim_v": 288},
}


def forward() -> None:
    family = FAMILIES["hopper_fwd"]
    for head_dim, causal, schedule in itertools.product((64, 128, 256), MASKS, (0, 1, 2)):
        spec = Spec(head_dim=head_dim, head_dim_v=head_dim, dtype="bf16", causal=causal)
        config = Config(**{**family.default(spec, current_gpu()), "schedule": schedule, "ahead": 0})
        for case in CASES:
            q, k, v = inputs(spec, case.problem, "cuda")
            o, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device="cuda")
            bind(Variant(family, spec, config), q, k, v, o)(q, k, v, o, lse, spec.head_dim**-0.5)
            true, _ = plain_attention(q.double(), k.double(), v.double(), causal=causal)
            plain, _ = plain_attention(q, k, v, causal=causal)
            allowed = FORWARD_FACTOR * max_error(plain, true) + FLOOR
            assert max_error(o, true) <= allowed, (spec.slug, case.name)


def _checked(variant: Variant) -> None:
    launch = launcher(variant)
    if variant.spec.op == "backward":
        launch = with_workspace(variant, launch)
    result = check(launch, variant.spec, "cuda", CASES)
    assert isinstance(result, Accuracy), (variant.slug, result)


def backward() -> None:
    for family, head_dim, causal in itertools.product(_backwards(), (64, 128, 256), MASKS):
        spec = Spec("backward", head_dim, head_dim, "bf16", causal)
        if family.refuses(spec, family.default(spec, current_gpu()), current_gpu()) is None:
            _checked(Variant(family, spec, family.default(spec, current_gpu())))


def _backwards() -> Iterator[Family]:
    return (family for family in FAMILIES.values() if family.op == "backward")


def modified(pairs: Sequence[tuple[str, str]] = PAIRS) -> None:
    for pair, causal, name in itertools.product(pairs, MASKS, ("triton_fwd", "triton_bwd")):
        fields: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64}
        for each in pair:
            fields |= FIELDS.get(each, {each: True})
        family, spec = FAMILIES[name], Spec(dtype="bf16", causal=causal, **fields)
        spec = spec if family.op == "forward" else spec.backward
        _checked(Variant(family, spec, family.default(spec, current_gpu())))


def decode() -> None:
    family = FAMILIES["triton_decode"]
    served: dict[str, Any] = {"paged": True, "appended": True, "varlen": True}
    for fields in ({}, served, {**served, "window": True, "sinks": True}, {"cache": "int8", "descale": "token"}):
        spec = Spec("decode", dtype="bf16", causal="bottom_right", **fields)  # type: ignore[arg-type]
        variant = Variant(family, spec, family.default(spec, current_gpu()))
        result = check_decode(launcher(variant), spec, "cuda", DECODE_CASES[:4])
        assert isinstance(result, Accuracy), (variant.slug, result)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        name, _, place = each.partition(":")
        if place:
            modified(PAIRS[int(place) :][:1])
        else:
            {"forward": forward, "backward": backward, "modified": modified, "decode": decode}[name]()
        print(f"{each}: all right", flush=True)
