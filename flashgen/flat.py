"""Options in the flat form in which operators take them."""

from __future__ import annotations

import itertools
from typing import Any

from flashgen.expressions.given import MAX_TENSORS
from flashgen.judging import window_sides
from flashgen.modifiers import Options

# Where the options begin among the arguments of either operator, and the ranks of those that have a batch.
FORWARD_OPTIONS, BACKWARD_OPTIONS = 8, 10
RANKS = {"alibi_slopes": 2, "bias": 4, "mask": 4, "segment_ids_q": 2, "segment_ids_kv": 2}
# A list of tensors would be beyond torch's older vmap, by which it batches gradients.
MODS = tuple(f"mod{index}" for index in range(MAX_TENSORS))
FLAT = (
    "softcap", "alibi_slopes", "bias", "window_left", "window_right", "mask", "segment_ids_q", "segment_ids_kv",
    "dropout_p", "dropout_seed", "score_mod", "mask_mod", *MODS, "sinks",
)  # fmt: skip
TENSORS = (*RANKS, "dropout_seed", *MODS, "sinks")
# What of a call depends on the place in its own batch.
OWN = tuple(FLAT.index(name) for name in ("dropout_seed", "score_mod", "mask_mod"))


def flat(options: Options) -> tuple[Any, ...]:
    """Options as the operators take them, the window as two numbers."""
    known = options._asdict() | dict(zip(("window_left", "window_right"), window_sides(options.window), strict=True))
    known |= itertools.zip_longest(MODS, options.mod_tensors)
    return tuple(known[name] for name in FLAT)


def options_from(*given: Any) -> Options:
    """Back from `flat`, of which the sinks may be left out."""
    known = dict(zip(FLAT, given, strict=False))
    window = known.pop("window_left"), known.pop("window_right")
    tables = [known.pop(name) for name in MODS]
    return Options(window=window, mod_tensors=[each for each in tables if each is not None], **known)
