"""What the scores of a comparison go through: options of `attention`, and the same as functions of two places.

Such functions are what FlexAttention takes (Dong et al. 2024): score_mod(score, b, h, q_idx, kv_idx) and mask_mod(b, h,
q_idx, kv_idx), true where seen. Of tensors of indices they are also the truth that results are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.errors import InputError, UnsupportedError
from flashgen.problem import Problem
from flashgen.spec import Spec

Function = Callable[..., Tensor]


class Term(NamedTuple):
    """One expression: as `attention` takes it, and as a function of tensors."""

    text: str
    function: Function


@dataclass(frozen=True)
class Mod:
    """One row of a table of modifications.

    Attributes:
        name: what the table calls it.
        causal: whether a row sees no key behind its own.
        features: of features.FEATURES, with values of the usual sizes (flashgen.benchmark.usual_options).
        terms: `score_mod` and `mask_mod` where it is none of them.
    """

    name: str
    causal: bool = False
    features: tuple[str, ...] = ()
    terms: Mapping[str, Term] | None = None

    def spec(self, plain: Spec) -> Spec:
        """What of it a Spec can say."""
        flags: dict[str, Any] = {name: plain.dtype if name == "bias" else True for name in self.features}
        return replace(plain, causal="bottom_right" if self.causal else "none", **flags)


# FlexAttention's usual eight.
MODS = (
    Mod("noop"),
    Mod("causal", causal=True),
    Mod("ALiBi", causal=True, features=("alibi",)),
    Mod("sliding window", causal=True, features=("window",)),
    Mod(
        "prefix-LM",
        terms={
            "mask_mod": Term(
                "(kv_idx <= q_idx) | (kv_idx < 256)", lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx < 256)
            )
        },
    ),
    Mod("softcap", causal=True, features=("softcap",)),
    Mod("documents", causal=True, features=("segments",)),
    Mod(
        "relative bias",
        terms={
            "score_mod": Term("score + (q_idx - kv_idx)", lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx))
        },
    ),
)

_SCORING = {"softcap", "alibi_slopes", "bias", "score_mod"}
_SEEING = {"window", "mask", "segment_ids_q", "segment_ids_kv", "mask_mod"}
KNOWN = _SCORING | _SEEING | {"sinks"}


def check_known(options: Mapping[str, Any], known: set[str]) -> None:
    """Refuse what an implementation has no word for.

    Raises:
        UnsupportedError: an option is not known.
    """
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UnsupportedError(f"takes no {', '.join(unknown)}")


def score_mod(options: Mapping[str, Any]) -> Function | None:
    """Of options of the usual shapes: slopes [heads], bias [seq_q, seq_kv]; seq_q equals seq_kv."""
    if not _SCORING.intersection(options):
        return None
    softcap, slopes, bias, term = (options.get(name) for name in ("softcap", "alibi_slopes", "bias", "score_mod"))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * (q_idx - kv_idx).abs()
        if bias is not None:
            score = score + bias[q_idx, kv_idx]
        return score if term is None else term.function(score, b, h, q_idx, kv_idx)

    return score_mod


def mask_mod(causal: bool, options: Mapping[str, Any]) -> Function | None:
    """Of options of the usual shapes: mask [seq_q, seq_kv], ids [batch, seq]; None where all is seen."""
    parts = list(_hiding(causal, options))
    if not parts:
        return None

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = parts[0](b, h, q_idx, kv_idx)
        for part in parts[1:]:
            seen = seen & part(b, h, q_idx, kv_idx)
        return seen

    return mask_mod


def _hiding(causal: bool, options: Mapping[str, Any]) -> Iterator[Function]:
    """What hides pairs, each by itself."""
    if causal:
        yield lambda b, h, q_idx, kv_idx: kv_idx <= q_idx
    if "window" in options:
        left, right = options["window"]
        yield lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)
    if "mask" in options:
        mask = options["mask"]
        yield lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]
    if "segment_ids_q" in options:
        ids_q, ids_kv = options["segment_ids_q"], options["segment_ids_kv"]
        yield lambda b, h, q_idx, kv_idx: ids_q[b, q_idx] == ids_kv[b, kv_idx]
    if "mask_mod" in options:
        yield options["mask_mod"].function


def visible_pairs(problem: Problem, seen: Function | None, device: str, rows: int = 256) -> int:
    """How many pairs of row and key are seen, over the batch and all heads: counted one by one, `rows` at a time."""
    every = problem.batch * problem.heads * problem.seq_q * problem.seq_kv
    if seen is None or not every:
        return every
    b, h = torch.arange(problem.batch, device=device), torch.arange(problem.heads, device=device)
    places, keys = torch.arange(problem.seq_q, device=device), torch.arange(problem.seq_kv, device=device)
    count = 0
    for some in torch.split(places, rows):
        found = seen(b[:, None, None, None], h[:, None, None], some[:, None], keys)
        # What does not depend on batch or head stands for all of them.
        count += int(found.sum()) * (problem.batch * problem.heads * len(some) * len(keys) // found.numel())
    return count


def check_comparable(options: Mapping[str, Any]) -> None:
    """Refuse options for which nothing here says what is right.

    Raises:
        UnsupportedError: there is one.
    """
    unknown = [name for name in options if name not in KNOWN]
    if unknown:
        raise UnsupportedError(f"comparisons know of no {', '.join(unknown)}: leave it out.")


def check_places(spec: Spec, problem: Problem, mod: Mod | None) -> None:
    """Refuse lengths whose diagonals implementations draw in other places.

    Raises:
        InputError: seq_q and seq_kv differ.
    """
    if (spec.causal != "none" or spec.features or mod is not None) and problem.seq_q != problem.seq_kv:
        raise InputError(
            f"causal peers agree only when seq_q equals seq_kv, but got {problem.seq_q}, {problem.seq_kv}."
        )
