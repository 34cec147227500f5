"""Child processes that hang, abort or raise: each failure is a value with a reason, and the pool goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import failing_tasks
import pytest
from variants import variant

from flashgen.compile import compile_resources
from flashgen.errors import MissingDependencyError
from flashgen.hardware import Gpu
from flashgen.space import Config
from flashgen.spec import Spec
from flashgen.workers import Failure, Workers

# Seconds until a task that should end counts as hung.
PATIENCE = 60


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2) as pool:
        yield pool


def _fails(workers: Workers, function: object, *arguments: object, timeout: float = PATIENCE) -> Failure:
    outcome = workers.outcome(workers.submit(timeout, function, *arguments))  # type: ignore[arg-type]
    assert isinstance(outcome, Failure), outcome
    return outcome


def _works(workers: Workers) -> bool:
    futures = [workers.submit(PATIENCE, failing_tasks.double, number) for number in range(6)]
    return [workers.outcome(future) for future in futures] == [0, 2, 4, 6, 8, 10]


def test_results_come_back(workers: Workers) -> None:
    assert _works(workers)


def test_a_task_that_hangs(workers: Workers) -> None:
    failure = _fails(workers, failing_tasks.hang, timeout=1)
    assert failure.kind == "timeout" and failure.fatal
    assert failure.reason == "did not finish within 1 s"
    assert _works(workers)


def test_a_task_that_hangs_in_a_child(workers: Workers, tmp_path: Path) -> None:
    failure = _fails(workers, failing_tasks.hang_in_a_child, tmp_path / "pid", timeout=2)
    assert failure.kind == "timeout"
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    until = time.monotonic() + PATIENCE
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < until, "the child outlives its worker"
        time.sleep(0.05)


def test_a_task_that_aborts(workers: Workers) -> None:
    failure = _fails(workers, failing_tasks.abort)
    assert failure.kind == "crash" and failure.fatal
    assert "exit code -6" in failure.reason
    assert "the words that tell" in failure.reason
    assert _works(workers)


def test_a_task_that_leaves(workers: Workers) -> None:
    failure = _fails(workers, failing_tasks.leave)
    assert failure.kind == "crash" and failure.fatal
    assert "exit code 7" in failure.reason
    assert _works(workers)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("48 is no power of 2"), "ValueError: 48 is no power of 2"),
        (AssertionError(), "AssertionError: no message"),
        (RuntimeError("first line\nsecond line"), "RuntimeError: first line second line"),
    ],
)
def test_a_task_that_raises(workers: Workers, error: Exception, reason: str) -> None:
    failure = _fails(workers, failing_tasks.fail, error)
    assert failure == Failure(type(error).__name__, reason, fatal=False)
    assert _works(workers)


@pytest.mark.parametrize(
    "message", ["CUDA error: an illegal memory access was encountered", "Triton Error [CUDA]: illegal memory access"]
)
def test_a_broken_gpu_context_is_fatal(workers: Workers, message: str) -> None:
    failure = _fails(workers, failing_tasks.fail, RuntimeError(message))
    assert failure.fatal
    assert message in failure.reason
    assert _works(workers)


def test_a_broken_gpu_context_costs_its_neighbours_nothing(workers: Workers) -> None:
    broken = workers.submit(PATIENCE, failing_tasks.fail, RuntimeError("CUDA error: misaligned address"))
    neighbours = [workers.submit(PATIENCE, failing_tasks.double_slowly, number) for number in range(8)]
    failure = workers.outcome(broken)
    assert isinstance(failure, Failure) and failure.fatal
    assert not wait(neighbours, timeout=PATIENCE / 2).not_done, "results that never come"
    assert [workers.outcome(future) for future in neighbours] == [2 * number for number in range(8)]


def test_a_missing_package_is_nobodys_failure(workers: Workers) -> None:
    future = workers.submit(PATIENCE, failing_tasks.fail, ModuleNotFoundError("No module named 'triton'"))
    with pytest.raises(MissingDependencyError, match="No module named 'triton'"):
        workers.outcome(future)


def test_what_workers_print_stays_with_them(workers: Workers, capfd: pytest.CaptureFixture[str]) -> None:
    pid = workers.outcome(workers.submit(PATIENCE, failing_tasks.noise))
    assert isinstance(pid, str) and int(pid) != os.getpid()
    assert "from the worker" not in capfd.readouterr().err


def test_nothing_is_left_behind() -> None:
    with Workers(1) as pool:
        folder = Path(pool._folder.name)
        pid = pool.outcome(pool.submit(PATIENCE, failing_tasks.noise))
        assert isinstance(pid, str)
        assert (folder / f"{pid}.err").read_text() == "from the worker\n"
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()


def test_triton_aborting_its_process(workers: Workers) -> None:
    failure = _fails(workers, failing_tasks.compile_for_the_wrong_gpu)
    assert failure.kind == "crash" and failure.fatal
    assert "exit code -6" in failure.reason
    assert "LLVM ERROR: Cannot select" in failure.reason
    assert _works(workers)


def test_triton_refusing_a_kernel(workers: Workers) -> None:
    good = variant(Spec(head_dim=64, head_dim_v=64, dtype="fp16"))
    bad = replace(good, config=Config(**{**good.config, "block_q": 24}))
    failure = _fails(workers, compile_resources, bad, Gpu.named("a100"))
    assert failure.kind == "CompilationError" and not failure.fatal
    assert "power of 2" in failure.reason
    assert _works(workers)
