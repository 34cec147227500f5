"""What a child process does with one candidate on the GPU: check its numbers, then time it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.benchmark import Measurement, inputs, interleaved, kv_bytes, sample, usual_modifiers
from flashgen.check import Accuracy, Launch, check
from flashgen.check_decode import SCRATCH, check_decode
from flashgen.decode_inputs import rotating_inputs
from flashgen.families import Variant
from flashgen.graphs import Replayed, in_turns, measured
from flashgen.launch import arguments_of, bind, laid_out, launcher, scratch_for, split_for, workspace_size
from flashgen.problem import Problem
from flashgen.reference import tiled_attention
from flashgen.space import Rejection
from flashgen.spec import TORCH_DTYPES, Spec


@dataclass(frozen=True)
class Evaluation:
    """A candidate that passed: its accuracy and its time on each problem, in the order asked."""

    accuracy: Accuracy
    times: tuple[Measurement, ...]


Given = dict[str, Tensor | float | None]


@functools.lru_cache(maxsize=1)
def _of(spec: Spec) -> Callable[[Problem], list[Given]]:
    """What launches take, but for the workspace; allocated once, shared by all candidates of a spec."""
    if spec.op == "decode":
        return functools.cache(lambda problem: rotating_inputs(spec, problem, "cuda"))
    return functools.cache(lambda problem: [_tensors(spec, problem)])


def _tensors(spec: Spec, problem: Problem) -> Given:
    """What one launch takes that is no decode."""
    q, k, v = inputs(spec, problem, "cuda")
    given: Given = {"q": q, "k": k, "v": v, "scale": spec.head_dim**-0.5}
    modifiers = usual_modifiers(spec, problem, q)
    given |= dict(zip(spec.modifiers, modifiers.arguments(spec.causal), strict=True))
    if spec.op == "forward":
        o = torch.empty(*q.shape[:3], spec.head_dim_v, dtype=TORCH_DTYPES[spec.out_dtype], device="cuda")
        return {**given, "o": o, "lse": torch.empty(q.shape[:3], dtype=torch.float32, device="cuda")}
    # The true log-sum-exp, so that P sums to one: what is multiplied decides the power drawn, thus the clock.
    o, lse = tiled_attention(q, k, v, causal=spec.causal, modifiers=modifiers)
    results = {f"d{name}": torch.empty_like(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
    if modifiers.bias is not None:
        results["dbias"] = torch.empty(modifiers.bias.shape, dtype=modifiers.bias.dtype, device="cuda")
    return {**given, "o": o, "lse": lse, "do": torch.randn_like(o), "dlse": None, **results}


def _calls(variant: Variant, problem: Problem) -> list[Callable[[], None]]:
    """Launches of a variant on a problem, everything bound; of a decode one for each of several caches."""
    several = _of(variant.spec)(problem)
    given = several[0]
    views = [tensor for name in laid_out(variant.spec) if isinstance(tensor := given[name], Tensor)]
    if variant.spec.op == "decode":
        split = split_for(variant, *views)
        scratch = dict(zip(SCRATCH, scratch_for(split, views[0].device), strict=True))
        several = [{**each, **scratch} for each in several]
        bound = bind(variant, *views, num_splits=split.splits)
    else:
        bound = bind(variant, *views)
    if variant.spec.op == "backward":
        several = [{**given, "workspace": _workspace(variant, given["q"])}]
    names = arguments_of(variant.spec)
    return [functools.partial(bound, *(each[name] for name in names)) for each in several]


def _timed(variant: Variant, problem: Problem, repeat_ms: int) -> Measurement:
    calls = _calls(variant, problem)
    if variant.spec.op == "decode":
        return measured(calls, kv_bytes(variant.spec, problem), repeat_ms)
    return Measurement.of(sample(calls[0], warmup_ms=5, repeat_ms=repeat_ms))


def _workspace(variant: Variant, q: object) -> Tensor:
    assert isinstance(q, Tensor)
    return torch.empty(workspace_size(variant, q), dtype=torch.float32, device=q.device)


def checked(variant: Variant) -> Accuracy | Rejection:
    """Check a variant's numbers on this machine's GPU."""
    launch = launcher(variant)
    if variant.spec.op == "decode":
        return check_decode(launch, variant.spec, "cuda")
    if variant.spec.op == "forward":
        return check(launch, variant.spec, "cuda")

    return check(with_workspace(variant, launch), variant.spec, "cuda")


def with_workspace(variant: Variant, launch: Launch) -> Launch:
    """The launch of a backward, with a workspace of its own, full of NaN: what is left in one must not matter."""
    place = arguments_of(variant.spec).index("workspace")

    def launch_with(*given: Any) -> None:
        launch(*given[:place], _workspace(variant, given[0]).fill_(torch.nan), *given[place:])

    return launch_with


def evaluate(variant: Variant, problems: Sequence[Problem], repeat_ms: int = 20) -> Evaluation | Rejection:
    """Check a candidate on adversarial inputs, then time it on each problem; numbers first, always."""
    accuracy = checked(variant)
    if isinstance(accuracy, Rejection):
        return accuracy
    return Evaluation(accuracy, tuple(_timed(variant, problem, repeat_ms) for problem in problems))


def remeasure(variants: Sequence[Variant], problem: Problem, rounds: int = 4) -> tuple[Measurement, ...]:
    """Time finalists of one spec on one problem in shuffled rounds, so that order and clocks favour none."""
    calls = {str(number): _calls(variant, problem) for number, variant in enumerate(variants)}
    if variants[0].spec.op != "decode":
        return tuple(interleaved({name: first for name, (first,) in calls.items()}, rounds=rounds).values())
    size = kv_bytes(variants[0].spec, problem)
    graphs = {name: Replayed(in_turns(each, size)) for name, each in calls.items()}
    return tuple(interleaved(graphs, rounds=rounds, take=Replayed.sample).values())
