"""Which variant serves a call: one tuned for it, one tuned without its features, the family's default; and why."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

import torch

from flashgen.errors import UnsupportedError
from flashgen.families import Family, Variant, families_of, family_named
from flashgen.features import EXPRESSIONS
from flashgen.hardware import Gpu
from flashgen.problem import Bucket, Problem
from flashgen.records import Versions
from flashgen.render import template_hash
from flashgen.spec import Spec
from flashgen.store import lookup
from flashgen.version import VERSION


@dataclass(frozen=True)
class Selection:
    """A variant and how it was chosen.

    Attributes:
        variant: what will be launched.
        gpu, bucket: what it was chosen for.
        method: "measured" or "estimated" when tuned, be it without the spec's features; "default" when nobody tuned.
        source: the file that the winner came from.
        why: one sentence.
        notes: what else was considered, and why it was passed over.
    """

    variant: Variant
    gpu: Gpu
    bucket: Bucket
    method: Literal["measured", "estimated", "default"]
    source: str | None
    why: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.variant.slug} on {self.gpu.label} ({self.gpu.arch})",
            f"  chosen: {self.method}: {self.why}",
            f"  source: {self.source or 'built into the family'}",
            *(f"  note:   {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def select(
    spec: Spec,
    problem: Problem,
    gpu: Gpu,
    family: str | None = None,
    *,
    read_files: bool = True,
    aligned: bool = True,
) -> Selection:
    """Choose the variant for one call; remembered per bucket.

    Args:
        spec: what to compute.
        problem: the call's sizes; only its bucket matters.
        gpu: where it will run.
        family: only this family, or an error.
        read_files: whether tuned files may be consulted if they were not already.
        aligned: whether all rows start on 16-byte boundaries, by positive strides.

    Raises:
        UnknownNameError: no such family.
        UnsupportedError: no family can run this spec on this GPU; the message lists why.
    """
    key = (spec, problem.bucket, gpu, family, aligned)
    if not read_files and key not in _selected:
        note = "tuned files are not read while a CUDA graph is captured"
        return _default(spec, problem.bucket, gpu, _candidates(spec, family, aligned), (note,))
    if key not in _selected:
        _selected[key] = _select(*key)
    return _selected[key]


def current_versions(family: str, driver: str | None = None) -> Versions:
    """What a result of this family is made with, here and now."""
    triton = importlib.metadata.version("triton")
    return Versions(VERSION, triton, torch.__version__, driver, template_hash(family))


_selected: dict[tuple[Spec, Bucket, Gpu, str | None, bool], Selection] = {}


def forget_selections() -> None:
    """Look into the tuned files again on the next call."""
    _selected.clear()


def give_up(selection: Selection, spec: Spec, family: str | None, reason: str, *, aligned: bool = True) -> Selection:
    """Replace a tuned variant that this machine cannot compile or load by the default, for later calls as well."""
    notes = (f"{selection.variant.slug} from {selection.source} does not work here: {reason}", *selection.notes)
    fallback = _default(spec, selection.bucket, selection.gpu, _candidates(spec, family, aligned), notes)
    _selected[spec, selection.bucket, selection.gpu, family, aligned] = fallback
    return fallback


def _candidates(spec: Spec, family: str | None, aligned: bool) -> list[Family]:
    if family is None:
        return [each for each in families_of(spec.op) if aligned or not each.aligned]
    named = family_named(family)
    if named.op != spec.op:
        raise UnsupportedError(f"family {named.name!r} computes op={named.op!r}, but {spec.op!r} is needed.")
    if named.aligned and not aligned:
        raise UnsupportedError(
            f"family {named.name!r} needs rows that start on 16-byte boundaries, by positive strides. Copy the tensors "
            "with contiguous(), or leave family out."
        )
    return [named]


def _select(spec: Spec, bucket: Bucket, gpu: Gpu, family: str | None, aligned: bool) -> Selection:
    candidates = _candidates(spec, family, aligned)
    names = [candidate.name for candidate in candidates]
    found = lookup(spec, bucket, gpu, families=names, current={name: current_versions(name) for name in names})
    if found.found is None:
        return _default(spec, bucket, gpu, candidates, tuple(found.notes))
    entry = found.found.entry
    tuned_for = f"seq_q {entry.bucket.seq_q}, seq_kv {entry.bucket.seq_kv}"
    how = "exactly this bucket" if found.found.how == "exact" else "the nearest tuned bucket"
    stale = (found.found.stale,) if found.found.stale else ()
    why = f"{how} ({tuned_for}), {entry.time.median_us:.1f} us {entry.method}"
    if entry.spec.tuned_as != spec.tuned_as:
        # Its time is that of another kernel.
        had = (*entry.spec.features, *entry.spec.serving)
        lacks = [name for name in (*spec.features, *spec.serving) if name not in had]
        lacks += [f"descales of each {spec.descale}"] * (spec.descale != entry.spec.descale)
        other = f"without its {' and '.join(lacks)}" if lacks else "with other expressions"
        why = f"{how} ({tuned_for}), tuned for {entry.spec.label}, {other}"
    return Selection(
        variant=Variant(family_named(entry.family), spec, entry.config),
        gpu=gpu,
        bucket=bucket,
        method=entry.method,
        source=str(found.found.path),
        why=why,
        notes=(*stale, *found.notes),
    )


def _default(spec: Spec, bucket: Bucket, gpu: Gpu, candidates: list[Family], notes: tuple[str, ...]) -> Selection:
    refusals: list[str] = []
    op = ("" if spec.op == "forward" else f" --op {spec.op}") + (" --dtype fp8" if spec.dtype == "fp8" else "")
    if spec.op == "decode":
        op += " --causal false" * (spec.causal == "none") + " --page-size 64" * spec.paged
        op += f" --cache {spec.cache}" if spec.cache != "none" else ""
    features = [name for name in spec.features if name not in ("varlen", *EXPRESSIONS)]
    also = f" --with {','.join(features)}" if features else ""
    # Expressions that read tensors cannot be written on a command line.
    mods = [name for name in EXPRESSIONS if name in spec.features and not spec.tensors]
    also += "".join(f" --{name.replace('_', '-')} '{getattr(spec, name)}'" for name in mods)
    width = (
        f"{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"{spec.head_dim} --head-dim-v {spec.head_dim_v}"
    )
    hint = f"run `flashgen tune --gpu auto --head-dim {width}{op}{also}` there"
    for candidate in sorted(candidates, key=lambda each: each.least_pairs > bucket.seq_q * bucket.seq_kv):
        config = candidate.default(spec, gpu)
        rejection = candidate.refuses(spec, config, gpu)
        if rejection is None:
            return Selection(
                variant=Variant(candidate, spec, config),
                gpu=gpu,
                bucket=bucket,
                method="default",
                source=None,
                why=f"nobody tuned {spec.label} for this bucket of {gpu.name}; {hint}",
                notes=(*notes, *refusals),
            )
        refusals.append(f"{candidate.name}: {rejection.reason}")
    raise UnsupportedError(
        f"no kernel computes {spec.label} on {gpu.label} ({gpu.arch}): {'; '.join(refusals) or 'no family does'}."
    )
