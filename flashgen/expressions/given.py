"""A caller's expressions and the tensors that they read, judged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashgen.errors import InputError
from flashgen.expressions.derive import derivative
from flashgen.expressions.nodes import Node
from flashgen.expressions.parse import canonical, captured, function_of, parse
from flashgen.expressions.typed import check_mask, check_score, typed

# Each is an argument of the operators.
MAX_TENSORS = 4
TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int32: "int32", torch.int64: "int64", torch.bool: "bool",
}  # fmt: skip


def written(
    score_mod: object, mask_mod: object, mod_tensors: object
) -> tuple[str | None, str | None, tuple[Tensor, ...]]:
    """Canonical texts of both and the tensors in their order.

    Raises:
        InputError: they are not what `flashgen.attention` says.
    """
    if mod_tensors is not None and not isinstance(mod_tensors, Mapping):
        raise InputError(
            f"mod_tensors must be a dict of names and tensors, but got {type(mod_tensors).__name__}. The names are "
            "what expressions call them."
        )
    given: Mapping[str, Tensor] = mod_tensors or {}
    if not all(isinstance(name, str) for name in given):
        raise InputError(f"names of mod_tensors must be text, but got {list(given)}.")
    if given and score_mod is None and mask_mod is None:
        raise InputError("mod_tensors are read by score_mod and mask_mod, neither of which is given.")
    if len(given) > MAX_TENSORS:
        raise InputError(f"mod_tensors may be {MAX_TENSORS}, but got {len(given)}: {', '.join(given)}. Stack some.")
    texts = _texts(score_mod, mask_mod, tuple(given), torch.compiler.is_compiling())
    return *texts, tuple(given.values())


def _texts(score_mod: object, mask_mod: object, names: tuple[str, ...], traced: bool) -> tuple[str | None, str | None]:
    return _text(score_mod, names, True, traced), _text(mask_mod, names, False, traced)


# What expressions mean is known before a call is traced: torch.compiler.assume_constant_result, which would import all
# of torch.compile here.
_texts._dynamo_marked_constant = True  # type: ignore[attr-defined]

# Functions are read once, and again when a number that they capture is another.
_known: dict[tuple[object, ...], str] = {}


def _text(source: object, names: tuple[str, ...], scored: bool, traced: bool) -> str | None:
    if source is None:
        return None
    parts = source if isinstance(source, tuple) else (source,)
    numbers = [_numbers(each) for each in parts]
    if traced and any(numbers):
        names_captured = ", ".join(name for each in numbers for name, *_ in each)
        raise InputError(
            f"torch.compile does not see when {names_captured} changes, which "
            f"{'score_mod' if scored else 'mask_mod'} captures: give the expression as text, or numbers as mod_tensors."
        )
    codes = [each if isinstance(each, str) else getattr(function_of(each), "__code__", None) for each in parts]
    key = (*codes, isinstance(source, tuple), names, scored, *numbers)
    if None in codes or key not in _known:
        text = canonical(source, names, scored)
        if len(_known) >= 256:
            _known.clear()
        _known[key] = text
    return _known[key]


def _numbers(source: object) -> tuple[tuple[str, type, object], ...]:
    """Numbers that a function captures: name, type and value."""
    function = function_of(source)
    if not inspect.isfunction(function):
        return ()
    values = ((name, getattr(value, "value", value)) for name, value in captured(function).items())
    return tuple((name, type(value), value) for name, value in values if type(value) in (bool, int, float))


def types_of(tensors: Sequence[Tensor]) -> tuple[tuple[str, int], ...]:
    """(type, rank) of each, as specs name them."""
    return tuple((TYPES[each.dtype], each.dim()) for each in tensors)


def judge(
    score_mod: str | None, mask_mod: str | None, tensors: Sequence[object], device: torch.device
) -> tuple[Tensor, ...]:
    """The tensors as kernels read them, contiguous, if the canonical expressions fit them.

    Raises:
        InputError: a tensor is none, elsewhere, empty, too large, of another type or rank; or an expression is wrong.
    """
    found: list[Tensor] = []
    for each in tensors:
        if not isinstance(each, Tensor) or each.dtype not in TYPES or each.dim() == 0:
            what = f"{each.dtype} {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise InputError(
                f"mod_tensors must be tensors of one dimension or more, of {', '.join(TYPES.values())}, but got {what}."
            )
        if each.device != device:
            raise InputError(f"mod_tensors must be on q's device {device}, but got {each.device}. Move them there.")
        if not 1 <= each.numel() < 2**31:
            raise InputError(f"mod_tensors must have from 1 to 2**31 - 1 elements, but got {list(each.shape)}.")
        found.append(each.contiguous())
    types = types_of(found)
    if score_mod is not None:
        score_of(score_mod, types)
    if mask_mod is not None:
        mask_of(mask_mod, types)
    return tuple(found)


@functools.lru_cache(maxsize=256)
def score_of(text: str, types: tuple[tuple[str, int], ...]) -> Node:
    """A canonical score_mod, typed."""
    return check_score(text, typed(parse(text, True), types), types)


@functools.lru_cache(maxsize=256)
def derivative_of(text: str, types: tuple[tuple[str, int], ...]) -> Node:
    """Its derivative by the score."""
    return derivative(score_of(text, types))


@functools.lru_cache(maxsize=256)
def mask_of(text: str, types: tuple[tuple[str, int], ...]) -> Node:
    """A canonical mask_mod, typed."""
    return check_mask(text, typed(parse(text, False), types), types)
