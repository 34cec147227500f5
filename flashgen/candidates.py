"""Candidates that passed, their order per problem, and what the store keeps of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from flashgen.benchmark import Measurement
from flashgen.check import Accuracy
from flashgen.evaluate import remeasure
from flashgen.families import Variant
from flashgen.problem import Problem
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

    def us(self, index: int) -> float:
        """The time that counts for problem `index`: measured where there is one."""
        return self.times[index].median_us if self.times is not None else self.predicted[index]

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
    """The best candidates for one problem, best first; `tie` when noise does not tell the first two apart."""

    problem: Problem
    best: tuple[Candidate, ...]
    tie: bool


def rank(problem: Problem, index: int, candidates: Sequence[Candidate], gpu_worker: Workers | None) -> Ranking:
    """Order the candidates for problem number `index`; finalists are measured again, interleaved."""
    order = sorted(candidates, key=lambda candidate: candidate.us(index))
    if not order:
        return Ranking(problem, (), False)
    near = [c for c in order if c.us(index) <= FINAL_FACTOR * order[0].us(index)][:MAX_FINALISTS]
    rest = tuple(c for c in order if c not in near)
    if gpu_worker is not None and len(near) > 1:
        variants = [candidate.variant for candidate in near]
        again = gpu_worker.outcome(gpu_worker.submit(FINALS_TIMEOUT_S, remeasure, variants, problem))
        if not isinstance(again, Failure):
            near = [_with_time(candidate, index, m) for candidate, m in zip(near, again, strict=True)]
            near.sort(key=lambda candidate: candidate.us(index))
    best = near[0]
    tied = [candidate for candidate in near if _same(best, candidate, index)]
    winner = min(tied, key=lambda candidate: candidate.weight)
    others = tuple(candidate for candidate in near if candidate is not winner)
    return Ranking(problem, (winner, *others, *rest), len(tied) > 1)


def _same(best: Candidate, other: Candidate, index: int) -> bool:
    """Whether noise explains the difference: the two spreads overlap, or it is under 0.5 %."""
    gap = other.us(index) - best.us(index)
    if best.times is None or other.times is None:
        return gap <= 0.005 * best.us(index)
    # The standard error of a median is about 1.25 sigma / sqrt(n); half the interquartile range is 0.67 sigma.
    errors = [1.86 * m.spread_us / math.sqrt(m.samples) for m in (best.times[index], other.times[index])]
    return gap <= max(2.0 * math.hypot(*errors), 0.005 * best.us(index))


def _with_time(candidate: Candidate, index: int, measurement: Measurement) -> Candidate:
    assert candidate.times is not None
    times = (*candidate.times[:index], measurement, *candidate.times[index + 1 :])
    return replace(candidate, times=times)


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


def entry_of(ranking: Ranking, index: int, method: Method, versions: Versions) -> Entry:
    """The winner of a ranking as the store keeps it."""
    winner = ranking.best[0]
    accuracy = winner.accuracy
    if winner.times is None:
        time = Timing(round(winner.predicted[index], 2), None, None)
    else:
        measured = winner.times[index]
        time = Timing(round(measured.median_us, 2), round(measured.spread_us, 2), measured.samples)
    return Entry(
        spec=winner.variant.spec.tuned_as,
        bucket=ranking.problem.bucket,
        family=winner.variant.family.name,
        config=winner.variant.config,
        method=method,
        problem=ranking.problem,
        time=time,
        accuracy=None if accuracy is None else StoredAccuracy(accuracy.max_error, accuracy.allowed),
        versions=versions,
    )


def is_transient(result: Candidate | Rejection) -> bool:
    """Whether another run may end differently: a busy machine or GPU, a worker that somebody killed."""
    return isinstance(result, Rejection) and (
        result.kind.endswith((": timeout", ": OutOfMemoryError")) or result.kind == "run: crash"
    )
