"""Comparisons of decodes: everyone gets the same rows and keys, who is wrong has no time, and what times mean."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashgen import compare_decode as module
from flashgen.benchmark import kv_bytes
from flashgen.compare_decode import TABLE, DecodeRow, compare_decode
from flashgen.decode_peers import DECODE_PEERS, Cached, DecodePeer
from flashgen.errors import InputError
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.report_decode import decode_summary, decode_table
from flashgen.spec import Spec

SPEC = Spec("decode", 16, 8, "fp16", "bottom_right")
# The last page is not full.
PROBLEM = Problem(3, 6, 2, 1, 70, page_size=16)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEVICE", "cpu")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Times that no GPU took: the n-th implementation that is right takes 10 n microseconds, from Python 7 more."""
    captured: list[str] = []

    class Replayed:
        def __init__(self, calls: list[Callable[[], Tensor]]) -> None:
            captured.append(str(len(calls)))
            self.us = 10.0 * len(captured)

        def __call__(self) -> None: ...

        def sample(self, *, repeat_ms: int) -> list[float]:
            return [self.us] * 3

    monkeypatch.setattr(module, "Replayed", Replayed)
    monkeypatch.setattr(module, "eager_us", lambda calls: 10.0 * len(captured) + 17.0)
    monkeypatch.setattr(module, "extra_memory", lambda call: 12_345_678)
    monkeypatch.setattr(module, "copies_of", lambda size: 3)
    return captured


def _call(problem: Problem = PROBLEM) -> Cached:
    return module._caches(SPEC, problem, 1)[0]


def _expected(call: Cached) -> Tensor:
    q, k, v = (each.transpose(1, 2).double() for each in (call.q, call.k, call.v))
    return plain_attention(q, k, v, causal="bottom_right")[0].transpose(1, 2)


@pytest.mark.parametrize("seq_q", [1, 4])
@pytest.mark.parametrize("name", ["flashgen", "paged"])
def test_flashgen_and_its_pages(name: str, seq_q: int) -> None:
    call = _call(Problem(3, 6, 2, seq_q, 70, page_size=16))
    o = DECODE_PEERS[name](call)()
    assert o.shape == (3, seq_q, 6, 8)
    assert (o.double() - _expected(call)).abs().max() < 2e-3


def test_pages_are_shuffled_and_hold_the_same_keys() -> None:
    call = _call()
    assert call.pages is not None
    k, v, table = call.pages
    assert k.shape == (15, 16, 2, 16) and v.shape == (15, 16, 2, 8) and table.dtype == torch.int32
    assert sorted(table.flatten().tolist()) == list(range(15)) != table.flatten().tolist()
    for cache, pages in ((call.k, k), (call.v, v)):
        assert torch.equal(pages[table.long()].flatten(1, 2)[:, :70], cache)


def test_every_copy_has_memory_of_its_own() -> None:
    calls = module._caches(SPEC, PROBLEM, 3)
    for name in ("k", "v"):
        tensors = [getattr(each, name) for each in calls]
        assert len({tensor.data_ptr() for tensor in tensors}) == 3
        assert all(torch.equal(tensor, tensors[0]) and tensor.stride() == tensors[0].stride() for tensor in tensors)
    paged = [each.pages for each in calls]
    assert len({pages[0].data_ptr() for pages in paged if pages is not None}) == 3


def test_sdpa_has_a_diagonal_of_its_own() -> None:
    call = _call(Problem(2, 4, 4, 2, 32))
    for name in ("cudnn", "fa2"):
        with patch.dict(sys.modules, {"flash_attn": None}), pytest.raises(Exception, match="aligns several rows"):
            DECODE_PEERS[name](call)


def test_sdpa_sees_groups_of_heads() -> None:
    """FlashAttention runs on the CPU, too."""
    call = module._caches(Spec("decode", 16, 16, "bf16", "bottom_right"), PROBLEM, 1)[0]
    with patch.dict(sys.modules, {"flash_attn": None}):
        assert module._refuted(DECODE_PEERS["fa2"](call), module._truth(call)) is None


def test_packages_choose_their_splits_and_get_lengths() -> None:
    call, seen = _call(), {}

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, num_splits: int = 1) -> object:
        seen["splits"] = num_splits
        return _expected(call), None

    def flash_attn_with_kvcache(q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, causal: bool) -> Tensor:
        seen["lengths"] = cache_seqlens.tolist()
        return _expected(call)

    fa3 = SimpleNamespace(flash_attn_func=flash_attn_func)
    fa2 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    with patch.dict(sys.modules, {"fa3_fwd_interface": fa3, "flash_attn": fa2}):
        for name in ("fa3", "fa2"):
            assert torch.equal(DECODE_PEERS[name](call)(), _expected(call))
    assert seen == {"splits": 0, "lengths": [70, 70, 70]}
    with (
        patch.dict(sys.modules, dict.fromkeys(("fa3_fwd_interface", "flash_attn_interface"))),
        pytest.raises(RuntimeError, match="not installed: fa3_fwd_interface or flash_attn_interface"),
    ):
        DECODE_PEERS["fa3"](call)


@pytest.mark.parametrize("sequence", [0, 2])
@pytest.mark.parametrize("value", [0.01, torch.nan])
def test_who_is_wrong_in_one_number_of_one_sequence(sequence: int, value: float) -> None:
    call = _call()
    truth = module._truth(call)
    right = _expected(call).to(torch.float16)
    assert module._refuted(lambda: right, truth) is None
    wrong = right.clone()
    wrong[sequence, 0, 5, 7] += value
    assert f"wrong: output of sequence {sequence} is off by" in str(module._refuted(lambda: wrong, truth))


def test_rows(planted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: Cached) -> Callable[[], Tensor]:
        raise RuntimeError("takes no [/x] such heads\nat all")

    others: dict[str, DecodePeer] = {
        "cudnn": refuse,
        "fa2": lambda call: lambda: _expected(call),
        "fa3": lambda call: lambda: torch.zeros(3, 1, 6, 8),
    }
    monkeypatch.setattr(module, "DECODE_PEERS", {**DECODE_PEERS, **others})
    rows = compare_decode(SPEC, PROBLEM, ("flashgen", "paged", "cudnn", "fa2", "fa3"), 2.0, 2)
    # Three caches in turns, ten launches at least.
    assert planted == ["12"] * 3
    by_name = {row.name: row for row in rows}
    assert by_name["cudnn"].failure == "takes no [/x] such heads"
    assert str(by_name["fa3"].failure).startswith("wrong: output of sequence 0")
    for place, name in enumerate(("flashgen", "paged", "fa2"), 1):
        row = by_name[name]
        assert row.failure is None and row.measurement is not None and row.caches == 3
        assert (row.measurement.median_us, row.measurement.eager_us) == (10.0 * place, 10.0 * place + 7.0)
        assert row.gbs == pytest.approx(kv_bytes(SPEC, PROBLEM) / (10_000.0 * place))
        assert row.share == pytest.approx(row.gbs / 2.0)
    assert all(by_name[name].measurement is None for name in ("cudnn", "fa3"))


def test_names_are_known(planted: list[str]) -> None:
    with pytest.raises(InputError, match=r"no implementation is called 'fa1'\. Did you mean 'fa"):
        compare_decode(SPEC, PROBLEM, ("flashgen", "fa1"), 1.0)
    assert planted == []


def _rows(*us: float | None, names: tuple[str, ...] = ("flashgen", "paged", "cudnn", "fa3")) -> list[DecodeRow]:
    size = kv_bytes(SPEC, PROBLEM)
    rows = []
    for name, each in zip(names, us, strict=True):
        if each is None:
            rows.append(DecodeRow(SPEC, PROBLEM, name, None, None, None, None, "[/x] no", 4))
            continue
        gbs = size / each / 1e3
        measured = module.Measurement(each, 0.1, 9, each + 5.0)
        rows.append(DecodeRow(SPEC, PROBLEM, name, measured, gbs, gbs / 20.0, 2_500_000, None, 4))
    return rows


def _text(table: Table) -> str:
    out = StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def test_a_table_of_speed_and_of_memory() -> None:
    rows = _rows(2.0, 2.1, None, 1.9)
    text = _text(decode_table(rows, "graph"))
    # 3 * 2 * 70 keys of 48 bytes: 20,160 bytes in 2 microseconds.
    assert "10 50.4 % (2.0)" in text and "[/x] no" in text and "3 x 70" in text and "6/2" in text
    assert "0.950" in text and "1.050" in text
    eager = _text(decode_table(rows, "eager"))
    assert all(us in eager for us in ("7.0", "7.1", "6.9", "[/x] no")) and "vs best" not in eager
    assert "2.5" in _text(decode_table(rows, "memory"))


def test_a_summary_over_problems() -> None:
    rows = _rows(2.0, 2.1, 1.6, 1.9)
    rows += [replace(row, problem=replace(PROBLEM, batch=1)) for row in _rows(2.0, 2.0, 2.5, None)]
    best, paged, caches = decode_summary(rows)
    assert best == "best other / flashgen: 1.000 in the mean, 0.800 to 1.250"
    assert paged == "paged / flashgen: 1.025 in the mean, 1.000 to 1.050"
    assert caches.endswith(": 4, 4")
    assert len(decode_summary(_rows(2.0, names=("fa2",)))) == 1


def test_the_table_is_that_of_the_figures() -> None:
    assert [f"{heads}/{kv_heads}/{width} {batch}x{keys}" for heads, kv_heads, width, batch, keys in TABLE] == [
        "32/8/128 1x4096", "32/8/128 1x65536", "32/8/128 16x4096", "32/8/128 16x32768", "32/8/128 64x8192",
        "32/32/128 16x4096", "64/8/64 1x4096", "64/8/64 64x8192",
    ]  # fmt: skip
