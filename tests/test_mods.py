"""Modifications as FlexAttention takes them, the pairs that they leave, and whether results of others are right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen import attention, benchmark, compare, peers
from flashgen.agreement import Truth
from flashgen.benchmark import inputs, usual_options
from flashgen.cli.options import TUNABLE
from flashgen.errors import InputError, UnsupportedError
from flashgen.mods import KNOWN, MODS, Mod, Term, mask_mod, visible_pairs
from flashgen.problem import Problem
from flashgen.spec import Spec

PROBLEM = Problem(2, 4, 2, 40, 40)
SPEC = Spec(head_dim=8, head_dim_v=8, dtype="fp32")
NAMES = [mod.name for mod in MODS]


def _options() -> dict[str, Any]:
    """One of each kind, so small that each matters at 40 tokens."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.arange(40) // 9, torch.arange(40) // 23])
    return {
        "softcap": 0.5,
        "alibi_slopes": torch.rand(4, generator=draw),
        "bias": torch.randn(40, 40, generator=draw) * 3,
        "window": (5, 3),
        "mask": torch.rand(40, 40, generator=draw) < 0.5,
        "segment_ids_q": ids,
        "segment_ids_kv": ids,
        "sinks": torch.randn(4, generator=draw) + 2,
    }


def _qkv() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (each.requires_grad_() for each in inputs(SPEC, PROBLEM, "cpu"))
    return q, k, v


def _ours(qkv: tuple[Tensor, Tensor, Tensor], causal: bool, given: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: flashgen.attention(*qkv, causal=causal, **given)  # type: ignore[return-value]


IDS = ("segment_ids_q", "segment_ids_kv")
SINGLE = [IDS, *((name,) for name in _options() if name not in IDS)]


@pytest.mark.parametrize("names", [*SINGLE, tuple(_options())], ids=", ".join)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_agrees_and_without_an_option_it_does_not(names: tuple[str, ...], causal: bool) -> None:
    given = {name: value for name, value in _options().items() if name in names}
    qkv = _qkv()
    truth = Truth(*qkv, causal, given, gradients=True)
    assert truth.refutes(_ours(qkv, causal, given)) is None
    for absent in (each for each in SINGLE if set(each) <= set(names)):
        rest = {name: value for name, value in given.items() if name not in absent}
        wrong = truth.refutes(_ours(qkv, causal, rest))
        assert wrong is not None and wrong.startswith("wrong: "), absent


def test_wrong_gradients_are_found() -> None:
    qkv = _qkv()
    truth = Truth(*qkv, True, {}, gradients=True)
    for index, name in enumerate(("dq", "dk", "dv")):
        leaves = list(qkv)
        # Equal values, another gradient.
        leaves[index] = 1.01 * leaves[index] - 0.01 * leaves[index].detach()
        wrong = truth.refutes(_ours((leaves[0], leaves[1], leaves[2]), True, {}))
        assert wrong is not None and wrong.startswith(f"wrong: {name} is off by ")
    assert Truth(*qkv, True, {}, gradients=False).refutes(_ours(qkv, True, {})) is None


def test_a_nan_is_wrong() -> None:
    qkv = _qkv()
    truth = Truth(*qkv, False, {}, gradients=False)
    wrong = truth.refutes(lambda: torch.full_like(qkv[0], torch.nan))
    assert wrong is not None and wrong.startswith("wrong: output is off by inf")


def _seen(name: str, i: int, j: int, seq: int) -> bool:
    """By the words that the modifications are known by, at the usual sizes."""
    behind = j <= i
    return {
        "noop": True,
        "causal": behind,
        "ALiBi": behind,
        "sliding window": behind and i - j < 1024,
        "prefix-LM": behind or j < 256,
        "softcap": behind,
        "documents": behind and 4 * i // seq == 4 * j // seq,
        "relative bias": True,
    }[name]


# Beyond the prefix, and beyond the window where there is one.
@pytest.mark.parametrize(
    ("mod", "seq"), [(mod, seq) for mod in MODS for seq in (1, 300 + 800 * ("window" in mod.features))]
)
def test_pairs_are_counted_as_they_are_seen(mod: Mod, seq: int) -> None:
    problem = Problem(2, 3, 1, seq, seq)
    spec = mod.spec(SPEC)
    options = {**usual_options(spec, problem, torch.empty(0)), **(mod.terms or {})}
    expected = 6 * sum(_seen(mod.name, i, j, seq) for i in range(seq) for j in range(seq))
    assert visible_pairs(problem, mask_mod(mod.causal, options), "cpu", rows=64) == expected


def test_pairs_that_differ_between_sequences() -> None:
    given = {name: value for name, value in _options().items() if name not in ("softcap", "bias", "sinks")}
    ids, (left, right), mask = given["segment_ids_q"].tolist(), given["window"], given["mask"].tolist()
    expected = sum(
        ids[b][i] == ids[b][j] and -left <= j - i <= right and mask[i][j]
        for b in range(2) for i in range(40) for j in range(40)
    )  # fmt: skip
    assert visible_pairs(PROBLEM, mask_mod(False, given), "cpu", rows=13) == 4 * expected
    assert visible_pairs(Problem(0, 4, 2, 40, 40), mask_mod(False, given), "cpu") == 0


def test_terms_are_one_expression_in_two_forms() -> None:
    names = ("score", "b", "h", "q_idx", "kv_idx")
    places = {"score": torch.randn(400, 400), "b": torch.tensor(0), "h": torch.tensor(0)}
    places |= {"q_idx": torch.arange(400)[:, None], "kv_idx": torch.arange(400)}
    terms = [term for mod in MODS for term in (mod.terms or {}).items()]
    assert len(terms) == 2
    for kind, term in terms:
        given = [places[name] for name in (names if kind == "score_mod" else names[1:])]
        assert torch.equal(term.function(*given), eval(term.text, {}, places))


def test_what_a_spec_can_say_of_a_modification() -> None:
    assert len(set(NAMES)) == len(NAMES) == 8
    for mod in MODS:
        spec = mod.spec(SPEC)
        assert spec.features == mod.features and spec.causal == ("bottom_right" if mod.causal else "none")
    assert Mod("x", features=("bias",)).spec(Spec(dtype="fp16")).bias == "fp16"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Comparisons on CPU tensors, without a clock; FlexAttention uncompiled. What was timed."""
    timed: list[str] = []

    def interleaved(calls: dict[str, Callable[[], object]], *, rounds: int | None) -> dict[str, benchmark.Measurement]:
        timed.extend(calls)
        return {name: benchmark.Measurement(10.0, 0.1, 5) for name in calls}

    monkeypatch.setattr(compare, "DEVICE", "cpu")
    monkeypatch.setattr(compare, "interleaved", interleaved)
    monkeypatch.setattr(compare, "extra_memory", lambda call: 0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    yield timed


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mod", MODS, ids=NAMES)
def test_every_implementation_has_the_same_work(here: list[str], mod: Mod) -> None:
    problem = Problem(1, 2, 1, 64, 64)
    spec = replace(SPEC, head_dim=16, head_dim_v=16)
    rows = compare.compare(mod.spec(spec), problem, ("flashgen", "flex", "plain", "fa2"), 1, "forward", mod)
    assert [row.name for row in rows] == ["flashgen", "flex", "plain", "fa2"]
    pairs = 2 * sum(_seen(mod.name, i, j, 64) for i in range(64) for j in range(64))
    assert {row.flops for row in rows} == {2.0 * pairs * 32} and {row.mod for row in rows} == {mod.name}
    found = {row.name: row.failure for row in rows}
    assert found["flex"] is None and "flex" in here
    for name in mod.terms or {}:
        assert found["fa2"] == f"takes no {name}"
    assert found["flashgen"] is None and found["plain"] is None
    assert all((row.measurement is None) == (row.failure is not None) == (row.name not in here) for row in rows)


def test_who_computes_something_else_is_not_timed(here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, causal: bool, options: object) -> Callable[[], Tensor]:
        return lambda: attention(q, k, v, causal=not causal)  # type: ignore[return-value]

    monkeypatch.setattr(compare, "PEERS", {**peers.PEERS, "fa4": wrong})
    for work in ("forward", "backward", "training"):
        here.clear()
        rows = compare.compare(replace(SPEC, softcap=True), PROBLEM, ("fa4", "flashgen"), work=work)  # type: ignore[arg-type]
        assert (rows[0].failure or "").startswith("wrong: output is off by ") and rows[0].tflops is None
        assert here == ["flashgen"] and rows[1].flops == rows[0].flops
    assert rows[1].mod is None and rows[1].label == "training d8_fp32_softcap"
    (alone,) = compare.compare(SPEC, PROBLEM, ("fa4",))
    assert alone.measurement is None


def test_lengths_that_differ_are_refused() -> None:
    for spec, mod in (
        (replace(SPEC, causal="bottom_right"), None),
        (replace(SPEC, window=True), None),
        (SPEC, MODS[0]),
    ):
        with pytest.raises(InputError, match="seq_q equals seq_kv"):
            compare.compare(spec, Problem(1, 1, 1, 4, 5), ("flashgen",), mod=mod)


def test_packages_are_told_in_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: object = None, softcap: float = 0.0,
        learnable_sink: object = None,
    ) -> Tensor:  # fmt: skip
        told.update(window_size=window_size, softcap=softcap, learnable_sink=learnable_sink)
        return q

    for name in ("fa3_fwd_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(flash_attn_func=flash_attn_func))
    q = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    peers.PEERS["fa3"](q, q, q, True, {"window": (5, None), "softcap": 2.0})()
    assert told["window_size"] == (5, -1) and told["softcap"] == 2.0
    peers.PEERS["fa4"](q, q, q, True, {"window": (5, None), "sinks": torch.ones(2)})()
    assert told["window_size"] == (5, None) and told["learnable_sink"].dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="takes no sinks, bias"):
        peers.PEERS["fa3"](q, q, q, True, {"sinks": 1, "window": (1, 1), "bias": 1})
    # An older package has not all of the words.
    old = SimpleNamespace(flash_attn_func=lambda q, k, v, causal: q)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", old)
    with pytest.raises(UnsupportedError, match="takes no window_size"):
        peers.PEERS["fa3"](q, q, q, True, {"window": (5, None)})


def test_one_mask_is_all_that_sdpa_has() -> None:
    q = torch.zeros(1, 2, 3, 8)
    for causal, given in ((True, {"mask": q}), (False, {"mask": q, "bias": q})):
        with pytest.raises(UnsupportedError, match="takes one of causal, bias, mask"):
            peers.PEERS["cudnn"](q, q, q, causal, given)
    with pytest.raises(UnsupportedError, match="takes no bias"):
        peers.PEERS["fa2"](q, q, q, False, {"bias": q})


@pytest.mark.parametrize("feature", TUNABLE)
def test_every_feature_is_known_or_refused(here: list[str], feature: str) -> None:
    spec = replace(SPEC, **{feature: "fp32" if feature == "bias" else True})
    given = usual_options(spec, PROBLEM, torch.empty(0))
    assert given
    # Whatever is not known is refused before anything is measured.
    if not set(given) <= KNOWN:
        with pytest.raises(UnsupportedError, match="comparisons know of no"):
            compare.compare(spec, PROBLEM, ("flashgen",))


def test_what_nobody_can_check_is_refused(here: list[str]) -> None:
    odd = Mod("odd", terms={"other": Term("0", torch.zeros_like)})
    with pytest.raises(UnsupportedError, match="comparisons know of no other"):
        compare.compare(SPEC, PROBLEM, ("flashgen",), mod=odd)
