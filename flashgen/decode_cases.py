"""Inputs on which attention over caches has broken: lengths, pages, layouts and values of every kind, around poison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.cases import Case, modifiers, strided_like
from flashgen.modifiers import Modifiers
from flashgen.problem import Problem
from flashgen.spec import KV_DTYPES, TORCH_DTYPES, Spec


@dataclass(frozen=True)
class DecodeCase:
    """One call over a cache.

    Attributes:
        name: what it is about.
        problem: its sizes: of queries the most rows of a sequence, of keys the cache's capacity.
        lengths: of each sequence, keys in the cache before the call.
        rows: of each sequence of ragged queries; None: as many as there can be.
        page_size: of a cache in pages.
        num_splits: programs that share the keys; None: as many as fill the GPU.
        magnitude: standard deviation of q.
        strided: every tensor is a view of another memory order.
    """

    name: str
    problem: Problem
    lengths: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    page_size: int = 16
    num_splits: int | None = None
    magnitude: float = 1.0
    strided: bool = False


# Lengths of nothing, of one key, ragged ones and full ones; groups that fill no power of two; pages of more and of
# fewer keys than a block, and of a size of their own. A variant is compiled for each size of pages.
DECODE_CASES = (
    DecodeCase("lengths", Problem(5, 4, 2, 1, 1024), (0, 1, 63, 700, 1023), page_size=64),
    DecodeCase("group of 7", Problem(3, 14, 2, 1, 800), (799, 0, 130), page_size=100, num_splits=7),
    DecodeCase("five rows", Problem(3, 9, 3, 5, 640), (3, 250, 635), page_size=16, num_splits=3, strided=True),
    DecodeCase("many rows", Problem(2, 8, 2, 70, 600), (20, 530), (1, 70), page_size=64),
    DecodeCase("many splits", Problem(1, 4, 1, 2, 4096), (4000,), page_size=64, num_splits=32),
    DecodeCase("large logits", Problem(2, 8, 8, 1, 512), (511, 100), page_size=16, magnitude=40.0),
)
# Triton's interpreter takes its time.
SMALL_DECODE_CASES = (
    DecodeCase("lengths", Problem(4, 4, 2, 1, 112), (0, 1, 37, 111), page_size=16, num_splits=1),
    DecodeCase("splits", Problem(3, 3, 1, 1, 160), (159, 5, 64), page_size=32, num_splits=3),
    DecodeCase("rows", Problem(2, 6, 2, 7, 100), (2, 93), (3, 7), page_size=20, num_splits=2, strided=True),
    DecodeCase("large logits", Problem(3, 8, 2, 2, 48), (46, 9, 30), page_size=16, num_splits=4, magnitude=40.0),
)


@dataclass(frozen=True)
class Served:
    """A call, and what each of its sequences is.

    Attributes:
        given: what a kernel takes, by name, but for results and scratch.
        rows: of each sequence, its tokens in q.
        sequences: of each sequence its keys and values, [kv_heads, seq_kv, width], as the cache's type has them, and
            what these are multiplied by, [kv_heads, seq_kv, 1].
        after: cache tensors as they are after the call, by name.
    """

    given: dict[str, Any]
    rows: list[slice]
    sequences: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    after: dict[str, Tensor]
    modifiers: Modifiers


class _Draw:
    """Random tensors of one case."""

    def __init__(self, spec: Spec, case: DecodeCase, device: str, seed: int) -> None:
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        self.spec, self.case, self.device = spec, case, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def cached(self, *shape: int) -> Tensor:
        """Values as a cache has them."""
        dtype = KV_DTYPES[self.spec.kv_dtype]
        values = self.normal(*shape)
        return (values * 40).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of so many tokens: [kv_heads, count, width]."""
        heads = self.case.problem.kv_heads
        return self.cached(heads, count, self.spec.head_dim), self.cached(heads, count, self.spec.head_dim_v)

    def placed(self, values: Tensor, order: tuple[int, ...]) -> Tensor:
        """On the device; in another memory order, with poison in the gaps, where a case is strided."""
        values = values.to(self.device)
        if not self.case.strided or values.dtype in (torch.int8, torch.float8_e4m3fn):
            return values
        return strided_like(values, order)


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that nobody may read: NaN, or what is large."""
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, 127 if dtype == torch.int8 else math.nan, dtype=dtype)


def served(spec: Spec, case: DecodeCase, device: str, seed: int = 0) -> Served:
    """A call of the spec on fresh random values, in caches that hold poison wherever no key is."""
    draw, sizes = _Draw(spec, case, device, seed), case.problem
    most, ragged = sizes.seq_q, case.rows if spec.varlen and case.rows else (sizes.seq_q,) * sizes.batch
    new = ragged if spec.appended else (0,) * sizes.batch
    totals = [min(length + more, sizes.seq_kv) for length, more in zip(case.lengths, new, strict=True)]
    tokens = [draw.tokens(length + more) for length, more in zip(case.lengths, new, strict=True)]
    cache = _Cache(spec, case, draw, totals)
    given: dict[str, Any] = {"scale": spec.head_dim**-0.5}
    given["cache_seqlens"] = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    starts = [sum(ragged[:index]) for index in range(sizes.batch)]
    total_q = sum(ragged) + 3
    # Of ragged queries the last tokens belong to nobody.
    shape = (1, sizes.heads, total_q) if spec.varlen else (sizes.batch, sizes.heads, most)
    q = (draw.normal(*shape, spec.head_dim) * case.magnitude).to(TORCH_DTYPES[spec.dtype])
    given["q"] = _sequences(draw.placed(q, (0, 2, 1, 3)), spec, sizes)
    stored = cache.filled(tokens, list(case.lengths))
    given |= {"k": stored[0], "v": stored[1]} | cache.given()
    if spec.appended:
        for name, index in (("k_new", 0), ("v_new", 1)):
            values = _poison((*shape[:1], sizes.kv_heads, shape[2], tokens[0][index].shape[2]), tokens[0][index].dtype)
            for b, (first, count) in enumerate(zip(starts, new, strict=True)):
                place = (0, slice(None), slice(first, first + count)) if spec.varlen else b
                values[place] = tokens[b][index][:, case.lengths[b] :]
            given[name] = _sequences(draw.placed(values, (2, 0, 1, 3)), spec, sizes)
    if spec.varlen:
        given["cu_seqlens_q"] = torch.tensor([*starts, sum(ragged)], dtype=torch.int32, device=device)
        given["total_q"] = total_q
    like = Case(case.name, sizes, strided=case.strided)
    shaping = modifiers(spec.plain_of_cache, like, device, given["q"])
    names = [name for name in spec.modifiers if name not in given and not name.startswith("descale")]
    given |= dict(zip(names, shaping.arguments(spec.causal), strict=True))
    after = cache.filled(tokens, totals)
    numbers = cache.numbers(totals)
    sequences = [
        (k[:, :total].to(device), v[:, :total].to(device), number_k, number_v)
        for (k, v), total, (number_k, number_v) in zip(tokens, totals, numbers, strict=True)
    ]
    rows = [slice(first, first + count) for first, count in zip(starts, ragged, strict=True)]
    return Served(given, rows, sequences, {"k": after[0], "v": after[1]}, shaping)


def _sequences(tensor: Tensor, spec: Spec, sizes: Problem) -> Tensor:
    """[1, heads, tokens, width] as kernels see ragged sequences: all of the longest length, from the first token on."""
    if not spec.varlen:
        return tensor
    shape = (sizes.batch, tensor.shape[1], sizes.seq_q, tensor.shape[3])
    return tensor.as_strided(shape, (0, *tensor.stride()[1:]))


class _Cache:
    """Where the keys of a case lie: in pages of any order, of which the first two sequences share one, or in rows."""

    def __init__(self, spec: Spec, case: DecodeCase, draw: _Draw, totals: list[int]) -> None:
        self.spec, self.case, self.draw, self.totals = spec, case, draw, totals
        sizes = case.problem
        each = -(-sizes.seq_kv // case.page_size)
        order = torch.randperm(sizes.batch * each + 2, generator=draw.generator)[: sizes.batch * each]
        self.table = order.reshape(sizes.batch, each).to(torch.int32)
        self.shares = spec.paged and sizes.batch > 1 and min(case.lengths[:2]) >= case.page_size
        if self.shares:
            self.table[1, 0] = self.table[0, 0]
        rows = (sizes.batch * each + 2, case.page_size) if spec.paged else (sizes.batch, sizes.seq_kv)
        self.shape = (rows[0], sizes.kv_heads, rows[1])
        self.descales = self._descales()

    def _descales(self) -> list[Any]:
        spec, sizes = self.spec, self.case.problem
        if spec.cache == "none":
            return []
        if spec.descale == "tensor":
            return [0.05, 0.3]
        shape = (sizes.batch, sizes.kv_heads) if spec.descale == "head" else self.shape
        drawn = [torch.exp2(self.draw.normal(*shape[::-1]) * 0.5) * 0.05 for _ in range(2)]
        return [each.permute(*reversed(range(len(shape)))) for each in drawn]

    def places(self, index: int, count: int) -> tuple[Any, ...]:
        """Where the first tokens of a sequence are, in [.., kv_heads, .., width]."""
        if not self.spec.paged:
            return index, slice(None), slice(0, count)
        keys = torch.arange(count)
        return self.table[index, keys // self.case.page_size].long(), slice(None), keys % self.case.page_size

    def filled(self, tokens: list[tuple[Tensor, Tensor]], counts: list[int]) -> list[Tensor]:
        """Caches that hold the first tokens of each sequence."""
        if self.shares:
            for first, second in zip(tokens[0], tokens[1], strict=True):
                second[:, : self.case.page_size] = first[:, : self.case.page_size]
        found = []
        for which, order in ((0, (0, 2, 1, 3)), (1, (2, 0, 1, 3))):
            cache = _poison((*self.shape, tokens[0][which].shape[2]), tokens[0][which].dtype)
            for index, count in enumerate(counts):
                values = tokens[index][which][:, :count]
                cache[self.places(index, count)] = values.transpose(0, 1) if self.spec.paged else values
            # As servers have it: heads of a token side by side.
            plain = cache.transpose(1, 2).contiguous().transpose(1, 2)
            found.append(self.draw.placed(cache, order) if self.case.strided else plain.to(self.draw.device))
        return found

    def numbers(self, counts: list[int]) -> list[tuple[Tensor, Tensor]]:
        """What keys and values of each sequence are multiplied by, in float64."""
        found = []
        for index, count in enumerate(counts):
            pair = []
            for each in self.descales or [1.0, 1.0]:
                if not isinstance(each, Tensor):
                    number = torch.full((1, 1, 1), each, dtype=torch.float64)
                elif each.dim() == 2:
                    number = each[index, :, None, None].double()
                else:
                    here = each[self.places(index, count)].double()
                    number = (here.transpose(0, 1) if self.spec.paged else here)[..., None]
                pair.append(number.to(self.draw.device))
            found.append((pair[0], pair[1]))
        return found

    def given(self) -> dict[str, Any]:
        """What kernels take of it beside the caches."""
        found: dict[str, Any] = {}
        if self.spec.paged:
            # Beyond a sequence's last page, entries are no pages.
            table = self.table.clone()
            for index, total in enumerate(self.totals):
                table[index, -(-total // self.case.page_size) :] = 2**31 - 1 - index
            found["block_table"] = table.to(self.draw.device)
        for name, each in zip(("descale_k", "descale_v"), self.descales, strict=False):
            if isinstance(each, Tensor) and each.dim() == 3:
                poisoned = torch.full_like(each, math.nan)
                for index, total in enumerate(self.totals):
                    poisoned[self.places(index, total)] = each[self.places(index, total)]
                found[name] = poisoned.to(self.draw.device)
            else:
                found[name] = each.to(self.draw.device) if isinstance(each, Tensor) else each
        return found
