"""Which of the tuned entries answers a request, and why the others do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flashgen.families import family_named
from flashgen.hardware import Gpu
from flashgen.problem import Bucket
from flashgen.records import Entry, Versions
from flashgen.spec import Spec


@dataclass(frozen=True)
class Found:
    """The entry that a look-up decided for.

    Attributes:
        path: the file that it stands in.
        how: tuned for this very bucket, or for the nearest one.
        stale: what has changed since it was tuned, as a sentence; None when nothing did or nobody asked.
    """

    entry: Entry
    path: Path
    how: Literal["exact", "nearest"]
    stale: str | None


@dataclass(frozen=True)
class Lookup:
    """The result of a look-up; `notes` say which files were read and why entries were passed over."""

    found: Found | None
    notes: list[str]


def choose(
    tuned: Sequence[tuple[Path, Entry]],
    spec: Spec,
    bucket: Bucket,
    gpu: Gpu,
    families: Collection[str] | None = None,
    current: Mapping[str, Versions] | None = None,
) -> Lookup:
    """Decide entry by entry: measured before estimated, exact bucket before nearest, earlier file, faster.

    Where none is for a spec with features, those for it with other expressions are asked, then those for less than it
    has, by what its family can do with them.

    Args:
        tuned: entries for this GPU with their files, first look-up first.
        bucket: outside the range of lengths that were tuned for this spec, nothing is found.
        families: only these; None for all.
        current: what runs now, by family, to say what has changed since an entry was tuned.
    """
    place = {path: index for index, path in enumerate(dict.fromkeys(path for path, _ in tuned))}
    notes: list[str] = []

    def rank(candidate: tuple[Path, Entry]) -> tuple[float, int, float]:
        path, entry = candidate
        return entry.bucket.distance(bucket), place[path], entry.us_per_score

    sought = [(spec.tuned_as.label, [each for each in tuned if each[1].spec.tuned_as == spec.tuned_as])]
    if spec.kind != spec.tuned_as:
        sought.append(("other expressions", [each for each in tuned if each[1].spec.kind == spec.kind]))
    for less in _with_less(spec):
        sought.append((less.label, [each for each in tuned if each[1].spec.tuned_as == less]))
    for label, same in sought:
        notes.append(f"{len(same)} of {len(tuned)} entries for {gpu.name} are for {label}.")
        usable = _usable(same, spec, gpu, families, notes)
        for method in ("measured", "estimated"):
            of_method = [(path, entry) for path, entry in usable if entry.method == method]
            if of_method and _covers([entry.bucket for _, entry in of_method], bucket):
                path, entry = min(of_method, key=rank)
                how: Literal["exact", "nearest"] = "exact" if entry.bucket == bucket else "nearest"
                stale = _changed(entry.versions, (current or {}).get(entry.family))
                return Lookup(Found(entry, path, how, stale), notes)
            if of_method:
                notes.append(f"{bucket.seq_q}x{bucket.seq_kv} lies outside the lengths of the {method} entries.")
    return Lookup(None, notes)


def _with_less(spec: Spec) -> list[Spec]:
    """What is asked in the place of a spec, in this order, up to the plain one."""
    found = [spec.plain.tuned_as]
    if spec.op == "decode":
        # What `flashgen tune` knows of a decode: it reads a cache, by as many rows of each sequence.
        reading = replace(spec, varlen=False, appended=False, descale="tensor")
        found = [reading, replace(spec.plain, paged=spec.paged, cache=spec.cache), *found]
    return [each for each in dict.fromkeys(found) if each != spec.tuned_as]


def _usable(
    tuned: Sequence[tuple[Path, Entry]],
    spec: Spec,
    gpu: Gpu,
    families: Collection[str] | None,
    notes: list[str],
) -> list[tuple[Path, Entry]]:
    """The entries whose families may and can run this spec with their configs; notes tell of the others."""
    usable = []
    for path, entry in tuned:
        if families is not None and entry.family not in families:
            notes.append(f"{path}: {entry.label} passed over: only {', '.join(families)} may be used.")
        elif rejection := family_named(entry.family).refuses(spec, entry.config, gpu):
            notes.append(f"{path}: {entry.label} passed over: {rejection.reason}.")
        else:
            usable.append((path, entry))
    return usable


def _covers(tuned: list[Bucket], bucket: Bucket) -> bool:
    seq_q, seq_kv = [each.seq_q for each in tuned], [each.seq_kv for each in tuned]
    return min(seq_q) <= bucket.seq_q <= max(seq_q) and min(seq_kv) <= bucket.seq_kv <= max(seq_kv)


def _changed(was: Versions, current: Versions | None) -> str | None:
    if current is None:
        return None
    pairs = (("template", was.template, current.template), ("triton", was.triton, current.triton))
    changed = [f"{name} went from {old} to {new}" for name, old, new in pairs if old != new]
    return f"Since it was tuned, {' and '.join(changed)}. Tune again." if changed else None
