"""Tables of comparisons of decodes, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.markup import escape
from rich.table import Table

from flashgen.benchmark import geometric_mean, kv_bytes
from flashgen.compare_decode import DecodeRow
from flashgen.problem import Problem
from flashgen.spec import Spec

What = Literal["graph", "eager", "memory"]
TITLES: dict[What, str] = {
    "graph": "In a CUDA graph: GB/s of keys and values, share of the read bandwidth (us)",
    "eager": "Eagerly: us from one call to the next",
    "memory": "Peak memory beyond the inputs, MB",
}


def decode_table(rows: Sequence[DecodeRow], what: What) -> Table:
    """One line per problem, one column per implementation.

    The last two columns are how much faster flashgen is in a graph than the best of the others, and than itself with
    pages.
    """
    names = list(dict.fromkeys(row.name for row in rows))
    table = Table(title=TITLES[what])
    last = ("vs best", "vs paged") if what == "graph" else ()
    for heading in ("spec", "heads", "batch x keys", "MB", *names, *last):
        table.add_column(heading, justify="left" if heading == "spec" else "right")
    for (spec, problem), found in _by_problem(rows).items():
        sizes = f"{problem.heads}/{problem.kv_heads}", f"{problem.batch} x {problem.seq_kv}"
        cells = [_cell(found[name], what) for name in names]
        ratios = ["" if each is None else f"{each:.3f}" for each in _ratios(found)] if last else []
        table.add_row(spec.slug, *sizes, f"{kv_bytes(spec, problem) / 1e6:.0f}", *cells, *ratios)
    return table


def _by_problem(rows: Sequence[DecodeRow]) -> dict[tuple[Spec, Problem], dict[str, DecodeRow]]:
    found: dict[tuple[Spec, Problem], dict[str, DecodeRow]] = {}
    for row in rows:
        found.setdefault((row.spec, row.problem), {})[row.name] = row
    return found


def _cell(row: DecodeRow, what: What) -> str:
    if row.measurement is None or row.gbs is None or row.share is None or row.extra_bytes is None:
        return escape(row.failure or "failed")
    if what == "memory":
        return f"{row.extra_bytes / 1e6:.1f}"
    if what == "eager":
        return f"{row.measurement.eager_us or 0.0:.1f}"
    return f"{row.gbs:.0f} {100 * row.share:.1f} % ({row.measurement.median_us:.1f})"


def _ratios(found: dict[str, DecodeRow]) -> tuple[float | None, float | None]:
    """Times of the best of the others and of pages, by that of flashgen."""
    us = {name: row.measurement.median_us for name, row in found.items() if row.measurement is not None}
    own, paged = us.pop("flashgen", None), us.pop("paged", None)
    if own is None:
        return None, None
    return min(us.values()) / own if us else None, None if paged is None else paged / own


def decode_summary(rows: Sequence[DecodeRow]) -> list[str]:
    """Over all problems: the geometric means and extremes of those ratios, and how many caches were read in turns."""
    both = [_ratios(found) for found in _by_problem(rows).values()]
    lines = []
    for what, values in (
        ("best other / flashgen", [best for best, _ in both]),
        ("paged / flashgen", [p for _, p in both]),
    ):
        known = [value for value in values if value is not None]
        if known:
            lines.append(f"{what}: {geometric_mean(known):.3f} in the mean, {min(known):.3f} to {max(known):.3f}")
    caches = ", ".join(str(next(iter(found.values())).caches) for found in _by_problem(rows).values())
    return [*lines, f"caches read in turns, so that L2 has none of what is read next: {caches}"]
