"""What a search hands to child processes, replaced by tasks that take no time or fail on purpose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import failing_tasks

from flashgen.benchmark import Measurement
from flashgen.check import Accuracy
from flashgen.evaluate import Evaluation
from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.resources import Resources
from flashgen.space import Rejection

FITS = Resources(shared=16384, registers=128, stack=0, loop={})


def compile_at_once(variant: Variant, gpu: Gpu, kernel: str, seq_kv: int, group: int = 1) -> Resources:
    """No kernel needs anything."""
    return FITS


def compile_or_fail(variant: Variant, gpu: Gpu, kernel: str, seq_kv: int, group: int = 1) -> Resources:
    """16 rows hang, 32 kill their process, 128 raise; 64 need too much in one or two stages."""
    match variant.config["block_q"], variant.config["num_stages"]:
        case 16, _:
            failing_tasks.hang()
        case 32, _:
            failing_tasks.abort()
        case 128, _:
            raise RuntimeError("PassManager::run failed")
        case _, 1:
            return Resources(gpu.shared_per_block + 1, 128, 0, {})
        case _, 2:
            return Resources(0, 255, 4000, {})
    return FITS


def compile_and_note(
    log: Path, seconds: float, variant: Variant, gpu: Gpu, kernel: str, seq_kv: int, group: int = 1
) -> Resources:
    """Write down when it started, and take so many seconds."""
    with log.open("a") as file:
        file.write(f"{time.monotonic()} {variant.slug}\n")
    time.sleep(seconds)
    return FITS


def compile_and_note_sizes(log: Path, variant: Variant, gpu: Gpu, kernel: str, *sizes: int) -> Resources:
    """Write down for which sizes."""
    with log.open("a") as file:
        file.write(" ".join(map(str, sizes)) + "\n")
    return FITS


def miss_a_package(variant: Variant, gpu: Gpu, kernel: str, seq_kv: int, group: int = 1) -> Resources:
    raise ModuleNotFoundError("No module named 'triton'")


def time_of(variant: Variant, number: int) -> float:
    """The first problem likes large blocks of queries, the second small ones."""
    return 100.0 + (1000.0 / variant.config["block_q"] if number == 0 else variant.config["block_q"])


def evaluate_or_fail(variant: Variant, problems: Sequence[Problem]) -> Evaluation | Rejection:
    """One stage is wrong, three kill their process, four its CUDA context; two take the time that `time_of` says."""
    match variant.config["num_stages"]:
        case 1:
            return Rejection("check", "wrong numbers", "tail: output is off by 1")
        case 3:
            failing_tasks.abort()
        case 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    times = tuple(Measurement(time_of(variant, number), 0.1, 50) for number in range(len(problems)))
    return Evaluation(Accuracy(0.001, 0.002), times)


def remeasure_backwards(variants: Sequence[Variant], problem: Problem) -> tuple[Measurement, ...]:
    """The finalists turn out to be in the opposite order."""
    return tuple(Measurement(200.0 - number, 0.1, 100) for number in range(len(variants)))


def remeasure_and_die(variants: Sequence[Variant], problem: Problem) -> tuple[Measurement, ...]:
    failing_tasks.abort()
    return ()


def compile_never(variant: Variant, gpu: Gpu, kernel: str, seq_kv: int, group: int = 1) -> Resources:
    raise RuntimeError(f"{kernel} does not compile")


def die_once(died: Path, variant: Variant, gpu: Gpu, kernel: str, seq_kv: int, group: int = 1) -> Resources:
    if not died.exists():
        died.touch()
        failing_tasks.abort()
    return FITS
