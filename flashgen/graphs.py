"""Times of short kernels as a service launches them: in a CUDA graph, and one by one from Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch

from flashgen.benchmark import MIN_SAMPLES, Measurement

Call = Callable[[], object]

# What the launches of a graph read before one of them reads the same again: L2 holds a twentieth of it at most.
ROTATED_BYTES = 2**30
MAX_COPIES = 64
# Of a graph, but no more than read so many bytes.
LAUNCHES = 10
GRAPH_BYTES = 2**32
# Replays that one sample takes together, in microseconds at least: between two of them the GPU idles for some.
SAMPLE_US = 500.0
EAGER_US = 2000.0
MAX_SAMPLES = 100


def copies_of(size: int) -> int:
    """How many caches of so many bytes are read in turns, so that none of them is found in L2."""
    return max(1, min(MAX_COPIES, math.ceil(ROTATED_BYTES / max(1, size))))


def in_turns(calls: Sequence[Call], size: int) -> list[Call]:
    """The launches of one graph: each of these calls, which read so many bytes of a cache of its own, equally often."""
    wanted = min(LAUNCHES, math.ceil(GRAPH_BYTES / max(1, size)))
    return [*calls] * math.ceil(wanted / len(calls))


class Replayed:
    """Launches in a CUDA graph; calling it replays them."""

    def __init__(self, calls: Sequence[Call]) -> None:
        # What they write to has to live as long as the graph.
        self._calls = calls
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            # What a first call makes must not be made in a capture.
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()

    def __call__(self) -> None:
        self._graph.replay()

    def sample(self, *, repeat_ms: int = 30) -> list[float]:
        """Times of one launch in microseconds, each the mean of some replays, which queue behind each other."""
        self()
        (first,) = _between(self, 1, 1)
        replays = math.ceil(SAMPLE_US / max(first, 1.0))
        count = int(1000 * repeat_ms / max(replays * first, 1.0))
        times = _between(self, replays, max(MIN_SAMPLES, min(MAX_SAMPLES, count)))
        return [time / (replays * len(self._calls)) for time in times]


def _between(call: Call, repeats: int, count: int) -> list[float]:
    """Microseconds that so many calls in a row take, by events, so many times; the host does not wait between."""
    pairs = [(_event(), _event()) for _ in range(count)]
    call()
    for start, end in pairs:
        start.record()
        for _ in range(repeats):
            call()
        end.record()
    torch.cuda.synchronize()
    return [1000.0 * start.elapsed_time(end) for start, end in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def eager_us(calls: Sequence[Call], repeats: int = 5) -> float:
    """Microseconds from one call to the next where all are made from Python, whichever is slower, it or the GPU."""

    def all_of_them() -> None:
        for call in calls:
            call()

    (first,) = _between(all_of_them, 1, 1)
    rounds = math.ceil(EAGER_US / max(first, 1.0))
    return statistics.median(_between(all_of_them, rounds, repeats)) / (rounds * len(calls))


def measured(calls: Sequence[Call], size: int, repeat_ms: int = 20) -> Measurement:
    """How long a launch takes in a graph of such `in_turns`, and eagerly; `size`: bytes that each of them reads."""
    launches = in_turns(calls, size)
    found = Measurement.of(Replayed(launches).sample(repeat_ms=repeat_ms))
    return found.with_eager(eager_us(launches))
