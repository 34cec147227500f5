"""Tuning, storing, dispatching and exporting on a real GPU, end to end, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen import store
from flashgen.check import Accuracy
from flashgen.evaluate import evaluate
from flashgen.export import write
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import current_gpu
from flashgen.problem import Problem
from flashgen.records import Accuracy as StoredAccuracy
from flashgen.select import current_versions
from flashgen.spec import Spec
from flashgen.tune import Request, tune
from flashgen.workers import Failure, Workers

FAMILY = FAMILIES["triton_fwd"]
SPEC = Spec(head_dim=64, head_dim_v=64, dtype="fp16", causal="bottom_right")
PROBLEM = Problem(2, 4, 2, 512, 512)


def request(**changes: object) -> Request:
    base = Request(SPEC, (PROBLEM,), current_gpu(), (FAMILY,), "measured", trials=4, budget_s=90.0, resume=False)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_tune_store_and_dispatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Workers(2) as compilers, Workers(1) as gpu_worker:
        outcome = tune(request(), compilers, gpu_worker, lambda progress: None)
    (entry,) = outcome.entries("1.0")
    assert entry.method == "measured" and isinstance(entry.accuracy, StoredAccuracy)
    assert outcome.rankings[0].best[0].variant.config == entry.config
    gpu = current_gpu()
    store.merge(tmp_path / f"{gpu.name}.yaml", gpu, [entry])
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path))
    flashgen.forget()
    q = torch.randn(2, 4, 400, 64, device="cuda", dtype=torch.float16)
    k = torch.randn(2, 2, 400, 64, device="cuda", dtype=torch.float16)
    selection = flashgen.explain(q, k, k, causal=True)
    assert selection.method == "measured" and str(tmp_path) in str(selection.source)
    assert selection.variant.config == entry.config
    # Another dtype is another spec: the winner is not used for it.
    assert str(tmp_path) not in str(flashgen.explain(q.bfloat16(), k.bfloat16(), k.bfloat16(), causal=True).source)
    monkeypatch.undo()
    flashgen.forget()


def illegal_access() -> None:
    """A kernel that writes where nothing is; the CUDA context of its process is lost."""
    buffer = torch.zeros(1, device="cuda")
    far = torch.tensor([2**40], device="cuda")
    torch.ops.aten.put_(buffer, far, torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def test_a_broken_context_does_not_reach_the_next_candidate() -> None:
    gpu = current_gpu()
    variant = Variant(FAMILY, SPEC, FAMILY.default(SPEC, gpu))
    with Workers(1) as worker:
        broken = worker.outcome(worker.submit(120.0, illegal_access))
        assert isinstance(broken, Failure) and broken.fatal
        result = worker.outcome(worker.submit(120.0, evaluate, variant, (PROBLEM,)))
        assert not isinstance(result, Failure)
        assert isinstance(result.accuracy, Accuracy) and result.times[0].samples >= 5  # type: ignore[union-attr]


def test_the_same_config_measured_twice_agrees() -> None:
    gpu = current_gpu()
    variant = Variant(FAMILY, SPEC, FAMILY.default(SPEC, gpu))
    big = Problem(4, 16, 16, 2048, 2048)
    with Workers(1) as worker:
        times = [worker.outcome(worker.submit(120.0, evaluate, variant, (big,))).times[0] for _ in range(2)]  # type: ignore[union-attr]
    assert times[0].median_us == pytest.approx(times[1].median_us, rel=0.15)


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize("name", ["triton_fwd", "hopper_fwd"])
def test_an_exported_file_runs_without_flashgen(tmp_path: Path, name: str, causal: str) -> None:
    spec = Spec(head_dim=72, head_dim_v=40, dtype="bf16", causal=causal)  # type: ignore[arg-type]
    path = tmp_path / "my_attention.py"
    family, gpu = FAMILIES[name], current_gpu()
    config = family.default(spec, gpu)
    if rejection := family.refuses(spec, config, gpu):
        pytest.skip(rejection.reason)
    write(Variant(family, spec, config), path)
    assert "flashgen" not in [line.split()[1] for line in path.read_text().splitlines() if line.startswith("import")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("max error") == 3


def test_versions_are_recorded() -> None:
    versions = current_versions("triton_fwd")
    assert versions.torch == torch.__version__ and len(versions.template) == 12
