"""How long a call takes: median, spread and samples, each with a cold L2."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from flashgen.spec import TORCH_DTYPES, Problem, Spec

MIN_SAMPLES = 5


@dataclass(frozen=True)
class Measurement:
    """Times of one kernel on one problem, in microseconds.

    Attributes:
        median_us: median of the samples.
        spread_us: half the distance between the 25th and 75th percentile.
        samples: how many there are.
    """

    median_us: float
    spread_us: float
    samples: int

    @staticmethod
    def of(times_us: Sequence[float]) -> Measurement:
        """Summarise at least two samples."""
        low, _, high = statistics.quantiles(times_us, n=4)
        return Measurement(statistics.median(times_us), (high - low) / 2, len(times_us))


def sample(call: Callable[[], object], *, warmup_ms: int = 10, repeat_ms: int = 30) -> list[float]:
    """Times of single calls in microseconds, by CUDA events, the L2 cache overwritten before each."""
    from triton.testing import do_bench

    times: list[float] = []
    # A slow call fits into the time once or not at all; no median without a few samples.
    while len(times) < MIN_SAMPLES:
        times += do_bench(call, warmup=warmup_ms, rep=repeat_ms, return_mode="all")
    return [1000.0 * time for time in times]


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 3, seed: int = 0, repeat_ms: int = 30
) -> dict[str, Measurement]:
    """Measure several calls in shuffled rounds, so that drifting clocks and the order favour none of them."""
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        names = list(calls)
        order.shuffle(names)
        for name in names:
            times[name] += sample(calls[name], repeat_ms=repeat_ms)
    return {name: Measurement.of(values) for name, values in times.items()}


def inputs(spec: Spec, problem: Problem, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random contiguous q, k, v of a problem; never zeros, which run faster than real data (13 % seen on an H200)."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = TORCH_DTYPES[spec.dtype]

    def draw(heads: int, seq: int, width: int) -> torch.Tensor:
        return torch.randn(problem.batch, heads, seq, width, device=device, dtype=dtype, generator=generator)

    return (
        draw(problem.heads, problem.seq_q, spec.head_dim),
        draw(problem.kv_heads, problem.seq_kv, spec.head_dim),
        draw(problem.kv_heads, problem.seq_kv, spec.head_dim_v),
    )


def flops(spec: Spec, problem: Problem) -> float:
    """Floating-point operations of the products, masked pairs not counted.

    Of a backward those of the five that the math needs; recomputing some more often is no merit.
    """
    d, dv = spec.head_dim, spec.head_dim_v
    width = d + dv if spec.op == "forward" else 3 * d + 2 * dv
    return 2.0 * problem.visible_pairs(spec.causal) * width
