"""`flashgen tune`: search, show progress, store the winners."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from flashgen import store
from flashgen.benchmark import kv_bytes
from flashgen.candidates import Method
from flashgen.cli import options
from flashgen.compile import require_triton
from flashgen.errors import InputError, StoreError, TuneError
from flashgen.families import Family, families_of, family_named
from flashgen.graphs import ROTATED_BYTES
from flashgen.hardware import Gpu, current_gpu, driver_version
from flashgen.paths import user_dir
from flashgen.problem import Problem
from flashgen.report import (
    outcome_to_plain,
    refusal_table,
    stderr_console,
    training_table,
    tune_progress,
    winners_tables,
)
from flashgen.spec import KV_DTYPES, Op, Spec
from flashgen.tune import Outcome, Request, tune, warm_start
from flashgen.workers import Workers

# Of a decode, unless options say others.
BATCHES, LENGTHS = (1, 16, 64), (4096, 32768, 131072)
DEFAULT_BUDGET_S = {"measured": 600.0, "estimated": 45.0}


@click.command("tune")
@options.gpu_option
@options.op_option
@options.head_dim_option
@options.head_dim_v_option
@options.kernel_dtype_option
@options.causal_option
@options.heads_option
@options.with_option
@options.score_mod_option
@options.mask_mod_option
@click.option("--seq", type=options.IntegerList(), default="1024,4096,16384", show_default=True, help="Lengths.")
@options.batch_option
@options.seq_q_option
@options.seq_kv_option
@options.page_size_option
@options.cache_option
@click.option("--family", help="Only this kernel family.")
@click.option("--trials", type=click.IntRange(min=1), default=100, show_default=True, help="Candidates per spec.")
@click.option("--budget", type=click.FloatRange(min=1), help="Seconds for all; default 600 measured, 45 estimated.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Candidates' order.")
@click.option("--fresh", is_flag=True, help="Forget what earlier runs measured.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="YAML file; default: the user's own.")
@options.json_option
def tune_command(gpu: str, seq: tuple[int, ...], as_json: bool, **given: Any) -> None:
    """Find the fastest kernel for a GPU and store it.

    With that GPU in this machine every candidate is checked and timed: `measured`. Without it, candidates are really
    compiled for it and ranked by a model: `estimated`. Ctrl-C keeps what is done. `--op training` tunes forward and
    backward: they share no choice, so the fastest of each are together the fastest. `--op decode` tunes what reads a
    cache of keys, as CUDA graphs launch it; sizes that differ in batch only get one winner.
    """
    options.own_options(given["op"], ("seq", "score_mod", "mask_mod"))
    require_triton()
    target = options.gpu_from(gpu)
    specs = options.specs_from(
        target, given["head_dim"], given["head_dim_v"], given["dtype"], given["causal"], given["op"], given["features"],
        (given["score_mod"], given["mask_mod"]),
    )  # fmt: skip
    method = method_for(target)
    problems = tuple(options.problem_from(length, given["heads"], given["head_dim"]) for length in seq)
    if given["op"] == "decode":
        specs = [replace(spec, paged=given["page_size"] is not None, cache=given["cache"]) for spec in specs]
        widest = max(specs, key=lambda spec: KV_DTYPES[spec.kv_dtype].itemsize)
        problems = _that_fit(widest, options.decode_problems(given, BATCHES, LENGTHS), target)
    budget = given["budget"] or DEFAULT_BUDGET_S[method]
    requests = [
        Request(
            spec=spec,
            problems=problems,
            gpu=target,
            families=_families(spec.op, given["family"]),
            method=method,
            trials=given["trials"],
            budget_s=budget,
            seed=given["seed"],
            resume=not given["fresh"],
            first=warm_start(spec, target),
        )
        for spec in specs
    ]
    path = output_path(target, given["output"])
    console = stderr_console()
    console.print(f"[bold]{target.label}[/] ({target.arch}): {method}, {len(specs)} specs, budget {budget:.0f} s")
    outcomes = _run(requests, budget, path, console)
    if as_json:
        click.echo(json.dumps([outcome_to_plain(outcome) for outcome in outcomes], indent=2))
    else:
        for table in winners_tables([outcome for outcome in outcomes if outcome.entries(None)]):
            console.print(table)
        if given["op"] == "training":
            console.print(training_table(outcomes))
        console.print(refusal_table(outcomes))
    without = [outcome for outcome in outcomes if not outcome.entries(None)]
    if without:
        names = ", ".join(outcome.request.spec.label for outcome in without)
        failure = f"no candidate is usable for {names} on {target.name}: {_reasons(without)}."
        if len(without) == len(outcomes):
            raise TuneError(failure)
        click.echo(failure, err=True)
    click.echo(f"Stored in {path}", err=True)
    if method == "estimated":
        click.echo(f"Nothing ran: {target.name} is not in this machine. Tune there to replace the estimates.", err=True)


def _that_fit(spec: Spec, problems: list[Problem], gpu: Gpu) -> tuple[Problem, ...]:
    """Of a decode: those whose caches find room in the GPU's memory beside each other, small ones first."""
    room = 0.8 * gpu.memory_bytes
    sizes = {each: max(kv_bytes(spec, each), ROTATED_BYTES) for each in problems}
    kept: list[Problem] = []
    for each in sorted(problems, key=sizes.__getitem__):
        room -= sizes[each]
        if room >= 0:
            kept.append(each)
        else:
            click.echo(f"Left out, for the GPU's memory: batch {each.batch} with {each.seq_kv} keys.", err=True)
    if not kept:
        raise InputError("no cache of these sizes fits into the GPU's memory: pass a smaller --batch or --seq-kv.")
    return tuple(each for each in problems if each in kept)


def _families(op: Op, name: str | None) -> tuple[Family, ...]:
    if name is None:
        return families_of(op)
    family = family_named(name)
    if family.op != op:
        raise InputError(f"family {name!r} computes the {family.op}: pass --op {family.op}, or leave --family out.")
    return (family,)


def method_for(gpu: Gpu) -> Method:
    """Measured when this machine's GPU is the target; another GPU's times are never stored under its name."""
    return "measured" if torch.cuda.is_available() and current_gpu().name == gpu.name else "estimated"


def output_path(gpu: Gpu, output: Path | None) -> Path:
    """Where winners go; checked before the search, so that nothing found can be lost.

    Raises:
        StoreError: the file cannot be written, or is for another GPU.
    """
    path = output
    if path is None:
        folder = user_dir() / "tuned"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder} cannot be made: {error.strerror}. Name a file with --output.") from error
        path = folder / f"{gpu.name}.yaml"
    store.merge(path, gpu, [])
    return path


def _run(requests: list[Request], budget: float, path: Path, console: Console) -> list[Outcome]:
    """Tune one spec after the other, each with its share of the time that is left; store each at once."""
    outcomes: list[Outcome] = []
    start = time.monotonic()
    measured = requests[0].method == "measured"
    cores = os.cpu_count() or 1
    with (
        Workers(cores) as compilers,
        Workers(1) if measured else contextlib.nullcontext() as gpu_worker,
        tune_progress(console) as observe,
    ):
        for number, request in enumerate(requests):
            left = budget - (time.monotonic() - start)
            share = replace(request, budget_s=max(1.0, left / (len(requests) - number)))
            outcome = tune(share, compilers, gpu_worker, observe)
            outcomes.append(outcome)
            store.merge(path, request.gpu, outcome.entries(driver_version() if measured else None))
            if outcome.interrupted:
                console.print("Interrupted: what was found until now is stored.")
                break
    return outcomes


def _reasons(outcomes: list[Outcome]) -> str:
    """Why no candidate is left, most frequent reason first; the rules' reasons only if they left nothing to try.

    Those are told family by family: a large space would outvote the others. Families that run anywhere come last among
    families, and first here.
    """
    counts = Counter(each.reason for outcome in outcomes for each in outcome.rejections if each.stage != "rule")
    if not counts:
        requests = [outcome.request for outcome in outcomes]
        spaces = [family.space(each.spec, each.gpu) for each in requests for family in reversed(each.families)]
        if any(space.usable for space in spaces):
            return "the search ended before a candidate was done; give it more time with --budget"
        each_its_own = (Counter(rejection.reason for _, rejection in space.rejected) for space in spaces)
        return "; ".join(list(dict.fromkeys(reason for own in each_its_own for reason, _ in own.most_common()))[:5])
    return "; ".join(reason for reason, _ in counts.most_common(5))
