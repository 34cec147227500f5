"""`flashgen list` and `flashgen show`: what is tuned, and what would be launched."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from flashgen import combinations, store
from flashgen.cli import options
from flashgen.compile import require_triton
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.records import Entry
from flashgen.render import render
from flashgen.report import stdout_console
from flashgen.select import Selection, select


@click.command("list")
@click.option("--gpu", help="Only this GPU; default: every known one.")
@options.json_option
def list_command(gpu: str | None, as_json: bool) -> None:
    """List the tuned configs that are stored, and the files they stand in."""
    gpus: Iterable[Gpu] = [options.gpu_from(gpu)] if gpu else KNOWN_GPUS.values()
    found = [(target, path, entry) for target in gpus for path, entry in store.entries_of(target)]
    if as_json:
        click.echo(json.dumps([_entry_plain(target, path, entry) for target, path, entry in found], indent=2))
        return
    table = Table()
    for heading in ("gpu", "spec", "seq_q", "seq_kv", "family", "config", "us", "method", "file"):
        table.add_column(heading, overflow="fold")
    for target, path, entry in found:
        config = " ".join(f"{name}={value}" for name, value in entry.config.items())
        table.add_row(
            target.name, entry.spec.label, str(entry.bucket.seq_q), str(entry.bucket.seq_kv), entry.family,
            config, f"{entry.time.median_us:.1f}", entry.method, escape(str(path)),
        )  # fmt: skip
    stdout_console().print(table)


def _entry_plain(gpu: Gpu, path: Path, entry: Entry) -> dict[str, object]:
    plain = asdict(entry)
    plain["config"] = dict(entry.config)
    return {"gpu": gpu.name, "file": str(path), **plain}


def _print_combinations(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(combinations.table())
        context.exit()


# A decode is of one new token.
ROWS = {"decode": 1}


@click.command("show")
@options.gpu_option
@options.op_option
@options.head_dim_option
@options.head_dim_v_option
@options.kernel_dtype_option
@click.option("--causal/--no-causal", default=False, show_default=True)
@options.with_option
@options.score_mod_option
@options.mask_mod_option
@click.option(
    "--seq", type=click.IntRange(min=1), default=4096, show_default=True, help="Keys, and rows but of a decode."
)
@click.option("--family", help="Only this kernel family.")
@click.option("--source", is_flag=True, help="Print the generated source too.")
@click.option(
    "--combinations", is_flag=True, is_eager=True, expose_value=False, callback=_print_combinations,
    help="Print which features go together, as Markdown, and nothing else.",
)  # fmt: skip
@options.json_option
def show_command(gpu: str, seq: int, source: bool, as_json: bool, **given: Any) -> None:
    """Show which kernel serves a call on a GPU, from which file and why; with --source, its text."""
    require_triton()
    target = options.gpu_from(gpu)
    causal = "true" if given["causal"] else "false"
    specs = options.specs_from(
        target, given["head_dim"], given["head_dim_v"], given["dtype"], causal, given["op"], given["features"],
        (given["score_mod"], given["mask_mod"]),
    )  # fmt: skip
    selections = [
        select(spec, options.problem_from(seq, None, spec.head_dim, seq_q=ROWS.get(spec.op)), target, given["family"])
        for spec in specs
    ]
    if as_json:
        click.echo(json.dumps([_selection_plain(selection, source) for selection in selections], indent=2))
        return
    for selection in selections:
        click.echo(str(selection))
        if source:
            click.echo(render(selection.variant))


def _selection_plain(selection: Selection, source: bool) -> dict[str, object]:
    return {
        "variant": selection.variant.slug,
        "family": selection.variant.family.name,
        "config": dict(selection.variant.config),
        "method": selection.method,
        "file": selection.source,
        "why": selection.why,
        "notes": list(selection.notes),
        "source": render(selection.variant) if source else None,
    }
