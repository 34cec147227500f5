"""What `attention_kvcache` hands to a kernel on a GPU, computed by Triton's interpreter instead: as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import Interpreter, interpreter_of
from kvcaches import Stored, in_pages, in_rows, ints, random, starts, tokens
from torch import Tensor

from flashgen import kvcache, kvcache_plans
from flashgen.caches import Cache
from flashgen.check_decode import SCRATCH
from flashgen.descales import FP8
from flashgen.families import FAMILIES, Variant
from flashgen.kvcache_api import attention_kvcache
from flashgen.launch import arguments_of, laid_out
from flashgen.modifiers import Options
from flashgen.serving import Call
from flashgen.space import Config
from flashgen.spec import Spec

CONFIG = Config(block_q=16, block_kv=16, num_warps=4, num_stages=2, blocks_per_sm=2)
HEADS, KV_HEADS, CAPACITY, LENGTHS = 6, 2, 60, (0, 37, 50)
DTYPES = {"int8": torch.int8, "fp8": FP8}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreter_of("decode") as started:
        yield started


@pytest.fixture
def through(interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch) -> Callable[[Call], tuple[Tensor, Any]]:
    """The GPU's path, with a kernel that is bound to views and called with pointers, as there."""

    def select_and_bind(
        spec: Spec, _problem: Any, _family: Any, views: Sequence[Tensor], nothing: bool, _bind: Any
    ) -> tuple[Any, Callable[..., None] | None, bool]:
        launch, names = interpreter.decode_launcher(spec, CONFIG), arguments_of(spec)
        layouts = {name: (view.shape, view.stride()) for name, view in zip(laid_out(spec), views, strict=True)}

        def bound(*pointers: Any) -> None:
            named = dict(zip(names, pointers, strict=True))
            for name, layout in layouts.items():
                named[name] = named[name].as_strided(*layout, named[name].storage_offset())
            launch(*(named[name] for name in names if name not in SCRATCH), num_splits=3)

        variant = Variant(FAMILIES["triton_decode"], spec, CONFIG)
        return SimpleNamespace(variant=variant), None if nothing else bound, False

    monkeypatch.setattr(kvcache_plans, "select_and_bind", select_and_bind)
    monkeypatch.setattr(kvcache_plans, "_scratch", lambda *_: None)
    return kvcache.attend_on_gpu


def _stored(page_size: int, lengths: Sequence[int], cache: str) -> Stored:
    drawn = [tokens(lengths, KV_HEADS, width, seed=width) for width in (32, 16)]
    fill = torch.nan
    if cache in DTYPES:
        drawn = [[(each * 20).round().clamp(-120, 120).to(DTYPES[cache]) for each in sequences] for sequences in drawn]
        fill = 127 if cache == "int8" else torch.nan
    else:
        drawn = [[each.float() for each in sequences] for sequences in drawn]
    if page_size == 0:
        return in_rows(*drawn, CAPACITY, fill)
    return in_pages(*drawn, page_size, CAPACITY, fill, room=10)


CALLS: dict[str, dict[str, Any]] = {
    "rows": {"page_size": 0},
    "pages": {"page_size": 20},
    "small pages": {"page_size": 1},
    "no log-sum-exp": {"page_size": 20, "return_lse": False},
    "all keys": {"page_size": 0, "causal": False},
    "window": {"page_size": 16, "window": (9, 0)},
    "both sides": {"page_size": 16, "window": (7, 3), "causal": False},
    "softcap": {"page_size": 0, "softcap": 1.5},
    "slopes": {"page_size": 20, "alibi_slopes": torch.linspace(0.1, 0.5, HEADS).double()},
    "slopes of each": {"page_size": 0, "alibi_slopes": torch.linspace(0.1, 0.5, 3 * HEADS).reshape(HEADS, 3).T},
    "sinks": {"page_size": 20, "sinks": torch.linspace(-1, 1, 2 * HEADS)[::2].double()},
    "negative scale": {"page_size": 0, "scale": -0.3},
    "no scale": {"page_size": 0, "scale": 0},
    "appended": {"page_size": 0, "new": 4},
    "appended to pages": {"page_size": 20, "new": 2, "window": (20, 0)},
    "packed": {"page_size": 20, "rows": (1, 0, 7), "sinks": torch.linspace(-1, 1, HEADS)},
    "packed and appended": {"page_size": 25, "rows": (3, 7, 1), "appends": True},
    "int8": {"page_size": 20, "cache": "int8", "descale_k": 0.05, "descale_v": 0.1, "new": 1},
    "fp8 by head": {"page_size": 0, "cache": "fp8", "descale_k": torch.linspace(0.02, 0.08, 6).reshape(3, 2)},
    "fp8 by token": {"page_size": 20, "cache": "fp8", "by_token": True, "descale_v": torch.tensor([0.1, 0.05])},
    "int8 by token": {"page_size": 0, "cache": "int8", "by_token": True, "descale_v": torch.full((3, 2), 0.05)},
}


@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(through: Callable[[Call], tuple[Tensor, Any]], name: str, strided: bool) -> None:
    given = dict(CALLS[name])
    stored = _stored(given.pop("page_size"), LENGTHS, given.pop("cache", ""))
    rows, new, by_token = given.pop("rows", None), given.pop("new", 0), given.pop("by_token", False)
    count = sum(rows) + 2 if rows else 3
    q = random(count, *(() if rows else (new or 2,)), HEADS, 32, seed=1).float()
    if rows:
        given |= {"cu_seqlens_q": starts(rows) + 1, "max_seqlen_q": max(rows)}
    if given.pop("appends", False) or new:
        for each, store in (("k", stored.k_cache), ("v", stored.v_cache)):
            drawn = random(count, *(() if rows else (new,)), KV_HEADS, store.shape[3], seed=len(each)) * 20
            given[each] = drawn.to(store.dtype)
    if by_token:
        given["descale_k"] = torch.rand(stored.k_cache.shape[:3], generator=torch.Generator().manual_seed(1)) / 10
    if strided:
        q = _strided(q)
        given |= {each: _strided(given[each]) for each in ("k", "v", "cu_seqlens_q") if each in given}
        table = None if stored.block_table is None else _strided(stored.block_table)
        stored = stored._replace(cache_seqlens=_strided(stored.cache_seqlens), block_table=table)
    mine, other = (stored._replace(k_cache=stored.k_cache.clone(), v_cache=stored.v_cache.clone()) for _ in range(2))
    expected = attention_kvcache(q, **mine.named, **{"return_lse": True, **given})
    actual = through(_call(q, other, **given))
    names = ("o",) if isinstance(expected, Tensor) else ("o", "lse")
    for what, one, two in zip(names, actual, [expected] if isinstance(expected, Tensor) else expected, strict=False):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-5, msg=lambda text, what=what: f"{what}: {text}")
    assert (actual[1] is None) == (len(names) == 1)
    for one, two in zip(mine[:2], other[:2], strict=True):
        assert one is not None and two is not None
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def _strided(tensor: Tensor) -> Tensor:
    """The same with a strided last dimension, and room between rows."""
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
    return wide[..., : 2 * tensor.shape[-1] : 2].copy_(tensor)


def _call(
    q: Tensor, stored: Stored, *, causal: bool = True, scale: float | None = None, return_lse: bool = True, **given: Any
) -> Call:
    named = {"k": "new_k", "v": "new_v"}
    cache = {named.get(name, name): value for name, value in given.items() if named.get(name, name) in Cache._fields}
    options = {name: value for name, value in given.items() if name in Options._fields}
    return Call(
        q, Cache(*stored, **cache), "bottom_right" if causal else "none", scale, return_lse, 3, None, Options(**options)
    )


def test_nothing_is_launched_for_no_rows(through: Callable[[Call], tuple[Tensor, Any]]) -> None:
    stored = _stored(20, LENGTHS, "")
    o, lse = through(_call(torch.ones(3, 0, HEADS, 32), stored))
    assert o.shape == (3, 0, HEADS, 16) and lse.shape == (3, HEADS, 0)
    empty = {"cu_seqlens_q": ints((0, 0, 0, 0)), "max_seqlen_q": 0}
    o, lse = through(_call(torch.ones(4, HEADS, 32), stored, **empty))
    assert not o.any() and (lse == -torch.inf).all()


def test_plans_are_for_kinds_of_calls(
    through: Callable[[Call], tuple[Tensor, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Call] = []
    make = kvcache_plans.make

    def counted(call: Call) -> tuple[kvcache_plans.Plan, bool]:
        made.append(call)
        return make(call)[0], True

    monkeypatch.setattr(kvcache_plans, "make", counted)
    stored = _stored(20, LENGTHS, "int8")
    q = torch.ones(3, 1, HEADS, 32)
    kvcache.forget()
    try:
        results = [through(_call(q, stored, descale_k=number, sinks=torch.ones(HEADS))) for number in (0.1, 0.2, 0.1)]
        assert len(made) == 1
        assert torch.equal(results[0][1], results[2][1]) and not torch.equal(results[0][1], results[1][1])
        shorter = stored._replace(cache_seqlens=ints((0, 20, 3)))
        assert not torch.equal(through(_call(q, shorter, descale_k=0.1, sinks=torch.ones(HEADS)))[1], results[0][1])
        assert len(made) == 1
        for other in ({"softcap": 2.0}, {"softcap": 3.0}, {"window": (5, 0)}, {"causal": False}, {"return_lse": False}):
            through(_call(q, stored, **other))
        assert len(made) == 6
        with pytest.raises(ValueError, match="descale_k must be None"):
            through(_call(q, stored, descale_k=-0.1, sinks=torch.ones(HEADS)))
    finally:
        kvcache.forget()
