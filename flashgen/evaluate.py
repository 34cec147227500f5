"""What a child process does with one candidate on the GPU: check its numbers, then time it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.benchmark import Measurement, inputs, interleaved, sample
from flashgen.check import Accuracy, check
from flashgen.families import Variant
from flashgen.launch import bind, launcher
from flashgen.space import Rejection
from flashgen.spec import Problem, Spec


@dataclass(frozen=True)
class Evaluation:
    """A candidate that passed: its accuracy and its time on each problem, in the order asked."""

    accuracy: Accuracy
    times: tuple[Measurement, ...]


@functools.lru_cache(maxsize=8)
def _tensors(spec: Spec, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs and outputs of a problem; allocated once, shared by all candidates of a spec."""
    q, k, v = inputs(spec, problem, "cuda")
    o = torch.empty(*q.shape[:3], spec.head_dim_v, dtype=q.dtype, device="cuda")
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="cuda")
    return q, k, v, o, lse


def evaluate(variant: Variant, problems: Sequence[Problem], repeat_ms: int = 20) -> Evaluation | Rejection:
    """Check a candidate on adversarial inputs, then time it on each problem; numbers first, always."""
    accuracy = check(launcher(variant), variant.spec, "cuda")
    if isinstance(accuracy, Rejection):
        return accuracy
    times = []
    for problem in problems:
        q, k, v, o, lse = _tensors(variant.spec, problem)
        bound = bind(variant, q, k, v, o)
        scale = variant.spec.head_dim**-0.5
        samples = sample(lambda: bound(q, k, v, o, lse, scale), warmup_ms=5, repeat_ms=repeat_ms)  # noqa: B023 (called now)
        times.append(Measurement.of(samples))
    return Evaluation(accuracy, tuple(times))


def remeasure(variants: Sequence[Variant], problem: Problem, rounds: int = 4) -> tuple[Measurement, ...]:
    """Time finalists of one spec on one problem in shuffled rounds, so that order and clocks favour none."""
    calls = {}
    for number, variant in enumerate(variants):
        q, k, v, o, lse = _tensors(variant.spec, problem)
        bound = bind(variant, q, k, v, o)
        calls[str(number)] = functools.partial(bound, q, k, v, o, lse, variant.spec.head_dim**-0.5)
    return tuple(interleaved(calls, rounds=rounds).values())
