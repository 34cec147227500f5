"""Comparisons on this machine's GPU: every modification, whoever has it, is right and has a time."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import flashgen
from flashgen.cli.options import TUNABLE
from flashgen.compare import compare
from flashgen.mods import MODS, Mod
from flashgen.problem import Problem
from flashgen.spec import Spec

PLAIN = Spec(head_dim=64, head_dim_v=64)
PROBLEM = Problem(2, 4, 2, 1152, 1152)


@pytest.mark.parametrize("work", ["forward", "backward"])
@pytest.mark.parametrize("mod", MODS, ids=[mod.name for mod in MODS])
def test_every_modification(mod: Mod, work: Any) -> None:
    flashgen_row, flex = compare(mod.spec(PLAIN), PROBLEM, ("flashgen", "flex"), 2, work, mod)
    assert flex.failure is None and flex.measurement is not None
    for name in mod.terms or {}:
        if name not in inspect.signature(flashgen.attention).parameters:
            assert flashgen_row.failure == f"takes no {name}"
            return
    assert flashgen_row.failure is None and flashgen_row.measurement is not None
    assert flashgen_row.flops == flex.flops > 0


# Random numbers are one's own.
@pytest.mark.parametrize("feature", [name for name in TUNABLE if name != "dropout"])
def test_every_feature(feature: str) -> None:
    """Others may lack it, but nobody computes something else."""
    flags: dict[str, Any] = {feature: "bf16" if feature == "bias" else True}
    names = ("flashgen", "flex", "cudnn", "fa2", "plain")
    rows = compare(Spec(head_dim=64, head_dim_v=64, **flags), PROBLEM, names, 1, "training")
    assert rows[0].failure is None and rows[0].measurement is not None
    assert not [row for row in rows if row.failure is not None and row.failure.startswith("wrong")]
