"""`attention_kvcache` on CPU tensors: against loops of plain Python; what is appended, traced and refused."""

from __future__ import annotations

import itertools
import math
import shutil
from typing import Any

import pytest
import torch
import torch.fx.experimental._config
from kvcaches import NOWHERE, Stored, expected, in_pages, in_rows, ints, random, starts, tokens
from torch import Tensor
from torch.autograd import forward_ad

import flashgen
from flashgen.descales import FP8
from flashgen.errors import InputError, UnsupportedError

LENGTHS, CAPACITY = (0, 1, 37, 50, 16), 60
HEADS, KV_HEADS, WIDTH, WIDTH_V = 6, 2, 8, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"causal": False},
    "scale": {"scale": -0.3},
    "window": {"window": (9, 0)},
    "both sides": {"window": (7, 3), "causal": False},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.linspace(0.05, 0.4, HEADS)},
    "alibi of each": {"alibi_slopes": torch.linspace(0.05, 0.4, HEADS * len(LENGTHS)).reshape(-1, HEADS)},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
    "many": {"window": (20, 0), "softcap": 2.0, "sinks": torch.linspace(-1, 1, HEADS)},
}
# Sizes of pages, 0 for rows; 20 and 25 divide nothing.
PAGES = (0, 1, 16, 20, 25, 64)


def _stored(
    page_size: int, lengths: tuple[int, ...] = LENGTHS, kv_heads: int = KV_HEADS, room: int = 0
) -> tuple[list[Tensor], list[Tensor], Stored]:
    keys, values = (tokens(lengths, kv_heads, width, seed=width) for width in (WIDTH, WIDTH_V))
    if page_size == 0:
        return keys, values, in_rows(keys, values, CAPACITY)
    return keys, values, in_pages(keys, values, page_size, CAPACITY, room=room)


def _call(q: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    result = flashgen.attention_kvcache(q, return_lse=True, **given)
    assert isinstance(result, tuple)
    return result


def _own(options: dict[str, Any], index: int) -> dict[str, Any]:
    """The options of one sequence."""
    slopes = options.get("alibi_slopes")
    return {**options, "alibi_slopes": slopes[index]} if slopes is not None and slopes.dim() == 2 else options


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_sequence_sees_its_own_keys(options: dict[str, Any], page_size: int) -> None:
    keys, values, stored = _stored(page_size)
    before = [each.clone() for each in stored if each is not None]
    for seq_q in (1, 3):
        q = random(len(LENGTHS), seq_q, HEADS, WIDTH, seed=seq_q)
        o, lse = _call(q, **stored.named, **options)
        assert o.shape == (len(LENGTHS), seq_q, HEADS, WIDTH_V) and lse.shape == (len(LENGTHS), HEADS, seq_q)
        for index in range(len(LENGTHS)):
            exact, exact_lse = expected(q[index], keys[index], values[index], **_own(options, index))
            torch.testing.assert_close(o[index], exact)
            torch.testing.assert_close(lse[index], exact_lse)
    for each, copy in zip((each for each in stored if each is not None), before, strict=True):
        torch.testing.assert_close(each, copy, rtol=0, atol=0, equal_nan=True)


def _assert_same(caches: Stored, others: Stored) -> None:
    for cache, other in zip(caches[:2], others[:2], strict=True):
        assert cache is not None and other is not None
        torch.testing.assert_close(cache, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("seq_new", [1, 4, 33])
def test_new_keys_are_written_behind_the_others_and_seen(page_size: int, seq_new: int) -> None:
    before = tuple(min(length, CAPACITY - seq_new) for length in LENGTHS)
    keys, values, whole = _stored(page_size, tuple(length + seq_new for length in before))
    stored = whole.without(before)
    new_k, new_v = (torch.stack([each[len(each) - seq_new :] for each in sequences]) for sequences in (keys, values))
    for seq_q in {1, seq_new}:
        q = random(len(before), seq_q, HEADS, WIDTH, seed=seq_q)
        o, lse = _call(q, **stored.named, k=new_k, v=new_v)
        for index in range(len(before)):
            exact, exact_lse = expected(q[index], keys[index], values[index])
            torch.testing.assert_close(o[index], exact)
            torch.testing.assert_close(lse[index], exact_lse)
        _assert_same(stored, whole)
    assert stored.cache_seqlens.tolist() == list(before)


@pytest.mark.parametrize("page_size", [0, 20])
def test_what_finds_no_room_is_neither_written_nor_seen(page_size: int) -> None:
    keys, values, whole = _stored(page_size, (CAPACITY, CAPACITY, CAPACITY))
    before = (CAPACITY - 2, CAPACITY, CAPACITY + 7)
    stored = whole.without((CAPACITY - 2, CAPACITY, CAPACITY))._replace(cache_seqlens=ints(before))
    new_k, new_v = (random(3, 5, KV_HEADS, width, seed=width) for width in (WIDTH, WIDTH_V))
    for new, sequences in ((new_k, keys), (new_v, values)):
        new[0, :2] = sequences[0][-2:]
    q = random(3, 2, HEADS, WIDTH, seed=1)
    o, lse = _call(q, **stored.named, k=new_k, v=new_v)
    for index in range(3):
        exact, exact_lse = expected(q[index], keys[index], values[index])
        torch.testing.assert_close(o[index], exact)
        torch.testing.assert_close(lse[index], exact_lse)
    _assert_same(stored, whole)


@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1, CAPACITY + 1])
def test_lengths_out_of_range_are_none_or_all(length: int) -> None:
    keys, values, stored = _stored(0, (CAPACITY, 3))
    q = random(2, 1, HEADS, WIDTH, seed=1)
    o, _ = _call(q, **stored._replace(cache_seqlens=ints((length, 3))).named)
    count = CAPACITY if length > 0 else 0
    torch.testing.assert_close(o[0], expected(q[0], keys[0][:count], values[0][:count])[0])
    torch.testing.assert_close(o[1], expected(q[1], keys[1], values[1])[0])


@pytest.mark.parametrize("page_size", [0, 25])
@pytest.mark.parametrize("appends", [False, True], ids=["stored", "appended"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_prompts_and_single_tokens_in_one_call(options: dict[str, Any], appends: bool, page_size: int) -> None:
    rows = (1, 0, 7, 12, 1)
    lengths = tuple(length + new for length, new in zip((0, 1, 30, 40, 16), rows, strict=True))
    keys, values, whole = _stored(page_size, lengths)
    cu_seqlens_q = starts(rows) + 2
    # Tokens before the first sequence and behind the last one belong to none.
    q = random(2 + sum(rows) + 3, HEADS, WIDTH, seed=1)
    stored, given = whole, {}
    if appends:
        stored = whole.without([length - new for length, new in zip(lengths, rows, strict=True)])
        for name, sequences in (("k", keys), ("v", values)):
            given[name] = torch.full((len(q), *sequences[0].shape[1:]), math.nan, dtype=torch.float64)
            given[name][2:-3] = torch.cat([each[len(each) - new :] for each, new in zip(sequences, rows, strict=True)])
    o, lse = _call(q, **stored.named, **given, **options, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=12)
    assert o.shape == (len(q), HEADS, WIDTH_V) and lse.shape == (HEADS, len(q))
    for index, (first, last) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        exact, exact_lse = expected(q[first:last], keys[index], values[index], **_own(options, index))
        torch.testing.assert_close(o[first:last], exact)
        torch.testing.assert_close(lse[:, first:last], exact_lse)
    for outside in (slice(0, 2), slice(-3, None)):
        assert not o[outside].any() and (lse[:, outside] == -math.inf).all()
    _assert_same(stored, whole)


def test_rows_beyond_the_longest_are_neither_computed_nor_appended() -> None:
    keys, values, whole = _stored(16, (9, 5))
    stored = whole.without((5, 4))
    new_k, new_v = (torch.cat([sequences[0][5:], random(3, KV_HEADS, width, seed=9), sequences[1][4:]])
                    for sequences, width in ((keys, WIDTH), (values, WIDTH_V)))  # fmt: skip
    q = random(8, HEADS, WIDTH, seed=1)
    o, _ = _call(q, **stored.named, k=new_k, v=new_v, cu_seqlens_q=starts((7, 1)), max_seqlen_q=4)
    torch.testing.assert_close(o[:4], expected(q[:4], keys[0], values[0])[0])
    torch.testing.assert_close(o[7:], expected(q[7:], keys[1], values[1])[0])
    assert not o[4:7].any()
    _assert_same(stored, whole)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (6, 1), (7, 1), (14, 2), (28, 4), (5, 5)])
def test_heads_share_keys(heads: int, kv_heads: int) -> None:
    keys, values, stored = _stored(20, (33, 7), kv_heads)
    q = random(2, 2, heads, WIDTH, seed=1)
    o, _ = _call(q, **stored.named)
    for index in range(2):
        torch.testing.assert_close(o[index], expected(q[index], keys[index], values[index])[0])


def test_sequences_share_pages() -> None:
    keys, values, stored = _stored(16, (48, 48))
    table = stored.block_table
    assert table is not None
    # The second sequence continues the first one's prompt of two pages.
    table[1, :2] = table[0, :2]
    shared = [torch.cat([sequences[0][:32], sequences[1][32:]]) for sequences in (keys, values)]
    q = random(2, 3, HEADS, WIDTH, seed=1)
    o, _ = _call(q, **stored._replace(cache_seqlens=ints((40, 45))).named)
    torch.testing.assert_close(o[0], expected(q[0], keys[0][:40], values[0][:40])[0])
    torch.testing.assert_close(o[1], expected(q[1], shared[0][:45], shared[1][:45])[0])


@pytest.mark.parametrize("where", ["heads first", "keys beside values", "wide rows"])
def test_caches_and_new_keys_of_any_strides(where: str) -> None:
    keys, values = (tokens((10, 40), KV_HEADS, WIDTH, seed=seed) for seed in (1, 2))
    whole = in_pages(keys, values, 16, CAPACITY)
    stored = whole.without((9, 39))
    pages = stored.k_cache.shape[0]
    if where == "heads first":
        caches = [torch.empty(pages, KV_HEADS, 16, WIDTH).double().transpose(1, 2) for _ in range(2)]
    elif where == "keys beside values":
        caches = list(torch.empty(pages, 2, 16, KV_HEADS, WIDTH, dtype=torch.float64).unbind(1))
    else:
        caches = [torch.empty(pages + 1, 20, KV_HEADS + 1, WIDTH + 3).double()[1:, 2:18, 1:, 1:-2] for _ in range(2)]
    stored = stored._replace(k_cache=caches[0].copy_(stored.k_cache), v_cache=caches[1].copy_(stored.v_cache))
    new_k, new_v = (
        torch.stack([each[-1:] for each in sequences]).transpose(0, 3).contiguous().transpose(0, 3)
        for sequences in (keys, values)
    )
    q = random(WIDTH, HEADS, 1, 2, seed=1).permute(3, 2, 1, 0)
    o, _ = _call(q, **stored.named, k=new_k, v=new_v)
    for index in range(2):
        torch.testing.assert_close(o[index], expected(q[index], keys[index], values[index])[0])
    _assert_same(stored, whole)


def test_values_may_be_columns_of_the_keys() -> None:
    """As in multi-head latent attention: one key head for all, and what is appended is written once."""
    keys = tokens((10, 40), 1, 12, seed=1)
    whole = in_pages(keys, keys, 16, CAPACITY)
    stored = whole.without((9, 39))
    stored = stored._replace(v_cache=stored.k_cache[..., :WIDTH_V])
    new = torch.stack([each[-1:] for each in keys])
    q = random(2, 1, HEADS, 12, seed=1)
    o, _ = _call(q, **stored.named, k=new, v=new[..., :WIDTH_V])
    for index in range(2):
        torch.testing.assert_close(o[index], expected(q[index], keys[index], keys[index][..., :WIDTH_V])[0])
    torch.testing.assert_close(stored.k_cache, whole.k_cache, rtol=0, atol=0, equal_nan=True)


DESCALES = ("none", "number", "one", "head", "batch", "token", "head and token")


def _numbers(form: str, name: str, stored: Stored) -> tuple[Any, Any]:
    """A descale as it is given, and as numbers for [batch, token, kv_heads]."""
    batch, places = len(stored.cache_seqlens), stored.k_cache.shape[:3]
    drawn = (random(*places, seed=ord(name)).abs() + 0.1).float()
    if form == "none":
        return None, lambda index, token: 1.0
    if form == "number":
        return 0.25, lambda index, token: 0.25
    if form == "one":
        return drawn[0, 0, 0], lambda index, token: drawn[0, 0, 0]
    if form == "head" or (form == "head and token" and name == "k"):
        return drawn[0, 0], lambda index, token: drawn[0, 0]
    if form == "batch":
        return drawn[:batch, 0], lambda index, token: drawn[index, 0]
    # What lies behind the sequences must not matter here either.
    hidden = torch.full(places, math.nan)
    for index in range(batch):
        for token in range(int(stored.cache_seqlens[index])):
            hidden[stored.place(index, token)] = drawn[stored.place(index, token)]
    return hidden, lambda index, token: drawn[stored.place(index, token)]


def _quantised(sequences: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    scale = 40 if dtype == torch.int8 else 1
    return [(each * scale).clamp(-120, 120).round().to(dtype) if scale > 1 else each.to(dtype) for each in sequences]


@pytest.mark.parametrize("form", DESCALES)
@pytest.mark.parametrize("page_size", [0, 20])
@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=["int8", "fp8"])
def test_quantised_caches(dtype: torch.dtype, page_size: int, form: str) -> None:
    drawn = (tokens(LENGTHS, KV_HEADS, width, seed=width) for width in (WIDTH, WIDTH_V))
    keys, values = (_quantised(each, dtype) for each in drawn)
    fill = 127 if dtype == torch.int8 else math.nan
    whole = (
        in_rows(keys, values, CAPACITY, fill)
        if page_size == 0
        else in_pages(keys, values, page_size, CAPACITY, fill, room=1)
    )
    lengths = [max(0, length - 1) for length in LENGTHS]
    stored = whole.without(lengths, fill)._replace(cache_seqlens=ints(lengths))
    # The sequence without any token gets its first one.
    new_k, new_v = (
        torch.stack(
            [each[-1:].double() if len(each) else torch.ones(1, *each.shape[1:]).double() for each in sequences]
        ).to(dtype)
        for sequences in (keys, values)
    )
    whole = whole._replace(cache_seqlens=ints([max(1, length) for length in LENGTHS]))
    given, truth = {}, []
    for name, sequences, new in (("k", keys, new_k), ("v", values, new_v)):
        given[f"descale_{name}"], number = _numbers(form, name, whole)
        full = [each if len(each) else new[index] for index, each in enumerate(sequences)]
        truth.append([
            torch.stack([row.double() * torch.as_tensor(number(index, token)).double().reshape(-1, 1)
                         for token, row in enumerate(each)])
            for index, each in enumerate(full)
        ])  # fmt: skip
    q = random(len(LENGTHS), 2, HEADS, WIDTH, seed=1)
    o, lse = _call(q, **stored.named, **given, k=new_k, v=new_v, scale=0.05)
    for index in range(len(LENGTHS)):
        exact, exact_lse = expected(q[index], truth[0][index], truth[1][index], scale=0.05)
        torch.testing.assert_close(o[index], exact)
        torch.testing.assert_close(lse[index], exact_lse)
        for cache, new in ((stored.k_cache, new_k), (stored.v_cache, new_v)):
            assert torch.equal(cache[stored.place(index, lengths[index])].double(), new[index, 0].double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    keys, values, stored = _stored(20)
    q = random(len(LENGTHS), 2, HEADS, WIDTH, seed=1).to(dtype)
    narrow = stored._replace(k_cache=stored.k_cache.to(dtype), v_cache=stored.v_cache.to(dtype))
    o, lse = _call(q, **narrow.named, num_splits=3)
    assert o.dtype == dtype and lse.dtype == torch.float32
    for index in range(len(LENGTHS)):
        exact, exact_lse = expected(q[index], keys[index].to(dtype), values[index].to(dtype))
        error = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(o[index].double(), exact, rtol=error, atol=error)
        torch.testing.assert_close(lse[index].double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_windows_count_the_rows_own_key() -> None:
    keys = values = [torch.arange(5.0).double().reshape(5, 1, 1)]
    stored = in_rows([torch.zeros_like(keys[0])], values, CAPACITY)
    o = flashgen.attention_kvcache(torch.zeros(1, 5, 1, 1).double(), **stored.named, window=(1, 0))
    assert isinstance(o, Tensor)
    assert o.flatten().tolist() == [0, 0.5, 1.5, 2.5, 3.5]


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
def test_no_keys_no_rows_no_batch(sinks: Tensor | None) -> None:
    stored = Stored(torch.zeros(2, 16, 1, 4), torch.zeros(2, 16, 1, 3), ints((0, 0)))
    o, lse = _call(torch.ones(2, 1, 2, 4), **stored.named, sinks=sinks)
    assert not o.any()
    assert torch.equal(lse, torch.full((2, 2, 1), -math.inf) if sinks is None else sinks[None, :, None].expand(2, 2, 1))
    assert _call(torch.ones(2, 0, 2, 4), **stored.named, sinks=sinks)[0].shape == (2, 0, 2, 3)
    nobody = Stored(torch.zeros(0, 16, 1, 4), torch.zeros(0, 16, 1, 3), ints(()))
    assert _call(torch.ones(0, 1, 2, 4), **nobody.named, sinks=sinks)[0].shape == (0, 1, 2, 3)
    paged = Stored(torch.zeros(3, 16, 1, 4), torch.zeros(3, 16, 1, 3), ints(()), torch.empty(0, 4, dtype=torch.int32))
    o, lse = _call(torch.ones(5, 2, 4), **paged.named, sinks=sinks, cu_seqlens_q=ints((0,)), max_seqlen_q=0)
    assert not o.any() and (lse == -math.inf).all()


def _example(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    _, _, stored = _stored(20, room=2)
    return {
        "q": random(len(LENGTHS), 2, HEADS, WIDTH, seed=1).to(dtype),
        **stored._replace(k_cache=stored.k_cache.to(dtype), v_cache=stored.v_cache.to(dtype)).named,
    }


def _new(count: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: random(len(LENGTHS), count, KV_HEADS, width, seed=width).to(dtype)
            for name, width in (("k", WIDTH), ("v", WIDTH_V))}  # fmt: skip


def _contiguous(**changed: Any) -> dict[str, Any]:
    _, _, stored = _stored(0)
    return {**stored._replace(k_cache=stored.k_cache.float(), v_cache=stored.v_cache.float()).named, **changed}


PACKED = {"cu_seqlens_q": starts((2,) * len(LENGTHS)), "max_seqlen_q": 2}
NO_FIT: dict[str, tuple[dict[str, Any], str]] = {
    "q is none": ({"q": [1.0]}, "q must be a torch.Tensor, but got list"),
    "rank": (
        {"q": torch.zeros(10, 6, 8)},
        r"q must be \[batch, seq_q, heads, head_dim\], but got \[10, 6, 8\]. Packed",
    ),
    "rank packed": (PACKED, r"q must be \[total_q, heads, head_dim\]"),
    "caches": ({"k_cache": torch.zeros(16, 2, 8)}, r"k_cache must be \[pages, page_size, kv_heads, head_dim\]"),
    "rows": (_contiguous(v_cache=torch.zeros(3)), r"v_cache must be \[batch, seq_kv, kv_heads, head_dim_v\]"),
    "dtype": ({"q": torch.zeros(5, 2, 6, 8, dtype=torch.int32)}, "dtype of q must be one of .*float32.* on cpu"),
    "cache dtype": ({"k_cache": torch.zeros(20, 20, 2, 8).half()}, "k_cache and v_cache must both be torch.float32"),
    "device": ({"cache_seqlens": ints(LENGTHS).to("meta")}, "q's device cpu, but got cache_seqlens on meta"),
    "sizes": ({"v_cache": torch.zeros(20, 16, 2, 8)}, r"must agree in \[pages, page_size, kv_heads\]"),
    "head_dim": ({"q": torch.zeros(5, 2, 6, 7)}, "q and k_cache must have one head_dim"),
    "heads": ({"q": torch.zeros(5, 2, 5, 8)}, "heads must be a multiple of kv_heads"),
    "strided": (_contiguous(k_cache=torch.zeros(5, 60, 8, 2).mT), "k_cache must have a contiguous last dimension"),
    "lengths": (
        {"cache_seqlens": ints(LENGTHS).long()},
        r"cache_seqlens must be an int32 tensor \[batch\] with batch 5",
    ),
    "lengths list": ({"cache_seqlens": list(LENGTHS)}, "cache_seqlens must be an int32 tensor"),
    "batch": ({"cache_seqlens": ints(LENGTHS[1:])}, r"with batch 5, but got torch.int32 \[4\]"),
    "rows of others": (
        _contiguous(k_cache=torch.zeros(4, 60, 2, 8), v_cache=torch.zeros(4, 60, 2, 5)),
        "k_cache and v_cache must have q's batch size 5, but got 4",
    ),
    "table": ({"block_table": torch.zeros(5, 3)}, r"block_table must be an int32 tensor \[batch, pages per sequence\]"),
    "table batch": (
        {"block_table": torch.zeros(4, 3, dtype=torch.int32)},
        r"with batch 5, but got torch.int32 \[4, 3\]",
    ),
    "no room": ({"block_table": torch.zeros(5, 0, dtype=torch.int32)}, "must have room for at least one token"),
    "one new": ({"k": torch.zeros(5, 2, 2, 8)}, "k and v must be given together"),
    "new dtype": (
        {**_new(), "v": torch.zeros(5, 2, 2, 5).half()},
        "v must be torch.float32, as v_cache, to be appended",
    ),
    "new sizes": (
        {**_new(), "v": torch.zeros(5, 2, 2, 8)},
        r"v must be \[5, seq_new, 2, 5\], as q and v_cache ask for",
    ),
    "new lengths": ({**_new(), "v": torch.zeros(5, 3, 2, 5)}, "k and v must have one length, but got 2 and 3"),
    "new rank": ({**_new(), "k": torch.zeros(10, 2, 8)}, r"k must be \[batch, seq_new, kv_heads, head_dim\]"),
    "new without rows": ({"q": torch.zeros(5, 0, 6, 8), **_new()}, "appended by a call with rows"),
    "expanded": (_contiguous(k_cache=torch.zeros(1, 60, 2, 8).expand(5, -1, -1, -1), **_new()), "k_cache is expanded"),
    "packed alone": ({"cu_seqlens_q": PACKED["cu_seqlens_q"]}, "cu_seqlens_q and max_seqlen_q go together"),
    "longest alone": ({"max_seqlen_q": 2}, "cu_seqlens_q and max_seqlen_q go together"),
    "packed dtype": (
        {"q": torch.zeros(10, 6, 8), **PACKED, "cu_seqlens_q": torch.zeros(6)},
        r"cu_seqlens_q must be an int32 tensor \[batch \+ 1\]",
    ),
    "longest": ({"q": torch.zeros(10, 6, 8), **PACKED, "max_seqlen_q": -1}, "max_seqlen_q must be a number of tokens"),
    "packed new": (
        {"q": torch.zeros(10, 6, 8), **PACKED, "k": torch.zeros(9, 2, 8), "v": torch.zeros(9, 2, 5)},
        r"k must be \[10, 2, 8\], as q and k_cache ask for",
    ),
    "causal": ({"causal": "top_left"}, "causal must be False, True or 'bottom_right', but got 'top_left'"),
    "causal 2": ({"causal": 2}, "causal must be False, True"),
    "scale": ({"scale": math.nan}, "scale must be None or a finite number"),
    "window": ({"window": (1,)}, "window must be None or a pair"),
    "window side": ({"window": (-1, 0)}, "each side of window must be None or a number of keys"),
    "softcap": ({"softcap": -1.0}, "softcap must be None or a number"),
    "cap and scale": ({"softcap": 1e-10, "scale": 1e30}, "scale must be at most"),
    "slopes": ({"alibi_slopes": torch.zeros(5)}, r"alibi_slopes must be \[6\] or \[5, 6\]"),
    "sinks": ({"sinks": torch.zeros(2)}, r"sinks must be \[6\]"),
    "no splits": ({"num_splits": 0}, "num_splits must be from 1 to 128, or None, but got 0"),
    "too many splits": ({"num_splits": 129}, "num_splits must be from 1 to 128, or None, but got 129"),
    "splits kind": ({"num_splits": True}, "num_splits must be from 1 to 128, or None, but got True"),
    "descale": ({"descale_k": 2.0}, "descale_k is for caches of float8_e4m3fn or int8, but got torch.float32"),
}


@pytest.mark.parametrize("changed", NO_FIT)
def test_what_does_not_fit_is_refused(changed: str) -> None:
    given, words = NO_FIT[changed]
    arguments = {**_example(), **given}
    copies = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(InputError, match=words):
        flashgen.attention_kvcache(**arguments)
    for name, copy in zip(("k_cache", "v_cache"), copies, strict=True):
        torch.testing.assert_close(arguments[name], copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"descale_k": -1.0}, "descale_k must be None, an fp32 tensor or a number from 0"),
        ({"descale_v": torch.ones(()).double()}, "descale_v must be float32 on q's device cpu"),
        ({"descale_v": torch.ones(5)}, r"must broadcast to one of \[\], \[2\], \[5, 2\], \[18, 20, 2\], but got \[5\]"),
        ({"descale_k": torch.ones(5, 2), "descale_v": torch.ones(18, 20, 2)}, "must both have numbers by token"),
        (_new(), "k must be torch.int8, as k_cache, to be appended, but got torch.float32. Cast it, or quantise it"),
    ],
)
def test_what_does_not_fit_quantised_caches_is_refused(given: dict[str, Any], words: str) -> None:
    example = _example()
    caches = {name: torch.zeros(example[name].shape, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    with pytest.raises(InputError, match=words):
        flashgen.attention_kvcache(**{**example, **caches, **given})


def test_pages_that_are_not_there_are_refused() -> None:
    example = _example()
    for nowhere in NOWHERE:
        example["block_table"][3, 1] = nowhere
        with pytest.raises(InputError, match=rf"block_table\[3\] must name pages from 0 to .*, but got {nowhere}"):
            flashgen.attention_kvcache(**example)


def test_kernels_by_name_and_explanations_are_for_gpus() -> None:
    example = _example()
    with pytest.raises(UnsupportedError, match="family='triton_decode' runs on a GPU"):
        flashgen.attention_kvcache(**example, family="triton_decode")
    with pytest.raises(InputError, match="explain_kvcache is about kernels on a GPU"):
        flashgen.explain_kvcache(**example)
    with pytest.raises(UnsupportedError, match="flashgen runs on CUDA and CPU tensors"):
        flashgen.attention_kvcache(**{name: each.to("meta") for name, each in example.items()})


@pytest.mark.parametrize("name", ["q", "k_cache", "k", "sinks", "alibi_slopes"])
def test_gradients_are_refused(name: str) -> None:
    given = {**_example(), **_new(), "sinks": torch.zeros(HEADS), "alibi_slopes": torch.zeros(HEADS)}
    given[name].requires_grad_()
    with pytest.raises(UnsupportedError, match=r"attention_kvcache has no backward.*torch.no_grad\(\)"):
        flashgen.attention_kvcache(**given)
    with torch.no_grad():
        flashgen.attention_kvcache(**given)
    with torch.inference_mode():
        flashgen.attention_kvcache(**given)


def test_functional_transforms_are_refused() -> None:
    example = _example()
    q = example.pop("q")
    for given in ({}, _new()):
        with pytest.raises(UnsupportedError, match="has no vmap over attention_kvcache"):
            torch.vmap(lambda q, given=given: flashgen.attention_kvcache(q, **example, **given))(torch.stack([q, q]))
        with pytest.raises(UnsupportedError, match="attention_kvcache has no backward"):
            torch.func.grad(lambda q, given=given: flashgen.attention_kvcache(q, **example, **given).sum())(q)


# torch 2.13's own, on the first dual level of a process.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused() -> None:
    example = _example()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        flashgen.attention_kvcache(forward_ad.make_dual(example.pop("q"), torch.ones(5, 2, HEADS, WIDTH)), **example)


def test_under_autocast() -> None:
    example, new = _example(torch.bfloat16), _new()
    wide = {**example, "q": example["q"].float()}
    expected_o = flashgen.attention_kvcache(**example, **{name: each.bfloat16() for name, each in new.items()})
    with torch.autocast("cpu", torch.bfloat16):
        o = flashgen.attention_kvcache(**wide, **new)
        with pytest.raises(InputError, match="under autocast it has autocast's dtype, and caches are never cast"):
            flashgen.attention_kvcache(**_example())
    assert isinstance(o, Tensor) and isinstance(expected_o, Tensor)
    assert torch.equal(o, expected_o)


def test_writes_are_counted_as_torch_counts_its_own() -> None:
    example = _example()
    before = example["k_cache"]._version
    flashgen.attention_kvcache(**example)
    assert example["k_cache"]._version == before
    flashgen.attention_kvcache(**example, **_new())
    assert example["k_cache"]._version > before and example["v_cache"]._version > before


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["stored", "appended", "packed", "quantised"])
def test_compiled_is_eager(kind: str, backend: str) -> None:
    if backend == "inductor" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("needs a C++ compiler")
    example = _example()
    # As one memory, which an operator that writes to both must not mind.
    both = torch.stack([torch.nn.functional.pad(example[name], (0, WIDTH - example[name].shape[-1]))
                        for name in ("k_cache", "v_cache")])  # fmt: skip
    given: dict[str, Any] = {"window": (30, 0), "sinks": torch.linspace(-1, 1, HEADS), "num_splits": 2}
    if kind != "stored":
        given |= {"k": _new()["k"], "v": _new()["k"] + 1}
    if kind == "quantised":
        both = (both * 40).nan_to_num(0).to(torch.int8)
        given |= {name: (given[name] * 40).to(torch.int8) for name in ("k", "v")}
        given |= {"descale_k": 0.025, "descale_v": torch.full((KV_HEADS,), 0.025)}
    if kind == "packed":
        given |= {name: given[name].flatten(0, 1) for name in ("k", "v")} | PACKED

    def call(q: Tensor, both: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = both.unbind(0)
        if kind == "packed":
            q = q.flatten(0, 1)
        o, lse = flashgen.attention_kvcache(
            q * 2, k_cache, v_cache, cache_seqlens=lengths, block_table=example["block_table"], return_lse=True, **given
        )
        # What was written is seen by what comes next.
        return o + 1, lse + v_cache.nan_to_num(0).sum()

    torch._dynamo.reset()
    mine, other = both.clone(), both.clone()
    eager = call(example["q"], mine, example["cache_seqlens"])
    compiled = torch.compile(call, backend=backend, fullgraph=True)(example["q"], other, example["cache_seqlens"])
    for one, two in zip((*eager, mine), (*compiled, other), strict=True):
        torch.testing.assert_close(one, two, equal_nan=True)
    assert torch.equal(mine.view(torch.uint8), both.view(torch.uint8)) == (kind == "stored")


# Sizes that are equal at first need not stay so.
@torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
def test_compiled_once_for_any_sizes() -> None:
    example = _example()

    def call(q: Tensor, lengths: Tensor, table: Tensor, cu_seqlens_q: Tensor, longest: int) -> Any:
        return flashgen.attention_kvcache(
            q, example["k_cache"], example["v_cache"], cache_seqlens=lengths, block_table=table,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest,
        )  # fmt: skip

    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for rows in ((2, 1, 4, 3), (1, 0, 4, 5, 1), (7, 2)):
        batch = len(rows)
        q = random(sum(rows), HEADS, WIDTH, seed=batch).float()
        given = (q, example["cache_seqlens"][:batch], example["block_table"][:batch], starts(rows), max(rows))
        assert torch.equal(compiled(*given), call(*given))
    assert len(graphs) == 1


def test_the_operators_keep_torchs_rules() -> None:
    example = _example()
    numbers = (None, None, None, None, None, None, "bottom_right", 0.3, True, 2, None, 1.5, torch.ones(HEADS), 20, None)
    given = [example[name].nan_to_num(0) if name in ("k_cache", "v_cache") else example[name]
             for name in ("q", "k_cache", "v_cache", "cache_seqlens", "block_table")]  # fmt: skip
    rest = (*numbers, torch.zeros(HEADS))
    torch.library.opcheck(torch.ops.flashgen.attention_kvcache.default, (*given, None, None, *rest))
    torch.library.opcheck(torch.ops.flashgen.append_kvcache.default, (*given, *_new().values(), *rest))
