"""Candidates that passed, their order per problem, and what the store keeps of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from flashgen.benchmark import Measurement, geometric_mean
from flashgen.check import Accuracy
from flashgen.evaluate import remeasure
from flashgen.families import Variant
from flashgen.problem import Bucket, Problem
from flashgen.records import Accuracy as StoredAccuracy
from flashgen.records import Entry, Timing, Versions
from flashgen.resources import Resources
from flashgen.space import Rejection
from flashgen.workers import Failure, Workers

Method = Literal["measured", "estimated"]

# Finalists lie within this factor of the best single measurement; kernels move by 3 % from run to run.
FINAL_FACTOR = 1.06
MAX_FINALISTS = 4
FINALS_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Candidate:
    """A variant that compiles, with what is known of it; times are per problem, in microseconds."""

    variant: Variant
    resources: tuple[Resources, ...]
    predicted: tuple[float, ...]
    accuracy: Accuracy | None = None
    times: tuple[Measurement, ...] | None = None

    def us(self, *indices: int) -> float:
        """The time that counts for problem `index`: measured where there is one; of several the geometric mean."""
        if self.times is not None:
            return geometric_mean([self.times[index].median_us for index in indices])
        return geometric_mean([self.predicted[index] for index in indices])

    @property
    def weight(self) -> tuple[int, int, int]:
        """What a tie is decided by: less shared memory, fewer warps, fewer registers."""
        config = self.variant.config
        return (
            max(used.shared for used in self.resources),
            sum(config[name] for name in config if name.endswith("num_warps")),
            max(used.registers for used in self.resources),
        )


@dataclass(frozen=True)
class Ranking:
    """The best candidates for the problems of one bucket, best first.

    Attributes:
        problems: by their numbers.
        tie: noise does not tell the first two apart.
    """

    problems: Mapping[int, Problem]
    best: tuple[Candidate, ...]
    tie: bool


def rank_all(
    problems: Sequence[Problem], candidates: Sequence[Candidate], gpu_worker: Workers | None
) -> tuple[Ranking, ...]:
    """A ranking for each bucket: the store cannot tell the problems in one apart, so they get one winner."""
    found: dict[Bucket, dict[int, Problem]] = {}
    for index, problem in enumerate(problems):
        found.setdefault(problem.bucket, {})[index] = problem
    return tuple(rank(each, candidates, gpu_worker) for each in found.values())


def rank(problems: Mapping[int, Problem], candidates: Sequence[Candidate], gpu_worker: Workers | None) -> Ranking:
    """Order the candidates for these problems; finalists are measured again, interleaved."""

    def us(candidate: Candidate) -> float:
        return candidate.us(*problems)

    order = sorted(candidates, key=us)
    if not order:
        return Ranking(problems, (), False)
    near = [c for c in order if us(c) <= FINAL_FACTOR * us(order[0])][:MAX_FINALISTS]
    rest = tuple(c for c in order if c not in near)
    if gpu_worker is not None and len(near) > 1:
        near = sorted(_measured_again(near, problems, gpu_worker), key=us)
    best = near[0]
    tied = [candidate for candidate in near if _same(best, candidate, problems)]
    winner = min(tied, key=lambda candidate: candidate.weight)
    others = tuple(candidate for candidate in near if candidate is not winner)
    return Ranking(problems, (winner, *others, *rest), len(tied) > 1)


def _measured_again(near: list[Candidate], problems: Mapping[int, Problem], gpu_worker: Workers) -> list[Candidate]:
    """With new times where all could be measured."""
    variants = [candidate.variant for candidate in near]
    for index, problem in problems.items():
        again = gpu_worker.outcome(gpu_worker.submit(FINALS_TIMEOUT_S, remeasure, variants, problem))
        if not isinstance(again, Failure):
            near = [_with_time(candidate, index, m) for candidate, m in zip(near, again, strict=True)]
    return near


def _same(best: Candidate, other: Candidate, indices: Collection[int]) -> bool:
    """Whether noise explains the difference: the two spreads overlap, or it is under 0.5 %."""
    gap, close = other.us(*indices) - best.us(*indices), 0.005 * best.us(*indices)
    if best.times is None or other.times is None:
        return gap <= close
    found = [Measurement.together([times[index] for index in indices]) for times in (best.times, other.times)]
    # The standard error of a median is about 1.25 sigma / sqrt(n); half the interquartile range is 0.67 sigma.
    errors = [1.86 * m.spread_us / math.sqrt(m.samples) for m in found]
    return gap <= max(2.0 * math.hypot(*errors), close)


def _with_time(candidate: Candidate, index: int, measurement: Measurement) -> Candidate:
    assert candidate.times is not None
    again = measurement.with_eager(candidate.times[index].eager_us)
    return replace(candidate, times=(*candidate.times[:index], again, *candidate.times[index + 1 :]))


def to_plain(result: Candidate | Rejection) -> dict[str, object]:
    """What a study remembers of a candidate, as JSON."""
    if isinstance(result, Rejection):
        return {"rejection": asdict(result)}
    plain = asdict(replace(result, variant=None))  # type: ignore[arg-type]
    del plain["variant"]
    return plain


def from_plain(variant: Variant, plain: Mapping[str, Any]) -> Candidate | Rejection:
    """The inverse of `to_plain`."""
    if "rejection" in plain:
        return Rejection(**plain["rejection"])
    times = plain["times"]
    return Candidate(
        variant=variant,
        resources=tuple(Resources(**used) for used in plain["resources"]),
        predicted=tuple(plain["predicted"]),
        accuracy=Accuracy(**plain["accuracy"]) if plain["accuracy"] is not None else None,
        times=tuple(Measurement(**time) for time in times) if times is not None else None,
    )


def entry_of(ranking: Ranking, method: Method, versions: Versions) -> Entry:
    """The winner of a ranking as the store keeps it, with its time on the largest of the problems."""
    winner = ranking.best[0]
    index, problem = max(ranking.problems.items(), key=lambda each: (each[1].batch, each[1].seq_kv))
    accuracy = winner.accuracy
    if winner.times is None:
        time = Timing(round(winner.predicted[index], 2), None, None)
    else:
        measured = winner.times[index]
        eager = None if measured.eager_us is None else round(measured.eager_us, 2)
        time = Timing(round(measured.median_us, 2), round(measured.spread_us, 2), measured.samples, eager)
    return Entry(
        spec=winner.variant.spec.tuned_as,
        bucket=problem.bucket,
        family=winner.variant.family.name,
        config=winner.variant.config,
        method=method,
        problem=problem,
        time=time,
        accuracy=None if accuracy is None else StoredAccuracy(accuracy.max_error, accuracy.allowed),
        versions=versions,
    )


def is_transient(result: Candidate | Rejection) -> bool:
    """Whether another run may end differently: a busy machine or GPU, a worker that somebody killed."""
    return isinstance(result, Rejection) and (
        result.kind.endswith((": timeout", ": OutOfMemoryError")) or result.kind == "run: crash"
    )
