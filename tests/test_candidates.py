"""The order of candidates, what noise makes a tie, and what the journal and the store keep of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from variants import variant

from flashgen.benchmark import Measurement
from flashgen.candidates import Candidate, Ranking, entry_of, from_plain, rank, rank_all, to_plain
from flashgen.check import Accuracy
from flashgen.problem import Bucket, Problem
from flashgen.records import Accuracy as StoredAccuracy
from flashgen.records import Entry, Timing, Versions
from flashgen.resources import Resources
from flashgen.space import Rejection
from flashgen.spec import Spec

SPEC = Spec(dtype="fp16")
PROBLEM = Problem(2, 16, 4, 1000, 3000)
VERSIONS = Versions("0.1.0", "3.7.1", "2.13.0", None, "0123456789ab")


def _estimated(us: float, *, shared: int = 32768, num_warps: int = 4, registers: int = 128) -> Candidate:
    return Candidate(
        variant(SPEC, num_warps=num_warps), (Resources(shared, registers, 0, {"total": 100, "mma": 8}),), (us,)
    )


def _measured(us: float, spread: float, samples: int = 100, *, shared: int = 32768, num_warps: int = 4) -> Candidate:
    estimated = _estimated(1.0, shared=shared, num_warps=num_warps)
    return replace(estimated, accuracy=Accuracy(0.001, 0.002), times=(Measurement(us, spread, samples),))


def _times(ranking: Ranking) -> list[float]:
    return [candidate.us(0) for candidate in ranking.best]


def test_the_fastest_comes_first() -> None:
    candidates = [_estimated(us) for us in (300.0, 100.0, 200.0, 105.0, 150.0)]
    for order in itertools.permutations(candidates):
        ranking = rank({0: PROBLEM}, order, None)
        assert ranking.problems == {0: PROBLEM} and not ranking.tie
        assert _times(ranking) == [100.0, 105.0, 150.0, 200.0, 300.0]


def test_nobody_to_rank() -> None:
    assert rank({0: PROBLEM}, [], None) == Ranking({0: PROBLEM}, (), False)


def test_each_problem_has_an_order_of_its_own() -> None:
    one, other = (replace(_estimated(1.0), predicted=times) for times in ((100.0, 300.0), (200.0, 150.0)))
    assert [rank({index: PROBLEM}, [one, other], None).best[0] for index in (0, 1)] == [one, other]


def test_measurements_count_and_not_the_model() -> None:
    slow = replace(_measured(200.0, 0.1), predicted=(1.0,))
    fast = replace(_measured(100.0, 0.1), predicted=(999.0,))
    assert rank({0: PROBLEM}, [slow, fast], None).best == (fast, slow)


@pytest.mark.parametrize(
    "lighter", [{"shared": 16384}, {"num_warps": 2}, {"registers": 96}, {"shared": 16384, "num_warps": 8}]
)
def test_estimates_within_half_a_percent_tie_and_the_lighter_wins(lighter: dict[str, int]) -> None:
    fast, light = _estimated(100.0), _estimated(100.5, **lighter)
    for order in ((fast, light), (light, fast)):
        ranking = rank({0: PROBLEM}, order, None)
        assert ranking.tie and ranking.best == (light, fast)
    # The same difference the other way round: the fastest is the lightest, too.
    assert rank({0: PROBLEM}, [_estimated(100.5), _estimated(100.0, **lighter)], None).best[0].us(0) == 100.0
    clear = rank({0: PROBLEM}, [fast, _estimated(100.6, **lighter)], None)
    assert not clear.tie and clear.best[0] is fast


def test_a_tie_is_decided_by_shared_memory_then_warps_then_registers() -> None:
    heavy = _estimated(100.0, shared=2, num_warps=2, registers=2)
    by_registers = _estimated(100.0, shared=1, num_warps=4, registers=1)
    by_warps = _estimated(100.0, shared=1, num_warps=2, registers=9)
    for order in itertools.permutations((heavy, by_registers, by_warps)):
        assert rank({0: PROBLEM}, order, None).best[0] is by_warps


def test_a_faster_but_noisy_measurement_is_a_tie() -> None:
    steady = _measured(101.0, 0.2, shared=16384)
    noisy, sharp = _measured(100.0, 9.0), _measured(100.0, 0.2)
    # 1.86 * 9 / sqrt(100) is a standard error of 1.7 us: 1 us is nothing.
    ranking = rank({0: PROBLEM}, [noisy, steady], None)
    assert ranking.tie and ranking.best == (steady, noisy)
    ranking = rank({0: PROBLEM}, [sharp, steady], None)
    assert not ranking.tie and ranking.best == (sharp, steady)
    # More samples of the same noise tell them apart.
    assert not rank({0: PROBLEM}, [_measured(100.0, 9.0, 10_000), steady], None).tie


def test_noise_of_the_slower_one_counts_as_well() -> None:
    ranking = rank({0: PROBLEM}, [_measured(100.0, 0.2), _measured(101.0, 9.0, shared=16384)], None)
    assert ranking.tie and ranking.best[0].us(0) == 101.0


def test_what_is_far_behind_is_no_finalist_however_light() -> None:
    """The noise of a hopeless candidate makes no winner of it."""
    ranking = rank({0: PROBLEM}, [_measured(100.0, 50.0, 4), _measured(110.0, 50.0, 4, shared=0)], None)
    assert not ranking.tie and _times(ranking) == [100.0, 110.0]


CANDIDATES = (
    _estimated(123.25),
    replace(_estimated(1.0), predicted=(1.5, 2.5), resources=(Resources(0, 0, 8, {}), Resources(1, 2, 3, {"mma": 4}))),
    _measured(99.5, 0.25),
    replace(_measured(99.5, 0.25), times=(Measurement(1.0, 0.5, 7), Measurement(2.0, 0.125, 9)), predicted=(1.0, 2.0)),
)


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_candidates_survive_the_journal(candidate: Candidate) -> None:
    plain = json.loads(json.dumps(to_plain(candidate)))
    assert from_plain(candidate.variant, plain) == candidate


def test_rejections_survive_the_journal() -> None:
    rejection = Rejection("check", "wrong numbers", "tail: output is off by 0.5, allowed 0.01")
    assert from_plain(CANDIDATES[0].variant, json.loads(json.dumps(to_plain(rejection)))) == rejection


def test_an_estimate_as_it_is_stored() -> None:
    winner = _estimated(123.456)
    entry = entry_of(Ranking({0: PROBLEM}, (winner, _estimated(200.0)), False), "estimated", VERSIONS)
    assert entry.method == "estimated" and entry.accuracy is None
    assert entry.time == Timing(123.46, None, None)
    assert entry.spec == SPEC and entry.family == "triton_fwd" and entry.config == winner.variant.config
    assert entry.bucket == Bucket(1024, 4096) and entry.problem == PROBLEM
    assert entry.versions == VERSIONS


def test_a_measurement_as_it_is_stored() -> None:
    times = (Measurement(1.0, 0.5, 7), Measurement(99.999, 0.126, 321))
    winner = replace(_measured(1.0, 0.1), times=times, predicted=(1.0, 90.0))
    entry = entry_of(Ranking({1: PROBLEM}, (winner,), True), "measured", replace(VERSIONS, driver="580.1"))
    assert entry.time == Timing(100.0, 0.13, 321)
    assert entry.accuracy == StoredAccuracy(0.001, 0.002)
    assert entry.versions.driver == "580.1"


# One bucket of two batches, and another.
BATCHES = tuple(Problem(batch, 16, 4, 1, seq_kv) for batch, seq_kv in ((1, 4096), (64, 4000), (1, 8192)))


def _served(*us: float, spread: float = 0.1, shared: int = 32768) -> Candidate:
    times = tuple(Measurement(each, spread, 100, each + 4.0) for each in us)
    return replace(_measured(1.0, 0.1, shared=shared), times=times, predicted=us)


def test_problems_of_one_bucket_have_one_winner() -> None:
    """The one whose times have the smallest product; it is stored with that of the largest problem."""
    small, large, both = _served(10.0, 300.0, 9.0), _served(20.0, 100.0, 9.9), _served(12.0, 120.0, 20.0)
    first, second = rank_all(BATCHES, [small, large, both], None)
    assert first.problems == {0: BATCHES[0], 1: BATCHES[1]} and second.problems == {2: BATCHES[2]}
    assert first.best == (both, large, small) and second.best == (small, large, both)
    entry = entry_of(first, "measured", replace(VERSIONS, driver="580.1"))
    assert entry.bucket == Bucket(1, 4096) and entry.problem == BATCHES[1]
    assert entry.time == Timing(120.0, 0.1, 100, eager_us=124.0)
    assert Entry.from_plain(entry.to_plain()) == entry


def test_noise_of_several_problems() -> None:
    """5 % more on one of two problems are 2.5 % in the mean, of which the spreads explain as much as of one."""
    lighter = _served(105.0, 100.0, shared=16384)
    problems = {0: BATCHES[0], 1: BATCHES[1]}
    assert rank(problems, [_served(100.0, 100.0), lighter], None).best[1] is lighter
    noisy = [_served(100.0, 100.0, spread=9.0), replace(lighter, times=_served(105.0, 100.0, spread=9.0).times)]
    ranking = rank(problems, noisy, None)
    assert ranking.tie and ranking.best[0] is noisy[1]


def test_both_causal_alignments_are_stored_as_one() -> None:
    top_left = replace(_estimated(9.0), variant=variant(Spec(causal="top_left")))
    entry = entry_of(Ranking({0: PROBLEM}, (top_left,), False), "estimated", VERSIONS)
    assert entry.spec == Spec(causal="bottom_right")
