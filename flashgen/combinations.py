"""Which features go together: every pair, asked of the rules that a call is judged by; and the table of README.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, get_args

from flashgen.errors import InputError, UnsupportedError
from flashgen.features import FEATURES
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.select import select
from flashgen.spec import ELEMENT_BYTES, MAX_HEAD_DIM, Causal, Op, Spec

# A GPU on which every family runs, and sizes of no concern.
GPU, PROBLEM = "h200", Problem(1, 1, 1, 1024, 1024)
# Of features that are not just there or not.
VALUES = {"bias": "fp32", "score_mod": "(score + (q_idx - kv_idx))", "mask_mod": "((kv_idx <= q_idx) | (kv_idx < 8))"}
# A decode goes with some features, and with all of them at once (flashgen.coherence).
OPS: tuple[Op, ...] = ("forward", "backward")


def traits() -> dict[str, dict[str, Any]]:
    """What a spec may be beyond the plainest one, by name: fields of Spec."""
    found: dict[str, dict[str, Any]] = {
        f"causal {kind}": {"causal": kind} for kind in get_args(Causal) if kind != "none"
    }
    found |= {name: {name: VALUES.get(name, True)} for name in FEATURES}
    found |= {dtype: {"dtype": dtype} for dtype, size in ELEMENT_BYTES.items() if size == 1}
    return found | {f"head_dim {MAX_HEAD_DIM}": {"head_dim": MAX_HEAD_DIM, "head_dim_v": MAX_HEAD_DIM}}


def pairs() -> Iterator[tuple[str, str]]:
    """All pairs of names, but for those of one field, of which a call has one value."""
    every = traits()
    for first, second in itertools.combinations(every, 2):
        if not set(every[first]) & set(every[second]):
            yield first, second


def together(first: str, second: str, op: Op = "forward", **others: Any) -> Spec:
    """The spec that is both; `others` are more of its fields.

    Raises:
        InputError: they do not go together.
    """
    every = traits()
    spec = Spec(**{**others, **every[first], **every[second]})
    return spec if op == "forward" else spec.backward


def refusal(first: str, second: str, op: Op) -> str | None:
    """Why no kernel does both, as a call would be told, or None: the rule alone, without the values that it got."""
    try:
        select(together(first, second, op), PROBLEM, Gpu.named(GPU))
    except (InputError, UnsupportedError) as error:
        return str(error).partition(", but got")[0]
    return None


def allowed(op: Op) -> list[tuple[str, str]]:
    """The pairs that are computed."""
    return [pair for pair in pairs() if refusal(*pair, op) is None]


def table() -> str:
    """Markdown: a line for each feature, a column for each one before it; what is refused has a numbered reason."""
    names = list(traits())
    reasons: list[str] = []

    def cell(row: str, column: str) -> str:
        pair = (column, row)
        if pair not in known:
            return ""
        refused = {op: reason for op in OPS if (reason := refusal(*pair, op)) is not None}
        for reason in refused.values():
            if reason not in reasons:
                reasons.append(reason)
        if not refused:
            return "yes"
        numbers = ", ".join(str(reasons.index(reason) + 1) for reason in dict.fromkeys(refused.values()))
        return f"no ({numbers})" if "forward" in refused else f"forward ({numbers})"

    known = set(pairs())
    lines = [["", *names[:-1]], ["---"] * len(names)]
    lines += [[row, *(cell(row, column) for column in names[:place])] for place, row in enumerate(names) if place]
    text = [f"| {' | '.join([*line, *[''] * (len(names) - len(line))])} |" for line in lines]
    notes = [f"{number}. {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join([*text, *(["", *notes] if notes else [])])
