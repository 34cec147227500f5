"""Entries for the tests of the store."""

from __future__ import annotations

from flashgen.families import FAMILIES
from flashgen.hardware import Gpu
from flashgen.problem import Bucket, Problem
from flashgen.records import Accuracy, Entry, Timing, Versions
from flashgen.spec import Spec

H200 = Gpu.named("h200")
SPEC = Spec(causal="bottom_right")
USABLE = FAMILIES["triton_fwd"].space(SPEC, H200).usable
VERSIONS = Versions("0.1.0", "3.6.0", "2.11.0+cu130", "580.159", "b90a56f5e65b")


def entry(
    seq: int = 4096,
    *,
    spec: Spec = SPEC,
    family: str = "triton_fwd",
    config: int = 0,
    measured: bool = True,
    median_us: float = 123.4,
) -> Entry:
    """A valid entry for seq x seq with the config-th usable config."""
    return Entry(
        spec=spec,
        bucket=Bucket(seq, seq),
        family=family,
        config=USABLE[config],
        method="measured" if measured else "estimated",
        problem=Problem(batch=4, heads=16, kv_heads=16, seq_q=seq, seq_kv=seq),
        time=Timing(median_us, 1.2, 200) if measured else Timing(median_us, None, None),
        accuracy=Accuracy(0.0012, 0.0031) if measured else None,
        versions=VERSIONS,
    )
