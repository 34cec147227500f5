"""Caches with known contents, and what attention to them is, by loops of plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Entries of a block table that nobody may follow.
NOWHERE = (-1, 2**31 - 1, -(2**31), 77777)


class Stored(NamedTuple):
    """Sequences in caches: arguments of `attention_kvcache`."""

    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None = None

    @property
    def named(self) -> dict[str, Any]:
        return self._asdict()

    def place(self, sequence: int, token: int) -> tuple[int, int]:
        """Where it lies in the first two dimensions of the caches."""
        if self.block_table is None:
            return sequence, token
        page, place = divmod(token, self.k_cache.shape[1])
        return int(self.block_table[sequence, page]), place

    def without(self, lengths: Sequence[int], fill: float = math.nan) -> Stored:
        """Copies with fewer tokens: `fill` is where the others were."""
        caches = []
        for cache in (self.k_cache.clone(), self.v_cache.clone()):
            for index, length in enumerate(lengths):
                for token in range(length, int(self.cache_seqlens[index])):
                    cache[self.place(index, token)] = fill
            caches.append(cache)
        return Stored(caches[0], caches[1], ints(lengths), self.block_table)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: Sequence[int]) -> Tensor:
    """Cumulative from 0."""
    return ints([0, *itertools.accumulate(lengths)])


def tokens(lengths: Sequence[int], *others: int, seed: int) -> list[Tensor]:
    """Random [length, *others] for each sequence."""
    return [random(length, *others, seed=seed * 1000 + index) for index, length in enumerate(lengths)]


def in_rows(keys: Sequence[Tensor], values: Sequence[Tensor], capacity: int, fill: float = math.nan) -> Stored:
    """Contiguous caches; memory behind the sequences holds `fill`."""
    caches = []
    for sequences in (keys, values):
        cache = sequences[0].new_full((len(sequences), capacity, *sequences[0].shape[1:]), fill)
        for row, sequence in zip(cache, sequences, strict=True):
            row[: len(sequence)] = sequence
        caches.append(cache)
    return Stored(caches[0], caches[1], ints([len(each) for each in keys]))


def in_pages(
    keys: Sequence[Tensor], values: Sequence[Tensor], page_size: int, capacity: int, fill: float = math.nan,
    room: int = 0, seed: int = 0,
) -> Stored:  # fmt: skip
    """Paged caches: pages in any order, some of which nobody has; each sequence has those for `room` more tokens."""
    each = -(-capacity // page_size)
    order = torch.randperm(len(keys) * each + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    table = ints(list(itertools.islice(itertools.cycle(NOWHERE), len(keys) * each))).reshape(len(keys), each)
    caches = [
        sequences[0].new_full((len(order), page_size, *sequences[0].shape[1:]), fill) for sequences in (keys, values)
    ]
    for index, pair in enumerate(zip(keys, values, strict=True)):
        for place in range(-(-min(len(pair[0]) + room, capacity) // page_size)):
            page = order.pop()
            table[index, place] = page
            for cache, sequence in zip(caches, pair, strict=True):
                part = sequence[place * page_size : (place + 1) * page_size]
                cache[page, : len(part)] = part
    return Stored(caches[0], caches[1], ints([len(each) for each in keys]), table)


def expected(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, width] and log-sum-exp [heads, rows] of one sequence; q [rows, heads, head_dim]."""
    rows, heads, head_dim = q.shape
    count, kv_heads = keys.shape[:2]
    out = torch.zeros(rows, heads, values.shape[2], dtype=torch.float64)
    lse = torch.full((heads, rows), -math.inf, dtype=torch.float64)
    left, right = (None, None) if window is None else window
    for i, h in itertools.product(range(rows), range(heads)):
        own, head = i + count - rows, h // (heads // kv_heads)
        logits: dict[int, float] = {}
        for j in range(count):
            if (causal and j > own) or (left is not None and j < own - left) or (right is not None and j > own + right):
                continue
            score = float(q[i, h].double() @ keys[j, head].double()) * (head_dim**-0.5 if scale is None else scale)
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if alibi_slopes is not None:
                score -= float(alibi_slopes[h]) * abs(j - own)
            logits[j] = score
        terms = [*logits.values(), *([] if sinks is None else [float(sinks[h])])]
        if terms:
            top = max(terms)
            total = math.fsum(math.exp(each - top) for each in terms)
            lse[h, i] = top + math.log(total)
            for j, logit in logits.items():
                out[i, h] += math.exp(logit - top) / total * values[j, head].double()
    return out, lse
