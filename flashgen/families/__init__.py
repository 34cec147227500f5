"""The kernels there are. One file per family; a new family is listed here and inherits every conformance test."""

from __future__ import annotations

from flashgen.errors import UnknownNameError, did_you_mean
from flashgen.families.family import Family, Variant
from flashgen.families.hopper_bwd import HOPPER_BWD
from flashgen.families.hopper_bwd_fused import HOPPER_BWD_FUSED
from flashgen.families.hopper_fwd import HOPPER_FWD
from flashgen.families.triton_bwd import TRITON_BWD
from flashgen.families.triton_decode import TRITON_DECODE
from flashgen.families.triton_fwd import TRITON_FWD
from flashgen.spec import Op

FAMILIES: dict[str, Family] = {
    family.name: family for family in (HOPPER_FWD, TRITON_FWD, HOPPER_BWD_FUSED, HOPPER_BWD, TRITON_BWD, TRITON_DECODE)
}


def families_of(op: Op) -> tuple[Family, ...]:
    """The families that compute this, in the order in which defaults are looked for."""
    return tuple(family for family in FAMILIES.values() if family.op == op)


def family_named(name: str) -> Family:
    """Look up a family.

    Raises:
        UnknownNameError: no family has this name.
    """
    if name not in FAMILIES:
        raise UnknownNameError(f"no kernel family is called {name!r}. {did_you_mean(name, FAMILIES)}")
    return FAMILIES[name]


__all__ = ["FAMILIES", "Family", "Variant", "families_of", "family_named"]
