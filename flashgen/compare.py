"""flashgen beside what torch offers: time, speed and peak memory of one problem, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flashgen.agreement import Truth
from flashgen.benchmark import Measurement, extra_memory, flops, inputs, interleaved, usual_options
from flashgen.errors import InputError, did_you_mean
from flashgen.mods import Mod, check_comparable, check_places, mask_mod, visible_pairs
from flashgen.peers import PEERS, Forward
from flashgen.problem import Problem
from flashgen.spec import Spec

Call = Callable[[], object]
Work = Literal["forward", "backward", "training"]
DEVICE = "cuda"


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
        failure: why it could not run, or how wrong it was.
        flops: what `tflops` counts, for all implementations: products of the pairs that are seen.
        mod: name of the modification, of those in flashgen.mods.MODS.
    """

    spec: Spec
    problem: Problem
    work: Work
    name: str
    measurement: Measurement | None
    tflops: float | None
    extra_bytes: int | None
    failure: str | None
    flops: float
    mod: str | None = None

    @property
    def label(self) -> str:
        """What a table calls its line."""
        spec = self.spec if self.mod is None else replace(self.spec.plain, causal="none")
        name = spec.slug if self.mod is None else f"{spec.slug} {self.mod}"
        return name if self.work == "forward" else f"{self.work} {name}"


def compare(
    spec: Spec,
    problem: Problem,
    names: tuple[str, ...],
    rounds: int | None = None,
    work: Work = "forward",
    mod: Mod | None = None,
) -> list[Row]:
    """Measure implementations on one problem, interleaved; one that fails or runs out of memory is a row that says so.

    So is one whose results are wrong: some rows are compared with float64 before anything is timed.

    Args:
        spec: what the forward computes; causal alignments and the places of windows and the like coincide only where
            seq_q = seq_kv, so that must hold. Features have values of the usual sizes.
        problem: the sizes.
        names: keys of PEERS.
        rounds: of measurement; None for as many as it takes that each follows each other one equally often.
        work: what is timed; gradients are those of q, k and v.
        mod: of which `spec` is, where a Spec cannot say it all.

    Raises:
        InputError: an unknown name, or other lengths than such.
        UnsupportedError: a feature that nobody here can check.
    """
    for name in names:
        if name not in PEERS:
            raise InputError(f"no implementation is called {name!r}. {did_you_mean(name, PEERS)}")
    check_places(spec, problem, mod)
    q, k, v = (tensor.requires_grad_(work != "forward") for tensor in inputs(spec, problem, DEVICE))
    causal = spec.causal != "none"
    options = {**usual_options(spec, problem, q), **(mod.terms or {} if mod is not None else {})}
    check_comparable(options)
    pairs = visible_pairs(problem, mask_mod(causal, options), DEVICE)
    truth = Truth(q, k, v, causal, options, work != "forward")
    calls: dict[str, Call] = {}
    memory: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            forward = PEERS[name](q, k, v, causal, options)
            wrong = truth.refutes(forward)
            if wrong is None:
                calls[name], memory[name] = _ready(forward, (q, k, v), work)
            else:
                failures[name] = wrong
        except torch.OutOfMemoryError:
            failures[name] = "out of memory"
        except (RuntimeError, AssertionError) as error:  # a peer may refuse a shape or dtype; its reason is its row
            failures[name] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        torch.cuda.empty_cache()
    times = interleaved(calls, rounds=rounds) if calls else {}
    total = _flops(spec, problem, work, pairs)
    label = None if mod is None else mod.name
    rows = []
    for name in names:
        took = times.get(name)
        tflops = None if took is None else total / took.median_us / 1e6
        rows.append(Row(spec, problem, work, name, took, tflops, memory.get(name), failures.get(name), total, label))
    return rows


def _ready(forward: Forward, inputs: tuple[Tensor, ...], work: Work) -> tuple[Call, int]:
    """What is timed, called once, and its peak memory beyond the inputs."""
    call = _timed(forward, inputs, work)
    call()
    # Of gradients with the forward before them: what that keeps is theirs.
    return call, extra_memory(call if work == "forward" else _timed(forward, inputs, "training"))


def _timed(forward: Forward, inputs: tuple[Tensor, ...], work: Work) -> Call:
    """What is timed of one implementation; the gradient of the output is random, as in training."""
    if work == "forward":
        return torch.no_grad()(forward)
    o = forward()
    do = torch.randn_like(o)
    if work == "training":
        return lambda: torch.autograd.grad(forward(), inputs, do)
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def _flops(spec: Spec, problem: Problem, work: Work, pairs: int) -> float:
    forward, backward = flops(spec, problem, pairs), flops(spec.backward, problem, pairs)
    return {"forward": forward, "backward": backward, "training": forward + backward}[work]


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
        "flashgen": PEERS["flashgen"](q, k, v, False, {}),
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
