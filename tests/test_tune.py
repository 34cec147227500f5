"""The search as a whole: real processes, storage and compilers; where time or failure matters, tasks that fake them."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tune_tasks
from command_line import run
from failing_tasks import double

from flashgen import candidates as candidates_module
from flashgen import compilations, store
from flashgen import tune as tune_module
from flashgen.cli import options
from flashgen.errors import MissingDependencyError
from flashgen.families import FAMILIES, Family
from flashgen.gate import MAX_STACK
from flashgen.hardware import Gpu
from flashgen.problem import Bucket, Problem
from flashgen.records import Accuracy as StoredAccuracy
from flashgen.records import Entry, Timing
from flashgen.search import open_journal
from flashgen.select import current_versions
from flashgen.space import Config
from flashgen.spec import Spec
from flashgen.tune import Outcome, Progress, Request, tune, warm_start
from flashgen.workers import Workers

A100 = Gpu.named("a100")
REAL = FAMILIES["triton_fwd"]
SPEC = Spec(head_dim=16, head_dim_v=16, dtype="fp16")
PROBLEMS = (Problem(8, 16, 16, 512, 512), Problem(1, 16, 4, 8192, 8192))
PATIENCE = 60


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def compilers() -> Iterator[Workers]:
    with Workers(2) as pool:
        # What follows may count seconds: the processes have started.
        assert pool.outcome(pool.submit(PATIENCE, double, 21)) == 42
        yield pool


def _family(**choices: tuple[int, ...]) -> Family:
    """The real family with fewer choices, and none of its rules."""
    few = {"block_q": (64,), "block_kv": (32,), "num_warps": (2,), "num_stages": (2,)}
    return replace(REAL, choices={**few, "index_bits": (32,), "advance": (0,), **choices}, rules=())


def _request(family: Family = REAL, **changes: object) -> Request:
    base = Request(SPEC, PROBLEMS, A100, (family,), "estimated", trials=100, budget_s=600.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def _tune(request: Request, compilers: Workers, gpu_worker: Workers | None = None) -> Outcome:
    return tune(request, compilers, gpu_worker, lambda progress: None)


def _order(outcome: Outcome) -> list[Config]:
    return [candidate.variant.config for candidate in outcome.candidates]


def test_real_compiles_on_a_tiny_budget(compilers: Workers) -> None:
    seen: list[tuple[int, int]] = []

    def observe(progress: Progress) -> None:
        seen.append((progress.done, progress.total))
        assert progress.best is not None and progress.spec == SPEC

    outcome = tune(_request(trials=3), compilers, None, observe)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert not outcome.interrupted
    order = _order(outcome)
    assert order[0] == REAL.default(SPEC, A100) and len(set(order)) == 3
    # All other refusals are the rules', before anything was compiled.
    space = REAL.space(SPEC, A100)
    assert Counter(outcome.rejections) == Counter(rejection for _, rejection in space.rejected)
    assert [ranking.problems for ranking in outcome.rankings] == [{0: PROBLEMS[0]}, {1: PROBLEMS[1]}]
    for index, ranking in enumerate(outcome.rankings):
        assert {candidate.variant.config for candidate in ranking.best} == set(order)
        assert ranking.best[0].us(index) <= 1.005 * min(candidate.predicted[index] for candidate in ranking.best)
        assert all(used.shared > 0 and used.registers > 0 for candidate in ranking.best for used in candidate.resources)
    entries = outcome.entries(None)
    assert [(entry.method, entry.accuracy, entry.problem) for entry in entries] == [
        ("estimated", None, problem) for problem in PROBLEMS
    ]
    assert all(entry.versions == current_versions("triton_fwd") for entry in entries)


def test_the_seed_decides_the_order(compilers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "kernel_resources", tune_tasks.compile_at_once)
    # Past the random start, where the sampler learns from what it was told.
    first, again, other = (_order(_tune(_request(trials=12, seed=seed, resume=False), compilers)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] == other[0] == REAL.default(SPEC, A100)


def test_given_configs_come_after_the_default(compilers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "kernel_resources", tune_tasks.compile_at_once)
    usable = REAL.space(SPEC, A100).usable
    outcome = _tune(_request(trials=3, first=(usable[7], usable[3])), compilers)
    assert _order(outcome) == [REAL.default(SPEC, A100), usable[7], usable[3]]


# The smallest tiles of this width compile to 16,896 bytes.
WIDE = Spec(head_dim=256, head_dim_v=256, dtype="fp16")
LITTLE = replace(A100, shared_per_block=16384)


def test_no_candidate_fits(compilers: Workers) -> None:
    outcome = _tune(_request(spec=WIDE, gpu=LITTLE, trials=3), compilers)
    assert outcome.candidates == () and outcome.entries(None) == []
    assert all(ranking.best == () and not ranking.tie for ranking in outcome.rankings)
    compiled = [rejection for rejection in outcome.rejections if rejection.stage != "rule"]
    assert len(compiled) == 3
    for rejection in compiled:
        assert (rejection.stage, rejection.kind) == ("resources", "shared memory")
        assert "bytes of shared memory, a100 allows 16384" in rejection.reason
    by_rule = Counter(rejection.kind for rejection in outcome.rejections if rejection.stage == "rule")
    assert by_rule["shared memory"] > 0 and sum(by_rule.values()) == len(REAL.space(WIDE, LITTLE).rejected)


def test_the_command_says_why_no_candidate_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "gpu_from", lambda name: LITTLE)
    path = tmp_path / "a100.yaml"
    wanted = ("--gpu", "a100", "--head-dim", "256", "--dtype", "fp16", "--causal", "false", "--seq", "512")
    ended = run("tune", *wanted, "--trials", "2", "--budget", "600", "--output", path)
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert last.startswith("Error: no candidate is usable for d256_fp16 on a100: uses ")
    # Of what was compiled; what the rules refused beforehand is in the table.
    assert "bytes of shared memory, a100 allows 16384" in last and "registers" not in last
    assert store.read(path, "a100").entries == []


def test_triton_refuses_a_candidate(compilers: Workers) -> None:
    family = _family(block_q=(24, 64))
    outcome = _tune(_request(family), compilers)
    assert [config["block_q"] for config in _order(outcome)] == [64]
    (rejection,) = outcome.rejections
    assert (rejection.stage, rejection.kind) == ("compile", "compile: CompilationError")
    assert "does not compile for sm_80" in rejection.reason
    assert len(outcome.entries(None)) == 2


def test_candidates_that_hang_abort_raise_or_do_not_fit(compilers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "kernel_resources", tune_tasks.compile_or_fail)
    monkeypatch.setattr(compilations, "COMPILE_TIMEOUT_S", 1.0)
    family = _family(block_q=(16, 32, 64, 128), num_stages=(1, 2, 3))
    observed: list[Counter[str]] = []
    outcome = tune(_request(family), compilers, None, lambda progress: observed.append(Counter(progress.refused)))
    refused = {
        "compile: timeout": 3,
        "compile: crash": 3,
        "compile: RuntimeError": 3,
        "shared memory": 1,
        "spills": 1,
    }
    assert Counter(rejection.kind for rejection in outcome.rejections) == observed[-1] == refused
    assert len(observed) == 12
    reasons = {rejection.kind: rejection.reason for rejection in outcome.rejections}
    assert "did not finish within 1 s" in reasons["compile: timeout"]
    assert "exit code -6): kernel.py:7: error: the words that tell" in reasons["compile: crash"]
    assert "PassManager::run failed" in reasons["compile: RuntimeError"]
    assert f"uses {A100.shared_per_block + 1} bytes" in reasons["shared memory"]
    assert "spills 4000 bytes" in reasons["spills"] and MAX_STACK["forward"] < 4000
    (survivor,) = _order(outcome)
    assert (survivor["block_q"], survivor["num_stages"]) == (64, 3)
    assert [entry.config for entry in outcome.entries(None)] == [survivor, survivor]


def test_a_missing_package_ends_the_search(compilers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "kernel_resources", tune_tasks.miss_a_package)
    with pytest.raises(MissingDependencyError, match="No module named 'triton'"):
        _tune(_request(_family(num_stages=(1, 2, 3))), compilers)


def _noted(log: Path) -> list[tuple[float, str]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [(float(when), slug) for when, slug in map(str.split, lines)]


def test_nothing_starts_after_the_deadline(compilers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(compilations, "kernel_resources", partial(tune_tasks.compile_and_note, log, 0.3))
    start = time.monotonic()
    outcome = _tune(_request(budget_s=2.0), compilers)
    starts = [when for when, _ in _noted(log)]
    assert 0 < len(outcome.candidates) == len(starts) < 100
    # Each worker may hold one more task when time is up.
    assert len([when for when in starts if when > start + 2.0]) <= compilers.count
    assert len(outcome.entries(None)) == 2


def test_the_default_is_waited_for(compilers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A budget that ends while the first candidates compile still leaves a winner."""
    monkeypatch.setattr(compilations, "kernel_resources", partial(tune_tasks.compile_and_note, tmp_path / "log", 1.0))
    request = _request(budget_s=0.2)
    outcome = _tune(request, compilers)
    assert outcome.candidates and len(outcome.entries(None)) == 2
    default = request.families[0].default(request.spec, request.gpu)
    assert outcome.candidates[0].variant.config == default
    # Each worker may hold one more task when time is up.
    assert len(outcome.candidates) <= 2 * compilers.count


def test_no_time_at_all(compilers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(compilations, "kernel_resources", partial(tune_tasks.compile_and_note, log, 0.0))
    outcome = _tune(_request(budget_s=0.0), compilers)
    assert outcome.candidates == () and outcome.entries(None) == [] and _noted(log) == []
    assert {rejection.stage for rejection in outcome.rejections} == {"rule"}


@pytest.mark.parametrize("how", [partial(signal.raise_signal, signal.SIGINT), None])
def test_an_interrupted_search_keeps_what_it_has(
    how: Callable[[], None] | None, compilers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(compilations, "kernel_resources", partial(tune_tasks.compile_and_note, log, 0.0))
    family = _family(num_stages=(1, 2, 3, 4), advance=(0, 1))

    def observe(progress: Progress) -> None:
        if progress.done == 3 and how is not None:
            how()

    outcome = tune(_request(family, resume=True), compilers, None, observe)
    assert outcome.interrupted == (how is not None)
    found = _order(outcome)
    assert len(found) == (3 if how is not None else 8)
    assert [entry.config in found for entry in outcome.entries(None)] == [True, True]
    # Later, what is known is not compiled again, and counts in the ranking.
    log.unlink()
    later = _tune(_request(family, resume=True), compilers)
    assert not later.interrupted and len(_noted(log)) == 8 - len(found)
    assert _order(later)[: len(found)] == found and len(set(_order(later))) == 8
    assert {candidate.variant.config for candidate in later.rankings[0].best} == set(_order(later))


def test_ctrl_c_while_the_journal_is_unlocked(compilers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst moment: Optuna removes its lock file again when interrupted right after removing it."""
    monkeypatch.setattr(compilations, "kernel_resources", tune_tasks.compile_at_once)
    unlink, done, interrupts = os.unlink, 0, 0

    def unlink_and_interrupt(path: str, **options: int) -> None:
        nonlocal interrupts
        unlink(path, **options)
        if done >= 2 and not interrupts and str(path).endswith(".rename"):
            interrupts += 1
            signal.raise_signal(signal.SIGINT)

    def observe(progress: Progress) -> None:
        nonlocal done
        done = progress.done

    monkeypatch.setattr(os, "unlink", unlink_and_interrupt)
    outcome = tune(_request(_family(num_stages=(1, 2, 3, 4), advance=(0, 1))), compilers, None, observe)
    assert interrupts == 1 and outcome.interrupted
    assert len(outcome.candidates) == done >= 2 and len(outcome.entries(None)) == 2


def test_what_is_remembered_and_for_what(compilers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(compilations, "kernel_resources", partial(tune_tasks.compile_and_note, log, 0.0))
    request = _request(_family(num_stages=(1, 2)))

    def compiles(**changes: object) -> int:
        before = len(_noted(log))
        outcome = _tune(replace(request, **changes), compilers)  # type: ignore[arg-type]
        assert len(outcome.candidates) == 2
        return len(_noted(log)) - before

    assert compiles() == 2
    assert compiles() == 0
    assert compiles(resume=False) == 2
    assert compiles(problems=PROBLEMS[:1]) == 2
    assert compiles(spec=replace(SPEC, causal="bottom_right")) == 2
    assert compiles(gpu=Gpu.named("a30")) == 2
    # One of the same name but other silicon.
    assert compiles(gpu=replace(A100, num_sms=98)) == 2
    # Elsewhere a search of this GPU is under way: this one remembers nothing, and disturbs nothing.
    with open_journal("a100") as taken:
        assert taken is not None
        assert compiles() == 2
    assert compiles() == 0


def test_every_family_competes(compilers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "kernel_resources", tune_tasks.compile_at_once)
    two = (_family(block_q=(64,)), _family(block_q=(128,), num_stages=(2, 3)))
    outcome = _tune(_request(families=two), compilers)
    assert Counter(config["block_q"] for config in _order(outcome)) == {64: 1, 128: 2}
    assert len(outcome.rankings[0].best) == 3


@pytest.fixture
def gpu_worker() -> Iterator[Workers]:
    """The process that would run candidates; here it runs the tasks that stand for them."""
    with Workers(1) as pool:
        yield pool


def test_candidates_that_run(compilers: Workers, gpu_worker: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are wrong, some kill their process or its CUDA context; the others are timed and the best timed again."""
    monkeypatch.setattr(compilations, "kernel_resources", tune_tasks.compile_at_once)
    monkeypatch.setattr(tune_module, "evaluate", tune_tasks.evaluate_or_fail)
    monkeypatch.setattr(candidates_module, "remeasure", tune_tasks.remeasure_backwards)
    family = _family(block_q=(64, 128), num_stages=(1, 2, 3, 4))
    outcome = _tune(_request(family, method="measured"), compilers, gpu_worker)
    assert Counter((rejection.stage, rejection.kind) for rejection in outcome.rejections) == {
        ("check", "wrong numbers"): 2,
        ("benchmark", "run: crash"): 2,
        ("benchmark", "run: RuntimeError"): 2,
    }
    first = {candidate.variant.config["block_q"]: candidate for candidate in outcome.candidates}
    for block_q, candidate in first.items():
        assert [candidate.us(index) for index in (0, 1)] == [100 + 1000 / block_q, 100 + block_q]
        assert candidate.accuracy is not None and candidate.accuracy.allowed == 0.002
    # 107.8 and 115.6 us for the first problem, 164 and 228 us for the second: no finals.
    assert [[each.variant.config["block_q"] for each in ranking.best] for ranking in outcome.rankings] == [
        [128, 64],
        [64, 128],
    ]
    measured, _ = outcome.entries("580.1")
    assert measured.method == "measured" and measured.accuracy == StoredAccuracy(0.001, 0.002)
    assert measured.time == Timing(107.81, 0.1, 50) and measured.versions.driver == "580.1"


def test_the_finals_decide(compilers: Workers, gpu_worker: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "kernel_resources", tune_tasks.compile_at_once)
    monkeypatch.setattr(tune_module, "evaluate", tune_tasks.evaluate_or_fail)
    # 103.9 and 107.8 us: within 6 %.
    request = _request(_family(block_q=(128, 256)), method="measured", problems=PROBLEMS[:1])
    monkeypatch.setattr(candidates_module, "remeasure", tune_tasks.remeasure_backwards)
    turned = _tune(request, compilers, gpu_worker).rankings[0]
    assert [each.variant.config["block_q"] for each in turned.best] == [128, 256]
    assert [each.us(0) for each in turned.best] == [199.0, 200.0] and not turned.tie
    monkeypatch.setattr(candidates_module, "remeasure", tune_tasks.remeasure_and_die)
    first = _tune(request, compilers, gpu_worker).rankings[0]
    assert [each.variant.config["block_q"] for each in first.best] == [256, 128]
    assert first.best[0].us(0) == 100 + 1000 / 256


def _won(gpu: Gpu, config: Config, spec: Spec, seq: int) -> Entry:
    return Entry(
        spec, Bucket(seq, seq), "triton_fwd", config, "estimated", Problem(1, 1, 1, seq, seq), Timing(9.0, None, None),
        None, current_versions("triton_fwd"),
    )  # fmt: skip


def test_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path))
    here, elsewhere, rare, narrow = REAL.space(SPEC, A100).usable[:4]
    spec = replace(SPEC, head_dim=80, head_dim_v=80)
    assert warm_start(spec, A100) == ()
    seqs = (512, 1024, 2048)
    for gpu in (Gpu.named("a10"), Gpu.named("l4")):
        won = [_won(gpu, elsewhere, replace(spec, dtype="bf16"), seq) for seq in seqs]
        store.merge(tmp_path / f"{gpu.name}.yaml", gpu, won)
    # Another width teaches nothing.
    others = [_won(A100, narrow, replace(spec, head_dim_v=64), seq) for seq in seqs]
    once = _won(A100, here, replace(spec, causal="bottom_right"), 512)
    store.merge(tmp_path / "a100.yaml", A100, [once, *others])
    l40s = Gpu.named("l40s")
    store.merge(tmp_path / "l40s.yaml", l40s, [_won(l40s, rare, spec, 512)])
    # One win here counts more than six elsewhere; of those, frequent ones come first.
    assert warm_start(spec, A100) == (here, elsewhere, rare)
    assert warm_start(spec, A100, most=1) == (here,)
    assert warm_start(spec, l40s) == (rare, elsewhere, here)
    assert warm_start(spec, Gpu.named("t4")) == (elsewhere, here, rare)
