"""`attention_kvcache` of CPU tensors, in plain torch: one sequence after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flashgen.caches import Cache
from flashgen.cpu import attend_on_cpu
from flashgen.descales import Number
from flashgen.errors import InputError
from flashgen.modifiers import Modifiers
from flashgen.serving import Call, descales_of


def attend_cached_on_cpu(call: Call, modifiers: Modifiers) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call that has been judged; its sequences attend once all have their new keys."""
    q, cache = call.q, call.cache
    packed = cache.cu_seqlens_q is not None
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((*q.shape[:-1], cache.v.shape[3]))
    lse = torch.full(
        (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=wide
    )
    sequences = list(_sequences(q, cache))
    _append(cache, sequences)
    numbers = descales_of(cache, len(sequences))
    for index, (rows, _, stop) in enumerate(sequences):
        places = _places(cache, index, stop)
        keys, values = (
            _dequantised(store, places, number, index, wide) if cache.quantised else store[places]
            for store, number in zip((cache.k, cache.v), numbers, strict=True)
        )
        slopes = modifiers.alibi_slopes
        own = modifiers if slopes is None else modifiers._replace(alibi_slopes=slopes[index : index + 1])
        queries = q[None, rows] if packed else q[index : index + 1]
        each, its_lse = attend_on_cpu(queries, keys[None], values[None], call.causal, call.scale, "bshd", own)
        if packed:
            out[rows], lse[:, rows] = each[0], its_lse[0]
        else:
            out[index], lse[index] = each[0], its_lse[0]
    return out, lse


def _sequences(q: Tensor, cache: Cache) -> Iterator[tuple[slice, int, int]]:
    """Of each sequence its rows of a packed q, how many keys it had, and how many it has with those appended."""
    lengths = cache.seqlens.tolist()
    starts = [0] * (len(lengths) + 1) if cache.cu_seqlens_q is None else cache.cu_seqlens_q.tolist()
    for index, length in enumerate(lengths):
        first = min(max(starts[index], 0), q.shape[0])
        last = max(first, min(starts[index + 1], first + (cache.max_seqlen_q or 0), q.shape[0]))
        start = min(max(length, 0), cache.capacity)
        new = 0
        if cache.new_k is not None:
            new = cache.new_k.shape[1] if cache.cu_seqlens_q is None else last - first
        yield slice(first, last), start, min(start + new, cache.capacity)


def _append(cache: Cache, sequences: list[tuple[slice, int, int]]) -> None:
    """Write new keys and values behind those that are there, as far as there is room."""
    for index, (rows, start, stop) in enumerate(sequences):
        if start == stop:
            continue
        first, second = (each[start:] for each in _places(cache, index, stop))
        for store, new in ((cache.k, cache.new_k), (cache.v, cache.new_v)):
            assert new is not None
            mine = new[index] if cache.cu_seqlens_q is None else new[rows]
            store[first, second] = mine[: stop - start]


def _places(cache: Cache, index: int, stop: int) -> tuple[Tensor, Tensor]:
    """Where the first `stop` keys of a sequence lie, in the first two dimensions of the caches."""
    tokens = torch.arange(stop)
    if cache.table is None:
        return torch.full_like(tokens, index), tokens
    pages, page_size = cache.k.shape[:2]
    used = cache.table[index, : -(-stop // page_size)].long()
    outside = (used < 0) | (used >= pages)
    if outside.any():
        raise InputError(
            f"block_table[{index}] must name pages from 0 to {pages - 1} for {stop} keys, but got "
            f"{int(used[outside][0])}."
        )
    return used[tokens // page_size], tokens % page_size


def _dequantised(store: Tensor, places: tuple[Tensor, Tensor], number: Number, index: int, wide: torch.dtype) -> Tensor:
    """Keys or values [keys, kv_heads, width] times their descale, which is in the form of `descales_of`."""
    values = store[places].to(wide)
    if not isinstance(number, Tensor):
        return values * number
    by_head = number[index] if number.dim() == 2 else number.transpose(1, 2)[places]
    return values * by_head.to(wide)[..., None]
