"""Kernels that candidates share are compiled once; failures and cancellations reach everyone who waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import tune_tasks
from variants import backward, hopper

from flashgen import compilations as module
from flashgen.compilations import Compilations
from flashgen.compile import kernel_resources
from flashgen.decode_cases import DECODE_CASES
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.space import Config
from flashgen.spec import Spec
from flashgen.workers import Failure, Workers

A100 = Gpu.named("a100")
SPEC = Spec("backward", 64, 64)
TILES = ((64, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2))


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(1) as pool:
        yield pool


def test_what_candidates_share_is_compiled_once(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(module, "kernel_resources", partial(tune_tasks.compile_and_note, log, 0.0))
    compilations = Compilations(workers, A100, to_run=True)
    variants = [backward(SPEC, dkdv, dq) for dkdv in TILES for dq in TILES]
    for each in variants:
        compilations.start(each)
    assert all(compilations.outcome(each) == (tune_tasks.FITS,) * 3 for each in variants)
    # One delta kernel, and three of each other: 7 instead of 27.
    assert len(log.read_text().splitlines()) == 7


def test_a_kernel_that_fails_fails_every_candidate_with_it(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel_resources", tune_tasks.compile_never)
    compilations = Compilations(workers, A100, to_run=True)
    for dq in TILES:
        outcome = compilations.outcome(backward(SPEC, TILES[0], dq))
        assert isinstance(outcome, Failure) and "delta_kernel does not compile" in outcome.reason


def test_a_worker_that_died_is_not_held_against_the_next(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may have been killed for what another process did."""
    monkeypatch.setattr(module, "kernel_resources", partial(tune_tasks.die_once, tmp_path / "died"))
    compilations = Compilations(workers, A100, to_run=True)
    first, second = backward(SPEC, TILES[0], TILES[0]), backward(SPEC, TILES[0], TILES[1])
    outcome = compilations.outcome(first)
    assert isinstance(outcome, Failure) and outcome.kind == "crash"
    assert compilations.outcome(second) == (tune_tasks.FITS,) * 3


def test_what_has_not_begun_is_cancelled(workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(module, "kernel_resources", partial(tune_tasks.compile_and_note, log, 1.0))
    compilations = Compilations(workers, A100, to_run=True)
    first, second = backward(SPEC, TILES[0], TILES[0]), backward(SPEC, TILES[1], TILES[1])
    futures = compilations.start(first)
    while not futures[0].running():
        time.sleep(0.01)
    compilations.start(second)
    assert compilations.cancelled(second)
    # They share the delta kernel, which runs: it is not taken from the other.
    assert not futures[0].cancelled() and futures[0].result() == tune_tasks.FITS
    assert compilations.cancelled(first)


@pytest.mark.parametrize("to_run", [True, False])
def test_ragged_lengths_are_compiled_for_who_runs_them(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to_run: bool
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(module, "kernel_resources", partial(tune_tasks.compile_and_note, log, 0.0))
    compilations = Compilations(workers, Gpu.named("h200"), to_run=to_run)
    assert compilations.outcome(hopper(Spec(), 2, 128, 2, 1, 1, 0, 0)) == (tune_tasks.FITS,)
    assert len(log.read_text().splitlines()) == 1 + to_run


def test_kernels_for_groups_of_heads_are_compiled_for_who_runs_them(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(module, "kernel_resources", partial(tune_tasks.compile_and_note, log, 0.0))
    compilations = Compilations(workers, Gpu.named("h200"), to_run=True, problems=[Problem(1, 8, 2, 128, 128)])
    for pack, compiled in ((0, 2), (1, 2 + 4)):
        assert compilations.outcome(hopper(Spec(), 2, 128, 2, 1, 1, 0, 0, pack=pack)) == (tune_tasks.FITS,)
        assert len(log.read_text().splitlines()) == compiled


DECODE = FAMILIES["triton_decode"]


@pytest.mark.parametrize(("paged", "to_run"), [(False, False), (False, True), (True, False), (True, True)])
def test_kernels_of_a_decode_are_compiled_for_the_rows_and_pages_of_who_runs_them(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, paged: bool, to_run: bool
) -> None:
    """First that for the problems, which is judged; then those for the cases that numbers are checked on."""
    log = tmp_path / "log"
    monkeypatch.setattr(module, "kernel_resources", partial(tune_tasks.compile_and_note_sizes, log))
    spec, h200 = Spec("decode", causal="bottom_right", paged=paged), Gpu.named("h200")
    problems = [Problem(batch, 32, 4, 3, 4096, 48 * paged) for batch in (1, 16)]
    compilations = Compilations(workers, h200, to_run=to_run, problems=problems)
    default = DECODE.default(spec, h200)
    for blocks_per_sm in (1, 2):
        config = Config(**{**default, "block_q": 64, "blocks_per_sm": blocks_per_sm})
        assert compilations.outcome(Variant(DECODE, spec, config)) == (tune_tasks.FITS,)
    sizes = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    page = 48 if paged else 128
    # Three rows of a group of eight need a block of 32; the cases have blocks of 16 and of all 64.
    assert sizes[0] == (page, 1, 32) and len(set(sizes)) == len(sizes)
    assert {rows for _, _, rows in sizes} == ({16, 32, 64} if to_run else {32})
    pages = {page, *(case.page_size for case in DECODE_CASES)} if paged and to_run else {page}
    assert {size for size, _, _ in sizes} == pages


def test_fewer_rows_are_another_kernel() -> None:
    spec, h200 = Spec("decode", 64, 64, "bf16", "bottom_right"), Gpu.named("h200")
    variant = Variant(DECODE, spec, DECODE.default(spec, h200))
    few, many = (kernel_resources(variant, h200, "kernel", 128, 1, rows) for rows in (16, 64))
    assert few.registers < many.registers and few.shared < many.shared
