"""The search, against the measured times of whole spaces: what it finds, what it remembers, what it never does."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import replay
from measured import H200, measured
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from flashgen.families import FAMILIES
from flashgen.search import Search, open_journal
from flashgen.space import Config, Rule

# Spaces of 71 to 108 configs.
LARGE = [f"d{head_dim}_bf16{mask}" for head_dim in (64, 96, 128) for mask in ("", "_causal")]
TRIALS = 30
SEEDS = range(10)
PROBLEMS = 6


def _study(journal: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(journal)))
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


def _gaps(slug: str) -> list[float]:
    """For each seed, how much slower the best config of 30 trials is than the best of all, over the problems."""
    values = replay.values(slug)
    gaps = []
    for seed in SEEDS:
        search = Search(replay.family(slug), measured()[slug].spec, H200, trials=TRIALS, seed=seed)
        found = min(values[config] for config in replay.run(search, values))
        gaps.append(math.exp((found - min(values.values())) / PROBLEMS) - 1)
    return gaps


@pytest.fixture(scope="module")
def gaps() -> dict[str, list[float]]:
    return {slug: _gaps(slug) for slug in LARGE}


@pytest.mark.parametrize("slug", LARGE)
def test_30_trials_find_a_config_within_5_percent(slug: str, gaps: dict[str, list[float]]) -> None:
    """Every one of ten seeds did; one miss is left to other versions of the sampler."""
    assert sum(gap <= 0.05 for gap in gaps[slug]) >= len(SEEDS) - 1, gaps[slug]


def test_30_trials_do_better_than_chance(gaps: dict[str, list[float]]) -> None:
    chance = []
    for slug in LARGE:
        values = list(replay.values(slug).values())
        for seed in range(200):
            found = min(random.Random(seed).sample(values, TRIALS))
            chance.append(math.exp((found - min(values)) / PROBLEMS) - 1)
    ours = [gap for of_slug in gaps.values() for gap in of_slug]
    assert sum(ours) / len(ours) < 0.6 * sum(chance) / len(chance)


def test_a_sampled_search_asks_each_config_once_and_stops() -> None:
    search = replay.search(trials=20)
    asked = replay.run(search, replay.values(replay.SLUG))
    assert len(asked) == len(set(asked)) == 20
    assert set(asked) <= set(search.space.usable)
    assert search.ask() is None


def test_enough_trials_try_the_whole_space_once() -> None:
    search = replay.search(trials=34)
    asked = replay.run(search, replay.values(replay.SLUG))
    assert len(asked) == 34
    assert set(asked) == set(search.space.usable) == set(replay.values(replay.SLUG))


def test_nearly_as_many_trials_as_configs() -> None:
    """The sampler runs out of new suggestions; the rest is drawn at random and nothing twice."""
    asked = replay.run(replay.search(trials=33), replay.values(replay.SLUG))
    assert len(asked) == len(set(asked)) == 33


def test_two_configs_and_two_trials() -> None:
    choices = {**replay.CHOICES, **{name: numbers[:1] for name, numbers in replay.CHOICES.items() if name != "advance"}}
    search = replay.search(trials=2, of=replay.family(None, choices))
    assert sorted(config["advance"] for config in replay.run(search, {})) == [0, 1]


def test_a_space_without_a_usable_config() -> None:
    family = replace(replay.family(), rules=(Rule("never", lambda *_: "refused"),))
    search = replay.search(of=family)
    assert search.ask() is None
    assert {rejection.reason for rejection in search.rejections()} == {"refused"}
    assert len(search.rejections()) == 144


@pytest.mark.parametrize("trials", [20, 1000])
def test_the_seed_decides_the_order(trials: int) -> None:
    values = replay.values(replay.SLUG)
    first, again, other = (replay.run(replay.search(trials=trials, seed=seed), values) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("trials", [20, 1000])
def test_given_configs_come_first(trials: int) -> None:
    values = replay.values(replay.SLUG)
    usable, refused = sorted(values, key=repr)[:3], Config(**{**max(values, key=repr), "num_warps": 16})
    first = (usable[2], refused, usable[0], usable[2], usable[1])
    search = Search(replay.family(), replay.SPEC, H200, trials=trials, seed=0, first=first)
    asked = replay.run(search, values)
    assert asked[:3] == [usable[2], usable[0], usable[1]]
    assert len(set(asked)) == len(asked)


def test_a_refused_candidate_is_never_the_best(tmp_path: Path) -> None:
    journal, values = tmp_path / "journal", replay.values(replay.SLUG)
    search = replay.search(journal, trials=60, of=replay.family(None))
    asked = replay.run(search, values)
    refused = [config for config in asked if config not in values]
    assert len(refused) > 10 and len(asked) == 60
    study = _study(journal)
    assert study.best_value == min(values[config] for config in asked if config in values)
    for trial in study.trials:
        # A refusal has no value: infinity would tell the sampler how much worse it is, which nobody knows.
        known = trial.state == TrialState.COMPLETE
        assert (trial.value is not None) == known
        assert not known or trial.value == values[Config(**trial.params)]


def test_a_second_run_asks_only_what_is_new(tmp_path: Path) -> None:
    journal, values = tmp_path / "journal", replay.values(replay.SLUG)
    first = replay.run(replay.search(journal, trials=12), values)
    search = replay.search(journal)
    assert search.remembered == {config: {"config": dict(config)} for config in first}
    second = replay.run(search, values)
    assert len(second) == len(values) - 12
    assert set(first).isdisjoint(second)
    assert replay.search(journal).ask() is None


def test_a_second_run_samples_only_what_is_new(tmp_path: Path) -> None:
    journal, values = tmp_path / "journal", replay.values(replay.SLUG)
    first, second = (replay.run(replay.search(journal, trials=trials), values) for trials in (12, 24))
    assert len(first) == len(second) == 12 and len({*first, *second}) == 24
    assert replay.search(journal, trials=24).ask() is None


def test_without_a_journal_nothing_is_remembered() -> None:
    replay.run(replay.search(), replay.values(replay.SLUG))
    assert replay.search().remembered == {}


@pytest.mark.parametrize(
    ("place", "kept"), [("asked", replay.TOLD), ("enqueued", replay.TOLD), ("telling", replay.TOLD + 1)]
)
def test_a_killed_process_resumes(place: str, kept: int, tmp_path: Path) -> None:
    journal, values = tmp_path / "journal", replay.values(replay.SLUG)
    for _ in range(2):
        command = [sys.executable, replay.__file__, journal, place]
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert killed.returncode == 9, killed.stderr
    search = replay.search(journal)
    assert len(search.remembered) == 2 * kept
    asked = replay.run(search, values)
    assert len(asked) + 2 * kept == len(values) == len({*asked, *search.remembered})
    remembered = replay.search(journal).remembered
    assert set(remembered) == set(values)
    assert all(outcome == {"config": dict(config)} for config, outcome in remembered.items())
    assert not [trial for trial in _study(journal).trials if not trial.state.is_finished()]


def test_other_choices_are_another_study(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    asked = replay.run(replay.search(journal, trials=5), replay.values(replay.SLUG))
    more = replay.family(None, {**replay.CHOICES, "num_warps": (4, 8, 16)})
    assert replay.search(journal, of=more).remembered == {}
    assert set(replay.search(journal).remembered) == set(asked)


def test_another_name_is_another_study(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    replay.run(replay.search(journal, trials=5), replay.values(replay.SLUG))
    other = Search(replay.family(), replay.SPEC, H200, trials=5, seed=0, journal=journal, name="other problems")
    assert other.remembered == {}


def test_what_a_rule_refuses_by_now_is_not_remembered(tmp_path: Path) -> None:
    journal, values = tmp_path / "journal", replay.values(replay.SLUG)
    replay.run(replay.search(journal), values)
    narrow = Rule("wide", lambda spec, config, gpu: "has a wide index" if config["index_bits"] == 64 else None)
    search = replay.search(journal, of=replace(replay.family(), rules=(*replay.family().rules, narrow)))
    assert set(search.remembered) == {config for config in values if config["index_bits"] == 32}
    assert search.ask() is None


def test_abandoned_trials_are_closed_and_asked_again(tmp_path: Path) -> None:
    journal, values = tmp_path / "journal", replay.values(replay.SLUG)
    search = replay.search(journal)
    told = replay.run(search, values, most=3)
    open_ones = [search.ask(), search.ask()]
    search.abandon()
    states = [trial.state for trial in _study(journal).trials]
    assert states == [TrialState.COMPLETE] * 3 + [TrialState.FAIL] * 2
    again = replay.search(journal)
    assert set(again.remembered) == set(told)
    assert set(open_ones) <= set(replay.run(again, values))


def test_one_process_at_a_time_has_the_journal() -> None:
    with open_journal("h200") as journal:
        assert journal is not None and journal.parent.is_dir()
        with open_journal("h200") as taken, open_journal("a100") as other:
            assert taken is None
            assert other is not None and other != journal
    with open_journal("h200") as again:
        assert again == journal


def test_optunas_lock_of_a_killed_process_holds_nobody_up() -> None:
    with open_journal("h200") as journal:
        assert journal is not None
        replay.run(replay.search(journal), replay.values(replay.SLUG), most=1)
    stale = Path(f"{journal}.lock")
    stale.symlink_to(journal)
    with open_journal("h200") as again:
        assert again == journal and not stale.is_symlink()


def test_the_real_family_is_searched_by_its_own_rules() -> None:
    family = FAMILIES["triton_fwd"]
    search = Search(family, replay.SPEC, H200, trials=10, seed=0, first=(family.default(replay.SPEC, H200),))
    asked = replay.run(search, {})
    assert asked[0] == family.default(replay.SPEC, H200)
    assert all(family.refuses(replay.SPEC, config, H200) is None for config in asked)
