"""Which fields of a Spec go together."""

from __future__ import annotations

from typing import Any

from flashgen.errors import InputError
from flashgen.features import EXPRESSIONS, SERVED
from flashgen.tiles import MAX_TILE_WIDTH


def check_coherent(spec: Any) -> None:
    """Judge a flashgen.spec.Spec, every field of which is fine by itself.

    Raises:
        InputError: fields that do not go together.
    """
    _check_serving(spec)
    _check_fp8(spec)
    if spec.op == "backward" and spec.sinks:
        raise InputError("sinks=True is for op='forward': a backward finds the sinks in the log-sum-exp.")
    if spec.varlen and {"bias", "mask", "segments", *EXPRESSIONS}.intersection(spec.features):
        raise InputError(f"varlen=True goes with no bias, mask, segments or mods, but got {', '.join(spec.features)}.")
    if spec.precision == "tf32" and spec.dtype != "fp32":
        raise InputError(f"precision='tf32' is for fp32 inputs, but got dtype={spec.dtype!r}.")


def _check_fp8(spec: Any) -> None:
    if spec.op == "backward" and spec.dtype == "fp8":
        raise InputError("there is no backward of fp8 inputs, but got op='backward'. Pass 16 bits.")
    if spec.wide and spec.dtype == "fp8":
        raise InputError(
            f"fp8 inputs have heads of at most {MAX_TILE_WIDTH}, but got head_dim={spec.head_dim}, "
            f"head_dim_v={spec.head_dim_v}. Pass wider ones in 16 bits."
        )
    if (
        spec.op != "decode"
        and spec.descale != "tensor"
        and (spec.dtype != "fp8" or (spec.varlen and spec.descale == "block"))
    ):
        raise InputError(
            f"descale={spec.descale!r} is for fp8 inputs, and blocks for those that are not varlen, but got "
            f"dtype={spec.dtype!r}, varlen={spec.varlen}."
        )


def _check_serving(spec: Any) -> None:
    """Of what has to do with caches."""
    if spec.op != "decode":
        own = [*spec.serving, *(["descale='token'"] if spec.descale == "token" else [])]
        if own:
            raise InputError(f"{', '.join(own)} is for op='decode', but got op={spec.op!r}.")
        return
    refused = [name for name in spec.features if name not in SERVED]
    if refused:
        raise InputError(f"op='decode' goes with {', '.join(SERVED)}, but got {', '.join(refused)}.")
    if spec.dtype == "fp8":
        raise InputError("op='decode' takes q in 16 or 32 bits, but got dtype='fp8'. Say cache='fp8' of such a cache.")
    if spec.causal == "top_left":
        raise InputError("op='decode' has its rows at the end of the keys, but got causal='top_left'.")
    if spec.cache != "none" and spec.wide:
        raise InputError(
            f"caches of 8 bits have heads of at most {MAX_TILE_WIDTH}, but got head_dim={spec.head_dim}, "
            f"head_dim_v={spec.head_dim_v}. Keep wider ones in 16 bits."
        )
    allowed = ("tensor",) if spec.cache == "none" else ("tensor", "head", "token")
    if spec.descale not in allowed:
        raise InputError(
            f"descale must be {' or '.join(allowed)} where op='decode' has cache={spec.cache!r}, but got "
            f"{spec.descale!r}."
        )
