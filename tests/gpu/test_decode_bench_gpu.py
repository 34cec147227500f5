"""Timing, tuning and comparing decodes on this machine's GPU, at sizes that take no time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashgen
from flashgen import store
from flashgen.bandwidth import read_bandwidth
from flashgen.benchmark import kv_bytes
from flashgen.compare_decode import compare_decode
from flashgen.evaluate import evaluate, remeasure
from flashgen.families import FAMILIES, Variant
from flashgen.graphs import Replayed, eager_us
from flashgen.hardware import current_gpu
from flashgen.kvcache_api import explain_kvcache
from flashgen.problem import Problem
from flashgen.space import Config
from flashgen.spec import Spec
from flashgen.tune import Request, tune
from flashgen.workers import Workers

FAMILY = FAMILIES["triton_decode"]
SPEC = Spec("decode", 64, 64, "bf16", "bottom_right")
PROBLEM = Problem(2, 8, 2, 1, 2048)


def test_a_graph_takes_the_time_of_what_it_launches() -> None:
    """A copy of 256 MB: once, or four times as long for four times as much, whichever way it is launched."""
    x = torch.randn(2**26, device="cuda")
    y = torch.empty_like(x)

    def copy() -> None:
        y.copy_(x)

    def four() -> None:
        for _ in range(4):
            y.copy_(x)

    once, often = (min(Replayed([call] * 3).sample(repeat_ms=10)) for call in (copy, four))
    assert once == pytest.approx(often / 4, rel=0.2)
    assert eager_us([copy] * 3) == pytest.approx(once, rel=0.3)
    assert torch.equal(x, y)


def test_the_read_bandwidth_is_that_of_memory() -> None:
    assert 0.5 * current_gpu().dram_gbs < read_bandwidth(2**31) < 1.1 * current_gpu().dram_gbs


@pytest.mark.parametrize("page_size", [0, 48])
def test_a_variant_is_checked_and_timed_both_ways(page_size: int) -> None:
    spec, gpu = Spec("decode", 64, 64, "bf16", "bottom_right", paged=page_size > 0), current_gpu()
    problems = (PROBLEM, Problem(9, 8, 2, 1, 1000, page_size))
    default = FAMILY.default(spec, gpu)
    variants = [Variant(FAMILY, spec, Config(**{**default, "blocks_per_sm": number})) for number in (1, 2)]
    result = evaluate(variants[0], problems, repeat_ms=5)
    again = remeasure(variants, problems[0], rounds=2)
    for problem, measured in zip(problems, result.times, strict=True):  # type: ignore[union-attr]
        assert measured.eager_us is not None and measured.eager_us > 0.5 * measured.median_us
        # No memory of theirs is faster than ten times what this GPU's is.
        assert kv_bytes(spec, problem) / measured.median_us / 1e3 < 10 * gpu.dram_gbs
    assert again[0].median_us == pytest.approx(result.times[0].median_us, rel=0.3)  # type: ignore[union-attr]


def test_tune_store_and_dispatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, problems = current_gpu(), (PROBLEM, Problem(16, 8, 2, 1, 2048))
    asked = Request(SPEC, problems, gpu, (FAMILY,), "measured", trials=3, budget_s=90.0, resume=False)
    with Workers(4) as compilers, Workers(1) as gpu_worker:
        outcome = tune(asked, compilers, gpu_worker, lambda progress: None)
    (entry,) = outcome.entries("1.0")
    assert entry.problem == problems[1] and entry.time.eager_us is not None
    store.merge(tmp_path / f"{gpu.name}.yaml", gpu, [entry])
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path))
    flashgen.forget()
    q = torch.randn(3, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(3, 1900, 2, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((3,), 1900, dtype=torch.int32, device="cuda")
    selection = explain_kvcache(q, cache, cache, cache_seqlens=lengths)
    assert selection.method == "measured" and selection.variant.config == entry.config
    monkeypatch.undo()
    flashgen.forget()


def test_a_comparison() -> None:
    """Whoever is here is right and has a time; paged and contiguous caches are read alike."""
    names = ("flashgen", "paged", "cudnn", "fa2", "fa3")
    rows = compare_decode(SPEC, Problem(4, 8, 2, 1, 1000, page_size=64), names, 1000.0, rounds=1)
    assert [row.name for row in rows] == list(names)
    assert not [row for row in rows if row.failure is not None and row.failure.startswith("wrong")]
    for row in rows[:2]:
        assert row.failure is None and row.measurement is not None and row.gbs is not None
        assert row.gbs == pytest.approx(4 * 2 * 1000 * 128 * 2 / row.measurement.median_us / 1e3)
    several = compare_decode(SPEC, Problem(2, 8, 2, 5, 700, page_size=32), ("flashgen", "paged"), 1000.0, rounds=1)
    assert [row.failure for row in several] == [None, None]
