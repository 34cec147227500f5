"""`flashgen analyze`: FLOPs, bytes, the limit that binds, and what each block size needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from flashgen.analyze import Analysis, Method, analyze
from flashgen.budget import BudgetRow, budget
from flashgen.cli import options
from flashgen.errors import InputError
from flashgen.families import FAMILIES
from flashgen.problem import Problem
from flashgen.report import stdout_console


@click.command("analyze")
@options.gpu_option
@options.head_dim_option
@options.head_dim_v_option
@options.dtype_option
@click.option("--causal/--no-causal", default=False, show_default=True)
@options.heads_option
@click.option("--batch", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--seq", type=click.IntRange(min=1), default=4096, show_default=True, help="Length of q and k.")
@click.option("--seq-q", type=click.IntRange(min=1), help="Length of q where it differs, e.g. 1 for decoding.")
@options.json_option
def analyze_command(gpu: str, as_json: bool, **given: Any) -> None:
    """Count the work of one problem: which limit of the GPU binds, flash against standard attention.

    Also prints the shared memory and registers that each block size needs, and why the rules refuse some.
    """
    target = options.gpu_from(gpu)
    causal = "true" if given["causal"] else "false"
    specs = options.specs_from(target, given["head_dim"], given["head_dim_v"], given["dtype"], causal)
    if len(specs) > 1:
        raise InputError("one analysis is of one dtype: pass a single --dtype.")
    spec = specs[0]
    heads, kv_heads = given["heads"] or (max(1, options.WIDTH // spec.head_dim),) * 2
    problem = Problem(given["batch"], heads, kv_heads, given["seq_q"] or given["seq"], given["seq"])
    config = FAMILIES["triton_fwd"].default(spec, target)
    analysis = analyze(problem, spec, target, config)
    rows = budget(spec, target)
    if as_json:
        plain = {
            "gpu": target.name,
            "spec": asdict(spec),
            "problem": problem.stated,
            "flash": asdict(analysis.flash),
            "standard": asdict(analysis.standard),
            "visible_pairs": analysis.visible_pairs,
            "l2_bytes": analysis.l2_bytes,
            "ridge_flop_per_byte": analysis.ridge,
            "budget": [_budget_plain(row) for row in rows],
        }
        click.echo(json.dumps(plain, indent=2))
        return
    out = stdout_console()
    out.print(_work_table(analysis))
    out.print(
        f"Through L2, in blocks of {config['block_q']} rows: {analysis.l2_bytes / 1e9:.2f} GB "
        f"({analysis.l2_intensity:.0f} FLOP/byte). Ridge point of {target.name}: {analysis.ridge:.0f} FLOP/byte."
    )
    out.print(_budget_table(rows, target.name, target.shared_per_block))


def _work_table(analysis: Analysis) -> Table:
    table = Table(title=f"{analysis.spec.slug}, {analysis.problem} on {analysis.gpu.label}")
    for heading in ("", "flash", "standard"):
        table.add_column(heading, justify="right" if heading else "left")
    pair = (analysis.flash, analysis.standard)

    def add(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    add("FLOPs", *(f"{method.flops / 1e9:.1f} G" for method in pair))
    add("exponentials", *(f"{method.exps / 1e6:.1f} M" for method in pair))
    add("HBM bytes", *(f"{method.hbm_bytes / 1e9:.3f} GB" for method in pair))
    add("FLOP / HBM byte", *(f"{method.hbm_intensity:.0f}" for method in pair))
    add("memory beyond q, k, v, o", *(f"{method.extra_bytes / 1e9:.3f} GB" for method in pair))
    for index, limit in enumerate(analysis.flash.limits):
        add(f"time if only {limit.name}", *(f"{method.limits[index].us:.1f} us" for method in pair))
    add("binding limit", *(_binding(method) for method in pair))
    return table


def _binding(method: Method) -> str:
    return method.binding.name


def _budget_table(rows: list[BudgetRow], name: str, limit: int) -> Table:
    table = Table(title=f"Block sizes against {limit} bytes of shared memory a block ({name})")
    for heading in ("block_q", "block_kv", "warps", "stages", "shared bytes", "of limit", "registers", "refused"):
        table.add_column(heading, justify="left" if heading == "refused" else "right")
    for row in rows:
        low, high = row.shared_low, row.shared_high
        config = row.config
        table.add_row(
            str(config["block_q"]), str(config["block_kv"]), str(config["num_warps"]), str(config["num_stages"]),
            f"{low}" if low == high else f"{low} to {high}", f"{100 * row.shared_share:.0f} %", str(row.registers),
            row.refused.reason if row.refused is not None else "",
        )  # fmt: skip
    return table


def _budget_plain(row: BudgetRow) -> dict[str, object]:
    return {
        **dict(row.config),
        "shared_low": row.shared_low,
        "shared_high": row.shared_high,
        "registers": row.registers,
        "refused": row.refused.reason if row.refused is not None else None,
    }
