"""`flashgen list` and `flashgen show`: what is tuned, and what would be launched."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from flashgen import store
from flashgen.cli import options
from flashgen.compile import require_triton
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.records import Entry
from flashgen.render import render
from flashgen.select import select


@click.command("list")
@click.option("--gpu", help="Only this GPU; default: every known one.")
@options.json_option
def list_command(gpu: str | None, as_json: bool) -> None:
    """List the tuned configs that are stored, and the files they stand in."""
    gpus: Iterable[Gpu] = [options.gpu_from(gpu)] if gpu else KNOWN_GPUS.values()
    found = [(target, path, entry) for target in gpus for path, entry in store.entries_of(target)]
    if as_json:
        click.echo(json.dumps([_plain(target, path, entry) for target, path, entry in found], indent=2))
        return
    table = Table()
    for heading in ("gpu", "spec", "seq_q", "seq_kv", "family", "config", "us", "method", "file"):
        table.add_column(heading, overflow="fold")
    for target, path, entry in found:
        config = " ".join(f"{name}={value}" for name, value in entry.config.items())
        table.add_row(
            target.name, entry.spec.slug, str(entry.bucket.seq_q), str(entry.bucket.seq_kv), entry.family,
            config, f"{entry.time.median_us:.1f}", entry.method, str(path),
        )  # fmt: skip
    Console().print(table)


def _plain(gpu: Gpu, path: Path, entry: Entry) -> dict[str, object]:
    plain = asdict(entry)
    plain["config"] = dict(entry.config)
    return {"gpu": gpu.name, "file": str(path), **plain}


@click.command("show")
@options.gpu_option
@options.head_dim_option
@options.head_dim_v_option
@options.dtype_option
@click.option("--causal/--no-causal", default=False, show_default=True)
@click.option("--seq", type=click.IntRange(min=1), default=4096, show_default=True, help="Length of q and k.")
@click.option("--family", help="Only this kernel family.")
@click.option("--source", is_flag=True, help="Print the generated source too.")
@options.json_option
def show_command(gpu: str, seq: int, source: bool, as_json: bool, **given: Any) -> None:
    """Show which kernel serves a call on a GPU, from which file and why; with --source, its text."""
    require_triton()
    target = options.gpu_from(gpu)
    causal = "true" if given["causal"] else "false"
    for spec in options.specs_from(target, given["head_dim"], given["head_dim_v"], given["dtype"], causal):
        selection = select(spec, options.problem_from(seq, None, spec.head_dim), target, given["family"])
        text = render(selection.variant) if source else None
        if as_json:
            plain = {
                "variant": selection.variant.slug,
                "family": selection.variant.family.name,
                "config": dict(selection.variant.config),
                "method": selection.method,
                "file": selection.source,
                "why": selection.why,
                "notes": list(selection.notes),
                "source": text,
            }
            click.echo(json.dumps(plain, indent=2))
        else:
            click.echo(str(selection))
            if text is not None:
                click.echo(text)
