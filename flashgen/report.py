"""Tables, live progress and plain data for people and machines."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from flashgen.benchmark import flops, kv_bytes
from flashgen.candidates import Candidate, Ranking
from flashgen.compare import Row
from flashgen.problem import Problem
from flashgen.spec import Spec
from flashgen.tune import Outcome, Progress


def stderr_console() -> Console:
    """Where people read; wide enough for the tables when it is a file or a pipe."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=120)


def stdout_console() -> Console:
    """Where results go; as wide as the widest table when it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


@contextlib.contextmanager
def tune_progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A live line per spec: tried, refused and why, best so far, time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Bar(*columns, console=console, refresh_per_second=4) as bar:
        tasks: dict[str, Any] = {}

        def observe(progress: Progress) -> None:
            name = progress.spec.label
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=progress.total, state="")
            bar.update(
                tasks[name], completed=progress.done, total=max(progress.total, progress.done), state=_state(progress)
            )

        yield observe


def _state(progress: Progress) -> str:
    refused = ", ".join(f"{count} {kind}" for kind, count in progress.refused.most_common(2))
    left = max(0.0, progress.budget_s - (time.monotonic() - progress.started))
    best = f"best {progress.best.us(-1):.0f} us {short(progress.best)}" if progress.best else "nothing usable yet"
    return f"{best}{f' | refused: {refused}' if refused else ''} | {left:.0f} s left"


def short(candidate: Candidate) -> str:
    """A config in a few letters: q128 kv64 w8 s3."""
    return candidate.variant.slug.removeprefix(
        f"{candidate.variant.family.name}_{candidate.variant.spec.slug}_"
    ).replace("_", " ")


def winners_tables(outcomes: Sequence[Outcome]) -> Iterator[Table]:
    """One table per spec: the winner at every size, its speed, its share of what binds there, and the runner-up."""
    for outcome in outcomes:
        method = outcome.request.method
        table = Table(title=f"{outcome.request.spec.label}: winners ({method})", box=SIMPLE_HEAD, title_justify="left")
        decode = outcome.request.spec.op == "decode"
        headings = ["size", "winner", "us", "GB/s" if decode else "TFLOP/s", "peak", "second"]
        for heading in headings + (["model", "eager us"][: 1 + decode] if method == "measured" else []):
            table.add_column(heading, justify="left" if heading == "winner" else "right", no_wrap=True)
        for index, problem, ranking in _problems(outcome):
            table.add_row(*_winner_cells(outcome, index, problem, ranking))
        yield table


def _problems(outcome: Outcome) -> Iterator[tuple[int, Problem, Ranking]]:
    """Those that have a winner, with their numbers."""
    for ranking in outcome.rankings:
        for index, problem in ranking.problems.items() if ranking.best else ():
            yield index, problem, ranking


def speed(spec: Spec, problem: Problem, us: float) -> float:
    """TFLOP/s, or of a decode GB/s of keys and values."""
    return kv_bytes(spec, problem) / us / 1e3 if spec.op == "decode" else flops(spec, problem) / us / 1e6


def _winner_cells(outcome: Outcome, index: int, problem: Problem, ranking: Ranking) -> list[str]:
    winner = ranking.best[0]
    microseconds = winner.us(index)
    spec, gpu = outcome.request.spec, outcome.request.gpu
    found = speed(spec, problem, microseconds)
    peak, length = (gpu.dram_gbs, problem.seq_kv) if spec.op == "decode" else (gpu.tensor_tflops, problem.seq_q)
    spread = f" ± {winner.times[index].spread_us:.1f}" if winner.times is not None else ""
    runner_up = "none"
    if len(ranking.best) > 1:
        runner_up = "tie" if ranking.tie else f"{100 * (ranking.best[1].us(index) / microseconds - 1):+.1f} %"
    cells = [
        f"{problem.batch} x {length}",
        short(winner),
        f"{microseconds:.1f}{spread}",
        f"{found:.0f}",
        f"{100 * found / peak:.0f} %",
        runner_up,
    ]
    if winner.times is None:
        return cells
    eager = winner.times[index].eager_us
    return [*cells, f"{winner.predicted[index]:.1f} us", *([] if eager is None else [f"{eager:.1f}"])]


def training_table(outcomes: Sequence[Outcome]) -> Table:
    """Forward and backward of every spec and length together, where both were tuned."""
    table = Table(title="Training: forward + backward", box=SIMPLE_HEAD, title_justify="left")
    for heading in ("spec", "size", "forward us", "backward us", "together us", "TFLOP/s"):
        table.add_column(heading, justify="left" if heading == "spec" else "right")
    best = {
        (outcome.request.spec, problem): ranking.best[0].us(index)
        for outcome in outcomes
        for index, problem, ranking in _problems(outcome)
    }
    for (spec, problem), forward in best.items():
        gradient = spec.backward
        if spec.op == "forward" and (gradient, problem) in best:
            backward = best[gradient, problem]
            tflops = (flops(spec, problem) + flops(gradient, problem)) / (forward + backward) / 1e6
            numbers = (f"{forward:.1f}", f"{backward:.1f}", f"{forward + backward:.1f}", f"{tflops:.0f}")
            table.add_row(spec.slug, f"{problem.batch} x {problem.seq_q}", *numbers)
    return table


def refusal_table(outcomes: Sequence[Outcome]) -> Table:
    """How many candidates were refused, at which stage and why, with one example each."""
    table = Table(title="Refused candidates", box=SIMPLE_HEAD, title_justify="left")
    for heading in ("stage", "reason", "count", "example"):
        table.add_column(heading, justify="right" if heading == "count" else "left")
    rejections = [rejection for outcome in outcomes for rejection in outcome.rejections]
    counts = Counter((rejection.stage, rejection.kind) for rejection in rejections)
    examples = {(rejection.stage, rejection.kind): rejection.reason for rejection in rejections}
    for (stage, kind), count in sorted(counts.items(), key=lambda item: -item[1]):
        table.add_row(stage, kind, str(count), escape(examples[stage, kind]))
    return table


def outcome_to_plain(outcome: Outcome) -> dict[str, object]:
    """One tuned spec as JSON-able data: winners with times, and refusals counted."""
    refused = Counter(f"{rejection.stage}: {rejection.kind}" for rejection in outcome.rejections)
    winners = []
    spec = outcome.request.spec
    for index, problem, ranking in _problems(outcome):
        best = ranking.best[0]
        winners.append(
            {
                "problem": problem.stated,
                "family": best.variant.family.name,
                "config": dict(best.variant.config),
                "us": best.us(index),
                "eager_us": best.times[index].eager_us if best.times is not None else None,
                "predicted_us": best.predicted[index],
                "gbs" if spec.op == "decode" else "tflops": speed(spec, problem, best.us(index)),
                "tie": ranking.tie,
            }
        )
    return {
        "gpu": outcome.request.gpu.name,
        "method": outcome.request.method,
        "spec": asdict(spec),
        "winners": winners,
        "refused": dict(refused),
        "interrupted": outcome.interrupted,
    }


def comparison_table(rows: Sequence[Row], memory: bool) -> Table:
    """One line per problem, one column per implementation: TFLOP/s, or peak memory beyond the inputs."""
    names = list(dict.fromkeys(row.name for row in rows))
    title = "TFLOP/s (time in us), by the GFLOP of the pairs that are seen"
    table = Table(title="Peak memory beyond the inputs, MB" if memory else title)
    for heading in ("spec", "batch", "seq", "GFLOP", *names):
        table.add_column(heading, justify="left" if heading == "spec" else "right")
    cells = {(row.label, row.problem, row.name): row for row in rows}
    for label, problem in dict.fromkeys((row.label, row.problem) for row in rows):
        found = [cells[label, problem, name] for name in names]
        values = [f"{found[0].flops / 1e9:.4g}", *(_cell(row, memory) for row in found)]
        table.add_row(label, str(problem.batch), str(problem.seq_q), *values)
    return table


def _cell(row: Row, memory: bool) -> str:
    if row.measurement is None or row.tflops is None or row.extra_bytes is None:
        return escape(row.failure or "failed")
    return f"{row.extra_bytes / 1e6:.0f}" if memory else f"{row.tflops:.0f} ({row.measurement.median_us:.0f})"
