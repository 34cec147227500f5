"""What a decode is compared with: the same rows over the same cache, by flashgen, torch and packages of others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen.errors import UnsupportedError
from flashgen.kvcache_api import attention_kvcache
from flashgen.peers import imported


class Cached(NamedTuple):
    """One call: rows at the end of sequences that fill their cache.

    Attributes:
        q: [batch, seq_q, heads, head_dim].
        k, v: the cache, [batch, seq_kv, kv_heads, width].
        lengths: int32 [batch]; of every sequence seq_kv.
        pages: the same keys and values in pages, [pages, page_size, kv_heads, width] each, and their table, int32
            [batch, pages of a sequence]; None where pages are not of concern.
        causal: whether a row sees nothing behind its own key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    pages: tuple[Tensor, Tensor, Tensor] | None
    causal: bool


# Returns what computes [batch, seq_q, heads, head_dim_v]; raises where it cannot.
DecodePeer = Callable[[Cached], Callable[[], Tensor]]


def _flashgen(call: Cached) -> Callable[[], Tensor]:
    return _attending(call, call.k, call.v, None)


def _paged(call: Cached) -> Callable[[], Tensor]:
    if call.pages is None:
        raise UnsupportedError("pass --page-size")
    return _attending(call, *call.pages)


def _attending(call: Cached, k: Tensor, v: Tensor, table: Tensor | None) -> Callable[[], Tensor]:
    def attend() -> Tensor:
        o = attention_kvcache(call.q, k, v, cache_seqlens=call.lengths, block_table=table, causal=call.causal)
        assert isinstance(o, Tensor)
        return o

    return attend


def _sdpa(backend: SDPBackend) -> DecodePeer:
    def make(call: Cached) -> Callable[[], Tensor]:
        q, k, v = (each.transpose(1, 2) for each in (call.q, call.k, call.v))
        if call.causal and q.shape[2] > 1:
            raise UnsupportedError("SDPA's is_causal aligns several rows with the first keys")
        grouped = q.shape[1] != k.shape[1]

        def attend() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)

        return attend

    return make


def _fa2(call: Cached) -> Callable[[], Tensor]:
    """flash_attn where it is installed, else SDPA's."""
    try:
        package = imported("flash_attn")
    except RuntimeError:
        return _sdpa(SDPBackend.FLASH_ATTENTION)(call)
    return _with_kvcache(package.flash_attn_with_kvcache, call)


def _fa3(call: Cached) -> Callable[[], Tensor]:
    """With as many splits as it finds good: by `flash_attn_func`, where it has that, which is the faster one."""
    package = imported("fa3_fwd_interface", "flash_attn_interface")
    if "num_splits" not in inspect.signature(package.flash_attn_func).parameters:
        return _with_kvcache(package.flash_attn_with_kvcache, call)
    given: dict[str, Any] = {"causal": call.causal, "num_splits": 0}
    return lambda: _first(package.flash_attn_func(call.q, call.k, call.v, **given))


def _with_kvcache(function: Any, call: Cached) -> Callable[[], Tensor]:
    return lambda: _first(function(call.q, call.k, call.v, cache_seqlens=call.lengths, causal=call.causal))


def _first(o: Any) -> Tensor:
    first: Tensor = o[0] if isinstance(o, tuple) else o
    return first


DECODE_PEERS: Mapping[str, DecodePeer] = {
    "flashgen": _flashgen,
    "paged": _paged,
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": _fa2,
    "fa3": _fa3,
}
