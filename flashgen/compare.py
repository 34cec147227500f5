"""flashgen beside what torch offers: time, speed and peak memory of one problem, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flashgen.benchmark import Measurement, flops, inputs, interleaved
from flashgen.errors import InputError, did_you_mean
from flashgen.peers import PEERS, Forward
from flashgen.spec import Problem, Spec

Call = Callable[[], object]
Work = Literal["forward", "backward", "training"]


@dataclass(frozen=True)
class Row:
    """One implementation on one problem.

    Attributes:
        spec: what the forward computes.
        work: what was timed: the forward, the gradients of q, k and v after it, or both.
        name: a key of PEERS.
        measurement: its time, or None when it could not run.
        tflops: 1e12 floating-point operations a second; masked pairs are not counted.
        extra_bytes: peak memory beyond inputs, in bytes.
        failure: why it could not run.
    """

    spec: Spec
    problem: Problem
    work: Work
    name: str
    measurement: Measurement | None
    tflops: float | None
    extra_bytes: int | None
    failure: str | None

    @property
    def label(self) -> str:
        """What a table calls its line."""
        return self.spec.slug if self.work == "forward" else f"{self.work} {self.spec.slug}"


def compare(
    spec: Spec, problem: Problem, names: tuple[str, ...], rounds: int | None = None, work: Work = "forward"
) -> list[Row]:
    """Measure implementations on one problem, interleaved; one that fails or runs out of memory is a row that says so.

    Args:
        spec: what the forward computes; causal alignments coincide only where seq_q = seq_kv, so that must hold.
        problem: the sizes.
        names: keys of PEERS.
        rounds: of measurement; None for as many as it takes that each follows each other one equally often.
        work: what is timed.

    Raises:
        InputError: an unknown name, or causal with seq_q != seq_kv.
    """
    for name in names:
        if name not in PEERS:
            raise InputError(f"no implementation is called {name!r}. {did_you_mean(name, PEERS)}")
    if spec.causal != "none" and problem.seq_q != problem.seq_kv:
        raise InputError(
            f"causal peers agree only when seq_q equals seq_kv, but got {problem.seq_q}, {problem.seq_kv}."
        )
    q, k, v = (tensor.requires_grad_(work != "forward") for tensor in inputs(spec, problem, "cuda"))
    calls: dict[str, Call] = {}
    memory: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            forward = PEERS[name](q, k, v, spec.causal != "none")
            call = _timed(forward, (q, k, v), work)
            call()
            # Of gradients with the forward before them: what that keeps is theirs.
            memory[name] = _extra_memory(call if work == "forward" else _timed(forward, (q, k, v), "training"))
            calls[name] = call
        except torch.OutOfMemoryError:
            failures[name] = "out of memory"
        except (RuntimeError, AssertionError) as error:  # a peer may refuse a shape or dtype; its reason is its row
            failures[name] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        torch.cuda.empty_cache()
    times = interleaved(calls, rounds=rounds)
    total = _flops(spec, problem, work)
    return [
        Row(spec, problem, work, name, times[name], total / times[name].median_us / 1e6, memory[name], None)
        if name in times
        else Row(spec, problem, work, name, None, None, None, failures[name])
        for name in names
    ]


def _timed(forward: Forward, inputs: tuple[Tensor, ...], work: Work) -> Call:
    """What is timed of one implementation; the gradient of the output is random, as in training."""
    if work == "forward":
        return torch.no_grad()(forward)
    o = forward()
    do = torch.randn_like(o)
    if work == "training":
        return lambda: torch.autograd.grad(forward(), inputs, do)
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def _flops(spec: Spec, problem: Problem, work: Work) -> float:
    forward, backward = flops(spec, problem), flops(spec.backward, problem)
    return {"forward": forward, "backward": backward, "training": forward + backward}[work]


def _extra_memory(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class HostCost:
    """CPU time of one eager call on a tiny problem, microseconds (median of the repeats)."""

    flashgen_us: float
    sdpa_us: float


def host_cost(work: Work = "forward", calls: int = 600, repeats: int = 7) -> HostCost:
    """What calling costs before the GPU has anything to do: batch 1, one head, 64 tokens, head_dim 64, bf16.

    Of work other than the forward: the forward and its backward, as training calls them.
    """
    trains = work != "forward"
    given = inputs(Spec(head_dim=64, head_dim_v=64), Problem(1, 1, 1, 64, 64), "cuda")
    q, k, v = (tensor.requires_grad_(trains) for tensor in given)
    forwards: dict[str, Forward] = {
        "flashgen": PEERS["flashgen"](q, k, v, False),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
    }
    subjects = {
        name: _timed(forward, (q, k, v), "training" if trains else "forward") for name, forward in forwards.items()
    }
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, call in subjects.items():
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
            torch.cuda.synchronize()
    return HostCost(statistics.median(times["flashgen"]), statistics.median(times["sdpa"]))
