"""`flashgen export`: a kernel as a source file of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flashgen.cli import options
from flashgen.compile import require_triton
from flashgen.errors import InputError
from flashgen.export import export


@click.command("export")
@options.gpu_option
@options.head_dim_option
@options.head_dim_v_option
@options.dtype_option
@click.option("--causal/--no-causal", default=False, show_default=True, help="Bottom-right causal mask.")
@options.with_option
@click.option("--seq", type=click.IntRange(min=1), default=4096, show_default=True, help="Length to be fast at.")
@click.option("--family", help="Only this kernel family.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write.")
def export_command(gpu: str, seq: int, output: Path, **given: Any) -> None:
    """Write a kernel, its launcher and a self-check to one file that needs only torch and triton."""
    require_triton()
    target = options.gpu_from(gpu)
    causal = "true" if given["causal"] else "false"
    specs = options.specs_from(
        target, given["head_dim"], given["head_dim_v"], given["dtype"], causal, features=given["features"]
    )
    if len(specs) > 1:
        raise InputError("one file holds one dtype: pass a single --dtype.")
    selection = export(specs[0], options.problem_from(seq, None, specs[0].head_dim), target, output, given["family"])
    click.echo(str(selection))
    click.echo(f"Written to {output}; `python {output}` on a GPU checks it.")
