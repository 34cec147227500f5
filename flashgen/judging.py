"""Whether single options of a call are what they must be, and their form in Modifiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.errors import InputError

# An open side of a window; with lengths below it every sum of two such numbers is an int32.
UNLIMITED = 2**29
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def window_sides(value: object) -> tuple[Any, Any]:
    """(left, right) of a window as it was given, not judged but for being a pair; None is open on both sides."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InputError(f"window must be None or a pair (left, right), but got {value!r}.")
    return value[0], value[1]


def softcap(value: object) -> float | None:
    """The cap as a float."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 2.0**-60 <= value <= 2.0**60:
        raise InputError(f"softcap must be None or a number from {2.0**-60:.1e} to {2.0**60:.1e}, but got {value!r}.")
    return float(value)


def window(value: object, longest: int) -> tuple[int, int] | None:
    """Both sides as numbers; None where neither limits anything."""
    sides = window_sides(value)
    if sides == (None, None):
        return None
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise InputError(f"each side of window must be None or a number of keys from 0 on, but got {value!r}.")
    if longest >= UNLIMITED:
        raise InputError(f"window needs lengths below {UNLIMITED}, but got {longest}.")
    left, right = (UNLIMITED if side is None else min(side, UNLIMITED) for side in sides)
    return None if (left, right) == (UNLIMITED, UNLIMITED) else (left, right)


def floats(name: str, value: object, like: Tensor) -> Tensor | None:
    """A tensor of floating-point numbers on the call's device."""
    if value is None:
        return None
    allowed = (*FLOATS, torch.float64) if like.device.type == "cpu" else FLOATS
    check_tensor(name, value, like, allowed, "floating-point numbers")
    assert isinstance(value, Tensor)
    return value


def mask(value: object, sizes: tuple[int, ...], like: Tensor) -> Tensor | None:
    """A mask broadcast to the scores."""
    if value is None:
        return None
    check_tensor("mask", value, like, (torch.bool,), "bool; add numbers as bias")
    assert isinstance(value, Tensor)
    return broadcast("mask", value, sizes)


def segments(
    q: object, kv: object, q_shape: tuple[int, int], kv_shape: tuple[int, int], like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Both kinds of ids as int32."""
    if q is None and kv is None:
        return None, None
    found: list[Tensor] = []
    for name, value, shape in (("segment_ids_q", q, q_shape), ("segment_ids_kv", kv, kv_shape)):
        if value is None:
            raise InputError(f"segment_ids_q and segment_ids_kv must be given together, but {name} is None.")
        check_tensor(name, value, like, (torch.int32, torch.int64), "int32 or int64")
        assert isinstance(value, Tensor)
        if tuple(value.shape) != shape:
            raise InputError(f"{name} must be {list(shape)}, but got {tuple(value.shape)}.")
        found.append(value.to(torch.int32).contiguous())
    return found[0], found[1]


def check_tensor(name: str, value: object, like: Tensor, dtypes: tuple[torch.dtype, ...], words: str) -> None:
    """Refuse what is no tensor of these dtypes on the call's device; `words` say which they are."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be None or a torch.Tensor, but got {type(value).__name__}.")
    if value.dtype not in dtypes:
        raise InputError(f"{name} must hold {words}, but got {value.dtype}.")
    if value.device != like.device:
        raise InputError(f"{name} must be on q's device {like.device}, but got {value.device}. Move it there.")


def broadcast(name: str, value: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """A view of the shape [batch, heads, seq_q, seq_kv]."""
    shape = tuple(value.shape)
    padded = (1,) * (4 - len(shape)) + shape
    if len(shape) > 4 or any(size not in (1, wanted) for size, wanted in zip(padded, sizes, strict=True)):
        raise InputError(
            f"{name} must be broadcastable to [batch, heads, seq_q, seq_kv] = {list(sizes)}, but got {list(shape)}."
        )
    return value.expand(sizes)
