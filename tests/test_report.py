"""Tables and lines for people: the numbers stand in them, and any text survives."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from variants import TRITON_FWD, variant

from flashgen import report
from flashgen.benchmark import Measurement
from flashgen.candidates import Candidate, rank
from flashgen.check import Accuracy
from flashgen.compare import Row
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.report import (
    comparison_table,
    outcome_to_plain,
    refusal_table,
    short,
    stderr_console,
    stdout_console,
    tune_progress,
    winners_tables,
)
from flashgen.resources import Resources
from flashgen.space import Rejection
from flashgen.spec import Spec
from flashgen.tune import Outcome, Progress, Request

A100 = Gpu.named("a100")
SPEC = Spec(head_dim=64, head_dim_v=64, dtype="fp16")
# 4 * 16 * 1024 * 1024 pairs, 256 FLOPs each: 17.18 GFLOP.
PROBLEMS = (Problem(4, 16, 16, 1024, 1024), Problem(1, 16, 16, 2048, 2048))
REQUEST = Request(SPEC, PROBLEMS, A100, (TRITON_FWD,), "estimated", trials=3, budget_s=60.0)
FAST, SLOW = variant(SPEC, 128, 64, 4, 3), variant(SPEC, 64, 32, 4, 2)
NEEDS = (Resources(32768, 128, 0, {}),)
REJECTIONS = (
    *[Rejection("rule", "small tile", "block_q=16 reads K and V more often")] * 12,
    Rejection("compile", "compile: PTXASError", "ptxas died [/usr/bin/ptxas] on [bold]line[/] 7"),
)


def _outcome(*candidates: Candidate, method: str = "estimated") -> Outcome:
    request = replace(REQUEST, method=method)  # type: ignore[arg-type]
    rankings = tuple(rank({index: problem}, candidates, None) for index, problem in enumerate(PROBLEMS))
    return Outcome(request, rankings, candidates, REJECTIONS, interrupted=False)


ESTIMATED = _outcome(Candidate(FAST, NEEDS, (100.0, 400.0)), Candidate(SLOW, NEEDS, (150.0, 401.0)))


def _measured(which: object, *medians: float) -> Candidate:
    times = tuple(Measurement(median, 1.25, 100) for median in medians)
    return Candidate(which, NEEDS, (90.0, 380.0), Accuracy(0.001, 0.002), times)  # type: ignore[arg-type]


MEASURED = _outcome(_measured(FAST, 100.0, 400.0), _measured(SLOW, 150.0, 600.0), method="measured")


def _lines(*renderables: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    console.print(*renderables)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def _line_with(lines: Sequence[str], *words: str) -> str:
    (line,) = [line for line in lines if all(word in line for word in words)]
    return line


def test_winners_of_an_estimate() -> None:
    lines = _lines(*winners_tables([ESTIMATED]))
    assert "d64_fp16: winners (estimated)" in lines[0]
    # 17.18 GFLOP in 100 us are 172 TFLOP/s, 55 % of 312.
    short_one = _line_with(lines, "4 x 1024").split()
    assert short_one == [
        "4",
        "x",
        "1024",
        *short(ESTIMATED.rankings[0].best[0]).split(),
        "100.0",
        "172",
        "55",
        "%",
        "+50.0",
        "%",
    ]
    # 400 against 401 us: nobody knows.
    assert _line_with(lines, "1 x 2048").split()[-1] == "tie"
    assert not any("model" in line or "±" in line for line in lines)


def test_winners_that_were_measured() -> None:
    lines = _lines(*winners_tables([MEASURED]))
    assert "winners (measured)" in lines[0]
    assert "model" in _line_with(lines, "winner ", "TFLOP/s")
    line = _line_with(lines, "4 x 1024")
    # The time with its spread, and what the model had said.
    assert "100.0 ± 1.2" in line and line.rstrip().endswith("90.0 us") and "+50.0 %" in line


def test_a_winner_without_a_rival_and_a_length_without_a_winner() -> None:
    alone = _outcome(Candidate(FAST, NEEDS, (100.0, 400.0)))
    assert _line_with(_lines(*winners_tables([alone])), "4 x 1024").split()[-1] == "none"
    lines = _lines(*winners_tables([_outcome()]))
    assert not any("1024" in line for line in lines)


def test_one_table_for_each_spec() -> None:
    causal = replace(ESTIMATED, request=replace(REQUEST, spec=replace(SPEC, causal="bottom_right")))
    tables = list(winners_tables([ESTIMATED, causal]))
    assert len(tables) == 2
    # Half the pairs in the same time: half the speed.
    assert " 86 " in _line_with(_lines(tables[1]), "4 x 1024")


def test_refusals_are_counted_with_an_example() -> None:
    lines = _lines(refusal_table([ESTIMATED, ESTIMATED]))
    assert _line_with(lines, "small tile", " 24 ", "block_q=16 reads K and V more often").split()[0] == "rule"
    # What compilers say has brackets that mean nothing here.
    assert _line_with(lines, "compile: PTXASError", " 2 ", "ptxas died [/usr/bin/ptxas] on [bold]line[/] 7")
    frequent, rare = (lines.index(_line_with(lines, kind)) for kind in ("small tile", "PTXASError"))
    assert frequent < rare


def test_an_outcome_as_json() -> None:
    plain = json.loads(json.dumps(outcome_to_plain(ESTIMATED)))
    assert (plain["gpu"], plain["method"], plain["interrupted"]) == ("a100", "estimated", False)
    assert Spec(**plain["spec"]) == SPEC
    assert plain["refused"] == {"rule: small tile": 12, "compile: compile: PTXASError": 1}
    first, second = plain["winners"]
    assert first["problem"] == PROBLEMS[0].stated and first["config"] == dict(FAST.config)
    assert (first["family"], first["us"], first["predicted_us"], first["tie"]) == ("triton_fwd", 100.0, 100.0, False)
    assert first["tflops"] == pytest.approx(4 * 16 * 1024 * 1024 * 256 / 100e-6 / 1e12)
    assert second["tie"] is True
    measured = outcome_to_plain(MEASURED)["winners"]
    assert isinstance(measured, list) and (measured[0]["us"], measured[0]["predicted_us"]) == (100.0, 90.0)
    assert outcome_to_plain(_outcome())["winners"] == []


def test_a_config_in_a_few_letters() -> None:
    assert short(Candidate(FAST, NEEDS, (1.0,))) == "q128 kv64 w4 s3 i32 a0"


def _progress(**changes: object) -> Progress:
    progress = Progress(SPEC, total=30, started=time.monotonic(), budget_s=3600.0)
    return replace(progress, **changes)  # type: ignore[arg-type]


def test_the_state_of_a_search() -> None:
    assert report._state(_progress()).startswith("nothing usable yet | ")
    refused = Counter({"spills": 3, "compile: timeout": 2, "shared memory": 1})
    line = report._state(_progress(done=9, refused=refused, best=ESTIMATED.candidates[0]))
    assert line.startswith("best 400 us q128 kv64 w4 s3 i32 a0 | refused: 3 spills, 2 compile: timeout | ")
    assert "shared memory" not in line
    left = int(line.split("| ")[-1].removesuffix(" s left"))
    assert 3000 <= left <= 3600
    # Time that is up is not negative.
    assert report._state(_progress(started=time.monotonic() - 9999.0)).endswith("| 0 s left")


def test_progress_is_drawn_per_spec() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    with tune_progress(console) as observe:
        for done in (1, 2):
            observe(_progress(done=done, best=ESTIMATED.candidates[0]))
        # More than planned, as when earlier runs are remembered.
        observe(_progress(spec=replace(SPEC, causal="bottom_right"), done=40))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "d64_fp16" in drawn and "2/30" in drawn and "best 400 us" in drawn
    assert "d64_fp16_causal" in drawn and "40/40" in drawn


def test_tables_are_not_squeezed_when_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    stderr_console().print(refusal_table([ESTIMATED]))
    stdout_console().print(refusal_table([ESTIMATED]))
    out, err = capsys.readouterr()
    for text in (out, err):
        assert any("small tile" in line and "reads K and V more often" in line for line in text.splitlines())


GOOD = Row(SPEC, PROBLEMS[0], "forward", "flashgen", Measurement(100.4, 1.0, 30), 171.8, 25_000_000, None, 17.18e9)
ROWS = (
    GOOD,
    replace(GOOD, name="fa2", measurement=Measurement(80.0, 1.0, 30), tflops=214.7, extra_bytes=0),
    replace(GOOD, name="plain", measurement=None, tflops=None, extra_bytes=None, failure="out of memory"),
    replace(GOOD, problem=PROBLEMS[1], tflops=99.0),
    replace(GOOD, problem=PROBLEMS[1], name="fa2", measurement=None, tflops=None, extra_bytes=None, failure=None),
    replace(GOOD, problem=PROBLEMS[1], name="plain", measurement=None, failure="no kernel for [/x]"),
)


def test_a_comparison_by_speed_and_by_memory() -> None:
    speed = _lines(comparison_table(ROWS, memory=False))
    assert "TFLOP/s (time in us)" in speed[0] or "TFLOP/s (time in us)" in speed[1]
    assert _line_with(speed, "flashgen", "fa2", "plain")
    cells = [cell.strip() for cell in _line_with(speed, "1024").strip("│ ").split("│")]
    assert cells == ["d64_fp16", "4", "1024", "17.18", "172 (100)", "215 (80)", "out of memory"]
    cells = [cell.strip() for cell in _line_with(speed, "2048").strip("│ ").split("│")]
    assert cells == ["d64_fp16", "1", "2048", "17.18", "99 (100)", "failed", "no kernel for [/x]"]
    memory = _lines(comparison_table(ROWS, memory=True))
    cells = [cell.strip() for cell in _line_with(memory, "1024").strip("│ ").split("│")]
    assert cells == ["d64_fp16", "4", "1024", "17.18", "25", "0", "out of memory"]
