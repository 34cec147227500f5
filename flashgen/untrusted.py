"""Values that a file holds: what they must be, or InputError that names them."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from flashgen.errors import InputError, did_you_mean

# Aliases can make a small file's list enormous to print.
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxother = 2, 120
shown = _BRIEF.repr


def mapping(
    what: str, value: object, required: Collection[str] | None = None, optional: Collection[str] = ()
) -> Mapping[str, object]:
    """`value` as a mapping with exactly these keys (`required=None`: with any), else InputError."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{what} must be a mapping with names as keys, but got {shown(value)}.")
    if required is not None:
        for key in value:
            if key not in (known := [*required, *optional]):
                raise InputError(f"unknown key {shown(key)} in {what}. {did_you_mean(key, known)}")
        for key in required:
            if key not in value:
                raise InputError(f"key {key!r} is missing in {what}.")
    return value


def scalar(what: str, value: object) -> Any:
    """A single value, for the class that takes it to judge and to print."""
    if not isinstance(value, (str, int, float, type(None))):
        raise InputError(f"{what} must be a single value, but got {shown(value)}.")
    return value


def text(what: str, value: object) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise InputError(f"{what} must be a string, but got {shown(value)}. Put it in quotes.")
    return value


def count(what: str, value: object, low: int = 0) -> int:
    """A whole number from `low` on."""
    if type(value) is not int or not low <= value <= 2**31:
        raise InputError(f"{what} must be a whole number from {low} to {2**31}, but got {shown(value)}.")
    return value


def check_number(what: str, value: object, low: float = 0) -> None:
    """Refuse what is no number from `low` on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= 1e15:
        raise InputError(f"{what} must be a number from {low} to 1e15, but got {shown(value)}.")
