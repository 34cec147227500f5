"""The kernels there are. One file per family; a new family is listed here and inherits every conformance test."""

from __future__ import annotations

from flashgen.errors import UnknownNameError, did_you_mean
from flashgen.families.family import Family, Variant
from flashgen.families.triton_fwd import TRITON_FWD

FAMILIES: dict[str, Family] = {family.name: family for family in (TRITON_FWD,)}


def family_named(name: str) -> Family:
    """Look up a family.

    Raises:
        UnknownNameError: no family has this name.
    """
    if name not in FAMILIES:
        raise UnknownNameError(f"no kernel family is called {name!r}. {did_you_mean(name, FAMILIES)}")
    return FAMILIES[name]


__all__ = ["FAMILIES", "Family", "Variant", "family_named"]
