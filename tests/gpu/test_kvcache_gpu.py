"""attention_kvcache() on a real GPU: values beside float64, graphs, syncs, streams, invariance, and a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvcaches import Stored, in_pages, in_rows, ints, random, starts, tokens
from torch import Tensor
from waiting import waits_are_errors

import flashgen
from flashgen import kvcache_plans, launch
from flashgen.check import max_error
from flashgen.errors import InputError, UnsupportedError
from flashgen.modifiers import Options, modifiers_from
from flashgen.reference import plain_attention

HEADS, KV_HEADS, WIDTH, CAPACITY = 12, 2, 64, 1500
LENGTHS = (0, 1, 128, 129, 700, 1490)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all keys": {"causal": False},
    "window": {"window": (200, 0)},
    "both sides": {"window": (70, 33), "causal": False},
    "softcap and sinks": {"softcap": 3.0, "sinks": torch.linspace(-1, 1, HEADS)},
    "slopes": {"alibi_slopes": torch.linspace(0.01, 0.3, HEADS)},
    "negative scale": {"scale": -0.1},
}


def _stored(page_size: int, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, room: int = 10) -> Stored:
    """Caches of these sequences on the GPU; 0 is in rows. All memory behind them is NaN."""
    keys, values = ([each.to(dtype) for each in tokens(lengths, KV_HEADS, WIDTH, seed=seed)] for seed in (1, 2))
    given = in_pages(keys, values, page_size, CAPACITY, room=room) if page_size else in_rows(keys, values, CAPACITY)
    return _there(given)


def _there(stored: Stored) -> Stored:
    return Stored(*(None if each is None else each.cuda() for each in stored))  # type: ignore[arg-type]


def _draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float16) -> Tensor:
    return random(*shape, seed=seed).to("cuda", dtype)


def _call(q: Tensor, stored: Stored, **given: Any) -> tuple[Tensor, Tensor]:
    result = flashgen.attention_kvcache(q, **stored.named, return_lse=True, **given)
    assert isinstance(result, tuple)
    return result


def _assert_right(
    o: Tensor, lse: Tensor, q: Tensor, keys: Tensor, values: Tensor, *, causal: bool = True,
    scale: float | None = None, **options: Any,
) -> None:  # fmt: skip
    """One sequence, [rows, heads, width] and [heads, rows], by the accept rule."""
    one = [each.transpose(0, 1)[None] for each in (q, keys, values)]
    results = []
    for dtype in (torch.float64, q.dtype):
        own = [each.to(dtype) for each in one]
        sizes = (1, q.shape[1], q.shape[0], keys.shape[0])
        modifiers = modifiers_from(sizes, one[0], Options(**options)).to(lambda each: each.double())
        mask = "bottom_right" if causal else "none"
        results.append(plain_attention(*own, causal=mask, scale=scale, modifiers=modifiers))
    (exact, exact_lse), (plain, _) = results
    assert max_error(o.transpose(0, 1)[None], exact) <= 2 * max_error(plain, exact) + 1e-5
    assert max_error(lse[None], exact_lse) <= 1e-3


def _of(stored: Stored, index: int, count: int) -> tuple[Tensor, Tensor]:
    """The first keys and values of one sequence."""
    places = [stored.place(index, token) for token in range(count)]
    first, second = (torch.tensor([place[axis] for place in places], dtype=torch.int64).cuda() for axis in (0, 1))
    return stored.k_cache[first, second], stored.v_cache[first, second]


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [
        (0, torch.float16), (0, torch.float32), (1, torch.float16), (64, torch.bfloat16), (100, torch.float16),
        (100, torch.float32),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("seq_q", [1, 5])
def test_values(seq_q: int, page_size: int, dtype: torch.dtype) -> None:
    stored = _stored(page_size, dtype)
    q = _draw(len(LENGTHS), seq_q, HEADS, WIDTH, dtype=dtype)
    o, lse = _call(q, stored)
    assert o.dtype == dtype and lse.dtype == torch.float32
    for index, length in enumerate(LENGTHS):
        _assert_right(o[index], lse[index], q[index], *_of(stored, index, length))
    assert torch.equal(flashgen.attention_kvcache(q, **stored.named), o)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    given = {key: each.cuda() if isinstance(each, Tensor) else each for key, each in OPTIONS[name].items()}
    stored = _stored(48, torch.float16)
    q = _draw(len(LENGTHS), 2, HEADS, WIDTH)
    o, lse = _call(q, stored, **given)
    for index, length in enumerate(LENGTHS):
        _assert_right(o[index], lse[index], q[index], *_of(stored, index, length), **given)


@pytest.mark.parametrize(
    ("page_size", "dtype"), [(0, torch.float16), (64, torch.bfloat16), (100, torch.float32)], ids=str
)
def test_prompts_beside_single_tokens_are_what_separate_calls_are(page_size: int, dtype: torch.dtype) -> None:
    rows = (0, 1, 100, 129, 1, 40)
    whole = _stored(page_size, dtype)
    stored = whole.without([length - new for length, new in zip(LENGTHS, rows, strict=True)])
    stored = _there(stored)
    q = _draw(sum(rows) + 5, HEADS, WIDTH, dtype=dtype)
    new_k, new_v = (torch.full((len(q), KV_HEADS, WIDTH), torch.nan, device="cuda", dtype=dtype) for _ in range(2))
    ends = starts(rows)
    for index, (length, new) in enumerate(zip(LENGTHS, rows, strict=True)):
        keys, values = _of(whole, index, length)
        new_k[int(ends[index]) :][:new], new_v[int(ends[index]) :][:new] = keys[length - new :], values[length - new :]
    copy = stored._replace(k_cache=stored.k_cache.clone(), v_cache=stored.v_cache.clone())
    # Memory that is handed out again holds NaN.
    del keys, values
    torch.full((1 << 22,), torch.nan, device="cuda")
    given = {"cu_seqlens_q": ends.cuda(), "max_seqlen_q": max(rows)}
    o, lse = _call(q, stored, k=new_k, v=new_v, **given)
    for index, (length, new) in enumerate(zip(LENGTHS, rows, strict=True)):
        mine = slice(int(ends[index]), int(ends[index]) + new)
        _assert_right(o[mine], lse[:, mine], q[mine], *_of(whole, index, length))
        if new:
            table = None if copy.block_table is None else copy.block_table[index : index + 1]
            one = Stored(copy.k_cache, copy.v_cache, copy.cache_seqlens[index : index + 1], table)
            if table is None:
                one = one._replace(k_cache=one.k_cache[index : index + 1], v_cache=one.v_cache[index : index + 1])
            alone, _ = _call(q[mine][None], one, k=new_k[mine][None], v=new_v[mine][None])
            assert max_error(alone[0], o[mine].double()) <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert not o[sum(rows) :].any() and (lse[:, sum(rows) :] == -torch.inf).all()
    for caches in (stored, copy):
        for name in ("k_cache", "v_cache"):
            assert torch.equal(getattr(caches, name).view(torch.uint8), getattr(whole, name).view(torch.uint8))


@pytest.mark.parametrize("form", ["number", "head", "token"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_quantised_caches(dtype: torch.dtype, form: str) -> None:
    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with e4m3")
    scale = 40 if dtype == torch.int8 else 1
    keys, values = (
        [(each * scale).clamp(-127, 127).round().to(dtype) if scale > 1 else each.to(dtype)
         for each in tokens(LENGTHS, KV_HEADS, WIDTH, seed=seed)]
        for seed in (1, 2)
    )  # fmt: skip
    fill = 127 if dtype == torch.int8 else torch.nan
    stored = _there(in_pages(keys, values, 48, CAPACITY, fill))
    drawn = _draw(*stored.k_cache.shape[:3], seed=5, dtype=torch.float32).abs() * 0.02 + 0.01
    number: Any = {"number": 0.02, "head": drawn[: len(LENGTHS), 0], "token": drawn}[form]
    q = _draw(len(LENGTHS), 1, HEADS, WIDTH)
    o, lse = _call(q, stored, descale_k=number, descale_v=number)
    for index, length in enumerate(LENGTHS):
        if form == "token":
            own, _ = _of(stored._replace(k_cache=drawn[..., None], v_cache=drawn[..., None]), index, length)
        else:
            own = torch.as_tensor(number, device="cuda") if form == "number" else number[index][:, None]
        wide = [(each.float() * own).half() for each in _of(stored, index, length)]
        exact, exact_lse = plain_attention(
            *(each.double().transpose(0, 1)[None] for each in (q[index], *wide)), causal="bottom_right"
        )
        # What stands for keys and values is rounded here, and not there.
        allowed = 4e-3 * max(1.0, float(exact.abs().max()))
        assert max_error(o[index].transpose(0, 1)[None], exact) <= allowed
        assert max_error(lse[index][None], exact_lse) <= 1e-2


def test_graphs_are_replayed_with_other_lengths() -> None:
    whole = _stored(64, torch.float16, room=64)
    shorter = [0, 1, 100, 120, 3, 1400]
    for known in (True, False):
        flashgen.forget()
        stored = _there(whole._replace(k_cache=whole.k_cache.clone(), v_cache=whole.v_cache.clone()))
        q = _draw(len(LENGTHS), 1, HEADS, WIDTH)
        new = {name: _draw(len(LENGTHS), 1, KV_HEADS, WIDTH, seed=seed) for name, seed in (("k", 7), ("v", 8))}
        if known:
            _call(q, stored, **new)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, lse = _call(q, stored, **new)
        # The last ones count what the step before appended; behind it is NaN.
        for step, lengths in enumerate((LENGTHS, shorter, [length + 1 for length in shorter])):
            stored.cache_seqlens.copy_(ints(lengths))
            q.copy_(_draw(*q.shape, seed=20 + step))
            for each in new.values():
                each.copy_(_draw(*each.shape, seed=30 + step))
            copy = stored._replace(k_cache=stored.k_cache.clone(), v_cache=stored.v_cache.clone())
            graph.replay()
            expected = _call(q, copy, **new)
            # An eager call may find a tuned variant, for which a capture does not look.
            assert not known or (torch.equal(o, expected[0]) and torch.equal(lse, expected[1]))
            assert torch.equal(stored.k_cache.view(torch.uint8), copy.k_cache.view(torch.uint8))
            for index, length in enumerate(lengths):
                _assert_right(o[index], lse[index], q[index], *_of(stored, index, length + 1))


def test_nothing_waits_for_the_gpu_nor_is_made_again(monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    stored = _stored(64, torch.bfloat16)
    q = _draw(len(LENGTHS), 1, HEADS, WIDTH, dtype=torch.bfloat16)
    new = {name: _draw(len(LENGTHS), 1, KV_HEADS, WIDTH, dtype=torch.bfloat16) for name in ("k", "v")}
    sinks = torch.zeros(HEADS, device="cuda")
    packed = {"cu_seqlens_q": starts([1] * len(LENGTHS)).cuda(), "max_seqlen_q": 1, "sinks": sinks}
    calls: dict[str, Callable[[], object]] = {
        "decode": lambda: flashgen.attention_kvcache(q, **stored.named),
        "append": lambda: flashgen.attention_kvcache(q, **stored.named, **new),
        "options": lambda: _call(q, stored, **new, window=(300, 0), softcap=5.0, sinks=sinks),
        "packed": lambda: _call(q[:, 0], stored, **{name: each[:, 0] for name, each in new.items()}, **packed),
    }
    for call in calls.values():
        call()
    monkeypatch.setattr(kvcache_plans, "make", lambda call: pytest.fail("a plan is made again"))
    for name, call in calls.items():
        # So that the queue of launches is not what is timed.
        torch.cuda.synchronize()
        with waits_are_errors():
            start = time.perf_counter()
            for _ in range(200):
                call()
            record_property(f"host_us_{name}", (time.perf_counter() - start) / 200 * 1e6)


def test_other_sizes_compile_nothing() -> None:
    flashgen.forget()
    stored = _stored(64, torch.float16)
    _call(_draw(len(LENGTHS), 1, HEADS, WIDTH), stored)
    before = launch._loaded.cache_info().misses
    for batch in range(1, len(LENGTHS)):
        assert stored.block_table is not None
        part = stored._replace(cache_seqlens=stored.cache_seqlens[:batch], block_table=stored.block_table[:batch])
        _call(_draw(batch, 1, HEADS, WIDTH), part)
    assert launch._loaded.cache_info().misses == before


@pytest.mark.parametrize("num_splits", [1, 4])
def test_with_fixed_splits_a_row_does_not_depend_on_its_neighbours(num_splits: int) -> None:
    stored = _stored(64, torch.bfloat16)
    assert stored.block_table is not None
    q = _draw(len(LENGTHS), 1, HEADS, WIDTH, dtype=torch.bfloat16)
    together, together_lse = _call(q, stored, num_splits=num_splits)
    for index in range(len(LENGTHS)):
        own = slice(index, index + 1)
        alone = stored._replace(cache_seqlens=stored.cache_seqlens[own], block_table=stored.block_table[own])
        o, lse = _call(q[own], alone, num_splits=num_splits)
        assert torch.equal(o, together[own]) and torch.equal(lse, together_lse[own])
        many = 40
        crowd = stored._replace(
            cache_seqlens=torch.cat([stored.cache_seqlens[own], stored.cache_seqlens[-1:].expand(many)]),
            block_table=torch.cat([stored.block_table[own], stored.block_table[-1:].expand(many, -1)]),
        )
        rows = torch.cat([q[own], q[-1:].expand(many, -1, -1, -1)])
        assert torch.equal(_call(rows, crowd, num_splits=num_splits)[0][0], together[index])


def test_repeated_calls_give_the_same_bits_on_every_stream() -> None:
    stored = _stored(0, torch.float16)
    q = _draw(len(LENGTHS), 1, HEADS, WIDTH)
    expected, _ = _call(q, stored)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for _ in range(30):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(_call(q, stored)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in results)


@pytest.mark.parametrize("appends", [False, True])
def test_compiled_is_eager(appends: bool) -> None:
    stored = _stored(64, torch.float16)
    q = _draw(len(LENGTHS), 2, HEADS, WIDTH)
    new = {name: _draw(len(LENGTHS), 2, KV_HEADS, WIDTH, seed=seed) for name, seed in (("k", 7), ("v", 8))}

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
        o = flashgen.attention_kvcache(
            q * 2, k_cache, v_cache, cache_seqlens=lengths, block_table=stored.block_table, window=(300, 0),
            **(new if appends else {}),
        )  # fmt: skip
        assert isinstance(o, Tensor)
        return o + 1

    copies = [each.clone() for each in stored[:2] if each is not None]
    compiled = torch.compile(call, fullgraph=True)(q, *copies, stored.cache_seqlens)
    assert torch.equal(compiled, call(q, stored.k_cache, stored.v_cache, stored.cache_seqlens))
    for copy, cache in zip(copies, stored[:2], strict=True):
        assert cache is not None
        assert torch.equal(copy.view(torch.uint8), cache.view(torch.uint8))


def test_more_sequences_than_a_grid_dimension_holds() -> None:
    batch = 70000
    cache = _draw(batch, 16, 1, 16)
    lengths = torch.arange(batch, device="cuda", dtype=torch.int32) % 17
    q = _draw(batch, 1, 1, 16)
    o, lse = _call(q, Stored(cache, cache, lengths))
    for index in (0, 1, 65535, 65536, batch - 1):
        count = int(lengths[index])
        _assert_right(o[index], lse[index], q[index], cache[index, :count], cache[index, :count])


def test_pages_beyond_32_bits() -> None:
    """Pages of 2**22 elements: of 600, most lie beyond 2**31."""
    keys = torch.empty(600, 64, 8, 8192, device="cuda", dtype=torch.bfloat16)[..., :64]
    pages = torch.tensor([[599, 3, 520]], device="cuda", dtype=torch.int32)
    dense = _draw(1, 192, 8, 64, dtype=torch.bfloat16)
    keys[pages[0].long()] = dense.view(3, 64, 8, 64)
    q, new = (_draw(1, 1, heads, 64, dtype=torch.bfloat16) for heads in (8, 8))
    lengths = torch.tensor([150], device="cuda", dtype=torch.int32)
    o, _ = _call(q, Stored(keys, keys, lengths, pages), k=new, v=new, num_splits=2)
    expected, _ = _call(q, Stored(dense, dense, lengths), k=new, v=new, num_splits=2)
    assert torch.equal(o, expected)
    assert torch.equal(keys[520, 22], new[0, 0])


def test_bad_calls_say_what_to_do_and_write_nothing() -> None:
    stored = _stored(64, torch.float16)
    q = _draw(len(LENGTHS), 1, HEADS, WIDTH)
    new = {name: _draw(len(LENGTHS), 1, KV_HEADS, WIDTH) for name in ("k", "v")}
    before = stored.k_cache.clone()
    for given, message in (
        ({"cache_seqlens": stored.cache_seqlens.cpu()}, "q's device cuda:0, but got cache_seqlens on cpu"),
        ({"block_table": stored.cache_seqlens}, "block_table must be an int32 tensor"),
        ({"block_table": [[0]]}, "block_table must be an int32 tensor"),
        ({"k": new["k"].float()}, "to be appended"),
        ({"q": q.double()}, "float64"),
        ({"q": None}, "q must be a torch.Tensor"),
        ({"window": ([1], 0)}, "each side of window"),
        ({"num_splits": -1}, "num_splits must be"),
        ({"softcap": "high"}, "softcap must be"),
        ({"scale": float("nan")}, "scale must be"),
    ):
        with pytest.raises(InputError, match=message):
            flashgen.attention_kvcache(**{"q": q, **stored.named, **new, **given})
    with pytest.raises(UnsupportedError, match="has no backward"):
        flashgen.attention_kvcache(q.clone().requires_grad_(), **stored.named, **new)
    with pytest.raises(UnsupportedError, match="computes op='forward'"):
        flashgen.attention_kvcache(q, **stored.named, **new, family="triton_fwd")
    assert torch.equal(stored.k_cache.view(torch.uint8), before.view(torch.uint8))


def test_explanations_name_the_kernel() -> None:
    stored = _stored(64, torch.float16)
    selection = flashgen.explain_kvcache(_draw(len(LENGTHS), 1, HEADS, WIDTH), **stored.named, window=(5, 0))
    spec = selection.variant.spec
    assert selection.variant.family.op == spec.op == "decode" and spec.paged and spec.window and not spec.appended


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_other_device() -> None:
    torch.cuda.set_device(0)
    stored = Stored(*(None if each is None else each.to("cuda:1") for each in _stored(64, torch.float16)))  # type: ignore[arg-type]
    q = _draw(len(LENGTHS), 1, HEADS, WIDTH).to("cuda:1")
    o, lse = _call(q, stored)
    assert o.device == q.device and torch.cuda.current_device() == 0
    _assert_right(
        o[4].cuda(), lse[4].cuda(), q[4].cuda(), *(each.cuda() for each in _of(_stored(64, torch.float16), 4, 700))
    )


@pytest.mark.parametrize("page_size", [16, 24])
def test_a_model_says_the_same_as_with_eager_attention(page_size: int) -> None:
    pytest.importorskip("transformers", reason="needs Transformers")
    from paged_llama import decoded_eagerly, decoded_in_pages, model, prompts

    sequences = prompts(50, 1, 37)
    expected = [decoded_eagerly(model("eager", "cuda"), each, 256) for each in sequences]
    assert decoded_in_pages(model("cached_in_pages", "cuda"), sequences, 256, page_size) == expected


def test_a_model_in_16_bits_is_as_near_as_with_eager_attention() -> None:
    pytest.importorskip("transformers", reason="needs Transformers")
    from paged_llama import logits_in_pages, model, prompts

    (sequence,) = prompts(200)
    given = torch.tensor([sequence], device="cuda")
    with torch.no_grad():
        exact = model("eager", "cuda")(given).logits[0].double()
        eager = model("eager", "cuda", torch.bfloat16)(given).logits[0].double()
    mine = logits_in_pages(model("cached_in_pages", "cuda", torch.bfloat16), sequence).double()
    assert (mine - exact).abs().mean() <= 1.5 * (eager - exact).abs().mean()
