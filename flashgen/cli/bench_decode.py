"""`flashgen bench --op decode`: rows over a cache of keys, by flashgen, torch and packages of others, in one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
import torch

from flashgen.cli import options
from flashgen.compare_decode import TABLE, DecodeRow, compare_decode
from flashgen.decode_inputs import PAGE_SIZE
from flashgen.decode_peers import DECODE_PEERS
from flashgen.errors import UnsupportedError
from flashgen.hardware import Gpu, current_gpu, driver_version
from flashgen.problem import Problem
from flashgen.report import stderr_console, stdout_console
from flashgen.report_decode import What, decode_summary, decode_table
from flashgen.spec import Spec

# Where some of the sizes are said, the others are these.
BATCHES, LENGTHS, HEAD_DIMS = (1, 16, 64), (4096, 32768), (128,)


def _work(gpu: Gpu, given: Mapping[str, Any]) -> list[tuple[Spec, Problem]]:
    """The table of flashgen.compare_decode, or what options say."""
    dtype, causal = given["dtype"], given["causal"]

    def specs(head_dim: int) -> list[Spec]:
        return options.specs_from(gpu, head_dim, None, dtype, causal, "decode")

    if not any(map(options.was_given, ("heads", "head_dim", "batch", "seq_q", "seq_kv"))):
        page_size = given["page_size"] or PAGE_SIZE
        return [
            (spec, Problem(batch, heads, kv_heads, 1, keys, page_size))
            for heads, kv_heads, head_dim, batch, keys in TABLE
            for spec in specs(head_dim)
        ]
    sizes = options.decode_problems({**given, "page_size": given["page_size"] or PAGE_SIZE}, BATCHES, LENGTHS)
    widths = given["head_dim"] if options.was_given("head_dim") else HEAD_DIMS
    return [(spec, each) for width in widths for spec in specs(width) for each in sizes]


def bench_decode(as_json: bool, given: Mapping[str, Any]) -> None:
    """What `bench` does for a decode; its rows go to stdout."""
    gpu = current_gpu()
    names = tuple(given["peers"].split(",")) if options.was_given("peers") else tuple(DECODE_PEERS)
    work = _work(gpu, given)
    # Imported here: its kernel needs Triton, which not every machine has.
    from flashgen.bandwidth import read_bandwidth

    console = stderr_console()
    rows: list[DecodeRow] = []
    bandwidth = read_bandwidth()
    console.print(f"read bandwidth: {bandwidth:.0f} GB/s", style="dim")
    try:
        for spec, problem in work:
            rows += compare_decode(spec, problem, names, bandwidth, given["rounds"])
            console.print(f"{spec.slug} {problem.batch} x {problem.seq_kv}", style="dim")
            torch.cuda.empty_cache()
    except KeyboardInterrupt:
        console.print("Interrupted: what was measured until now follows.")
    machine = {"gpu": gpu.label, "driver": driver_version(), "torch": torch.__version__, "read_gbs": bandwidth}
    if as_json:
        click.echo(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        out = stdout_console()
        read = f"read bandwidth {bandwidth:.0f} GB/s"
        out.print(f"{gpu.label}, driver {machine['driver']}, torch {torch.__version__}, {read}")
        tables: tuple[What, ...] = ("graph", "eager", "memory") if given["memory"] else ("graph", "eager")
        for what in tables:
            out.print(decode_table(rows, what))
        for line in decode_summary(rows):
            out.print(line)
    ours = [row for row in rows if row.name in ("flashgen", "paged")]
    if ours and all(row.measurement is None for row in ours):
        raise UnsupportedError("flashgen ran none of these problems; the table says why.")
