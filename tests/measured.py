"""Kernels measured on an H200, of `triton_fwd` all there are: for the tests of the model and of the search."""

from __future__ import annotations

import functools
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.resources import Resources
from flashgen.space import Config
from flashgen.spec import Spec

DATA = Path(__file__).parent / "data"
H200 = Gpu.named("h200")


@dataclass(frozen=True)
class Kernel:
    """One measured config: what it compiled to and its median in microseconds at each of the problems."""

    config: Config
    resources: tuple[Resources, ...]
    us: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """All kernels of one spec that compile, do not spill much and are accurate."""

    spec: Spec
    problems: tuple[Problem, ...]
    kernels: tuple[Kernel, ...]


def _measured(record: dict[str, Any]) -> Measured:
    kernels = tuple(
        Kernel(
            Config(**kernel["config"]),
            tuple(Resources(**used) for used in _listed(kernel["resources"])),
            tuple(median for median, _, _ in kernel["times"]),
        )
        for kernel in record["candidates"]
    )
    return Measured(Spec(**record["spec"]), tuple(Problem(**sizes) for sizes in record["problems"]), kernels)


def _listed(resources: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Families of one kernel are recorded without a list."""
    return resources if isinstance(resources, list) else [resources]


@functools.cache
def measured(family: str = "triton_fwd") -> dict[str, Measured]:
    """The records by the spec's slug: head_dim 64, 96, 128 and 256 with and without a causal mask, in bf16.

    Of `triton_bwd`, fp16 as well, and of some specs hardly any.
    """
    records = json.loads(gzip.decompress((DATA / f"h200_{family}.json.gz").read_bytes()))
    return {one.spec.slug: one for one in map(_measured, records["specs"])}
