"""What flashgen is compared with: the same attention by torch and by packages of others, where they are installed."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen.api import attention
from flashgen.errors import UnsupportedError
from flashgen.modifiers import NOTHING, Options, modifiers_from
from flashgen.mods import KNOWN, Term, check_known, mask_mod, score_mod
from flashgen.reference import plain_attention

Forward = Callable[[], Tensor]
# Of q, k, v, whether causal, and what else the scores go through (flashgen.mods); raises where it cannot.
Peer = Callable[[Tensor, Tensor, Tensor, bool, Mapping[str, Any]], Forward]


def _flashgen(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Forward:
    given = _texts(options)

    def call() -> Tensor:
        o = attention(q, k, v, causal=causal, **given)
        assert isinstance(o, Tensor)
        return o

    return call


def _texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Expressions as `attention` takes them."""
    return {name: value.text if isinstance(value, Term) else value for name, value in options.items()}


def _sdpa(backend: SDPBackend, *known: str) -> Peer:
    """Of `known` at most one at a time, as SDPA's one mask."""

    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Forward:
        check_known(options, set(known))
        if len(options) + causal > 1:
            raise UnsupportedError("takes one of " + ", ".join(("causal", *known)))
        mask = next(iter(options.values()), None)
        grouped = q.shape[1] != k.shape[1]

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)

        return call

    return make


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    check_known(options, KNOWN - {"sinks"})
    # Beyond the limit torch.compile silently runs the unfused form.
    torch._dynamo.config.recompile_limit = 1000
    # Donated buffers allow one backward per forward; here one forward is differentiated many times.
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    score, seen, mask = score_mod(options), mask_mod(causal, options), None
    if seen is not None:
        # Only ids differ from sequence to sequence.
        batch = q.shape[0] if "segment_ids_q" in options else None
        mask = create_block_mask(seen, batch, None, q.shape[2], k.shape[2], device=str(q.device))
    grouped = q.shape[1] != k.shape[1]
    return lambda: compiled(q, k, v, score_mod=score, block_mask=mask, enable_gqa=grouped)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Forward:
    check_known(options, set(Options._fields))
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    modifiers = modifiers_from(sizes, q, Options(**_texts(options))) if options else NOTHING
    return lambda: plain_attention(q, k, v, causal="bottom_right" if causal else "none", modifiers=modifiers)[0]


def _package(known: Mapping[str, str], open_side: int | None, *modules: str) -> Peer:
    """flash_attn_func of the first of these modules that is installed; tensors in the layout that it wants.

    Args:
        known: its words for options.
        open_side: its word for a side of a window that ends nowhere.
    """

    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: Mapping[str, Any]) -> Forward:
        flash_attn_func = imported(*modules).flash_attn_func
        check_known(options, set(known))
        given = {known[name]: value for name, value in options.items()}
        if "window" in options:
            given[known["window"]] = tuple(open_side if side is None else side for side in options["window"])
        if "sinks" in options:
            given[known["sinks"]] = options["sinks"].to(q.dtype)
        check_known(given, set(inspect.signature(flash_attn_func).parameters))
        rows_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]

        def call() -> Tensor:
            o: Any = flash_attn_func(*rows_first, causal=causal, **given)
            first: Tensor = o[0] if isinstance(o, tuple) else o
            return first.transpose(1, 2)

        return call

    return make


def imported(*names: str) -> Any:
    """The first of these modules that is installed.

    Raises:
        RuntimeError: none is.
    """
    for name in names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise RuntimeError(f"not installed: {' or '.join(names)}")


PEERS: Mapping[str, Peer] = {
    "flashgen": _flashgen,
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, "bias", "mask"),
    "flex": _flex,
    "fa3": _package({"window": "window_size", "softcap": "softcap"}, -1, "fa3_fwd_interface", "flash_attn_interface"),
    "fa4": _package(
        {"window": "window_size", "softcap": "softcap", "sinks": "learnable_sink"},
        None,
        "flash_attn.cute",
    ),
    "plain": _plain,
}
# Packages of their own, which few machines have.
OPTIONAL = ("fa3", "fa4")
