"""`flashgen bench`: flashgen beside SDPA's backends, FlexAttention, plain attention and other packages, in one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from flashgen.cli import options
from flashgen.cli.bench_decode import bench_decode
from flashgen.compare import Row, compare, host_cost
from flashgen.errors import InputError, UnsupportedError
from flashgen.hardware import Gpu, current_gpu, driver_version
from flashgen.mods import MODS, Mod
from flashgen.peers import OPTIONAL, PEERS
from flashgen.plot import check_plot_path, plot
from flashgen.report import comparison_table, stderr_console, stdout_console
from flashgen.spec import Spec

# What says nothing about a decode.
OF_OTHERS = ("features", "mods", "seq", "tokens", "host", "plot_path")


def _specs(gpu: Gpu, head_dim: int, given: Mapping[str, Any]) -> list[tuple[Spec, Mod | None]]:
    """What is computed, and the modifications that it is of."""
    if not given["mods"]:
        specs = options.specs_from(gpu, head_dim, None, given["dtype"], given["causal"], features=given["features"])
        return [(spec, None) for spec in specs]
    for name, option in (("causal", "--causal"), ("features", "--with")):
        if options.was_given(name):
            raise InputError(f"--mods says itself what the scores go through: leave out {option}, or --mods.")
    plain = options.specs_from(gpu, head_dim, None, given["dtype"], "false")
    return [(mod.spec(spec), mod) for spec in plain for mod in MODS]


@click.command("bench")
@options.op_option
@click.option("--head-dim", type=options.IntegerList(), default="64,128,256", show_default=True)
@options.dtype_option
@options.causal_option
@options.with_option
@click.option(
    "--mods", is_flag=True, help=f"Time FlexAttention's usual modifications: {', '.join(m.name for m in MODS)}."
)
@options.heads_option
@click.option("--seq", type=options.IntegerList(), default="512,1024,2048,4096,8192,16384", show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=options.TOKENS, show_default=True, help="batch * seq.")
@click.option(
    "--peers",
    default=",".join(name for name in PEERS if name not in OPTIONAL),
    show_default=True,
    help=f"Which to run, of {', '.join(PEERS)}; fa3 and fa4 are packages of their own.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Of timing; default: until each peer has followed each other."
)
@click.option("--memory", is_flag=True, help="Print peak memory too.")
@click.option(
    "--host", is_flag=True, help="Print the CPU time of one eager call too, with its backward unless --op forward."
)
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Picture file to write.")
@options.batch_option
@options.seq_q_option
@options.seq_kv_option
@options.page_size_option
@options.json_option
def bench_command(as_json: bool, **given: Any) -> None:
    """Measure attention implementations side by side on this machine's GPU.

    Times are medians of single calls with a cold L2. An implementation that runs out of memory, refuses a shape or
    computes something else is reported as such. Ctrl-C keeps what is measured. `--op decode` has peers and sizes of its
    own: times are of launches in a CUDA graph that read caches in turns, beside the GPU's read bandwidth.
    """
    options.own_options(given["op"], OF_OTHERS)
    if given["op"] == "decode":
        return bench_decode(as_json, given)
    if given["plot_path"] is not None:
        check_plot_path(given["plot_path"])
    gpu = current_gpu()
    names = tuple(given["peers"].split(","))
    rows: list[Row] = []
    console = stderr_console()
    # All of them before the first is measured: a bad one at the end would cost what came before.
    work = [
        (spec, options.problem_from(seq, given["heads"], head_dim, given["tokens"]), mod)
        for head_dim in given["head_dim"]
        for spec, mod in _specs(gpu, head_dim, given)
        for seq in given["seq"]
    ]
    # First what is quick: an interrupted comparison has it too.
    cost = host_cost(given["op"]) if given["host"] else None
    try:
        for spec, problem, mod in work:
            found = compare(spec, problem, names, given["rounds"], given["op"], mod)
            console.print(f"{found[0].label} {problem.batch} x {problem.seq_q}", style="dim")
            rows += found
    except KeyboardInterrupt:
        console.print("Interrupted: what was measured until now follows.")
    machine = {"gpu": gpu.label, "driver": driver_version(), "torch": torch.__version__}
    if as_json:
        plain = {
            "machine": machine,
            "rows": [asdict(row) for row in rows],
            "host_us": asdict(cost) if cost is not None else None,
        }
        click.echo(json.dumps(plain, indent=2))
    else:
        out = stdout_console()
        out.print(f"{gpu.label}, driver {machine['driver']}, torch {torch.__version__}")
        out.print(comparison_table(rows, memory=False))
        if given["memory"]:
            out.print(comparison_table(rows, memory=True))
        if cost is not None:
            ratio = cost.flashgen_us / cost.sdpa_us
            what = "one call" if given["op"] == "forward" else "one call and its backward"
            out.print(
                f"CPU time of {what}: flashgen {cost.flashgen_us:.1f} us, SDPA {cost.sdpa_us:.1f} us ({ratio:.2f}x)"
            )
    if given["plot_path"] is not None:
        plot(rows, given["plot_path"], f"{gpu.label}, torch {torch.__version__}")
    ours = [row for row in rows if row.name == "flashgen"]
    if ours and all(row.measurement is None for row in ours):
        raise UnsupportedError("flashgen ran none of these problems; the table says why.")
