"""The command line: one file per command, each a thin shell around a function of the package."""

from __future__ import annotations

import sys

import click

from flashgen.cli.analyze import analyze_command
from flashgen.cli.bench import bench_command
from flashgen.cli.doctor import doctor_command
from flashgen.cli.export import export_command
from flashgen.cli.show import list_command, show_command
from flashgen.cli.tune import tune_command
from flashgen.errors import FlashgenError, TuneError
from flashgen.version import VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="flashgen")
def cli() -> None:
    """Generate flash-attention kernels and find the fastest one for your GPU.

    Exit codes: 0 done, 1 nothing usable found, 2 wrong use.
    """


for command in (
    tune_command,
    list_command,
    show_command,
    export_command,
    bench_command,
    analyze_command,
    doctor_command,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line; what flashgen raises on purpose is printed as one sentence."""
    try:
        cli(standalone_mode=True)
    except FlashgenError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1 if isinstance(error, TuneError) else 2)
