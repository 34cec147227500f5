"""Every pair of features: computed right, as loops of plain Python say, or refused; and README.md says which."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from modified_calls import FEATURES as OPTIONAL
from modified_calls import options, random
from torch import Tensor

import flashgen
from flashgen import combinations
from flashgen.combinations import OPS, allowed, pairs, refusal, table, together, traits
from flashgen.descales import FP8
from flashgen.dropout import Dropout, kept
from flashgen.errors import InputError, UnsupportedError
from flashgen.features import FEATURES
from flashgen.problem import Problem
from flashgen.select import select

README = Path(__file__).parent.parent / "README.md"
SEQ_Q, SEQ_KV = 4, 6
DESCALES = {"descale_q": 1.5, "descale_k": 0.6, "descale_v": 2.5}
# Lengths of sequences behind each other; those of tests without are the first ones.
Q_LENGTHS, K_LENGTHS = (SEQ_Q, 0, 5, 2), (SEQ_KV, 3, 2, 0)


def test_the_readme_has_this_table() -> None:
    (block,) = re.findall(r"<!-- combinations -->\n(.*?)<!-- /combinations -->", README.read_text(), re.DOTALL)
    assert block.strip() == table(), "write what `flashgen show --combinations` prints between the two comments"


def test_the_table_says_what_every_pair_is() -> None:
    assert set(FEATURES) < set(traits())
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table().splitlines() if line.startswith("|")
    )
    said = {(column, line[0]): cell for line in lines for column, cell in zip(head[1:], line[1:], strict=True)}
    assert {pair for pair, cell in said.items() if cell} == set(pairs())
    reasons = dict(re.findall(r"^(\d+)\. (.*)\.$", table(), re.MULTILINE))
    for pair in pairs():
        forward, backward = (refusal(*pair, op) for op in OPS)
        found = {reasons[number] for number in re.findall(r"\d+", said[pair])} if said[pair] != "yes" else set()
        assert found == {forward, backward} - {None}, pair
        assert said[pair].startswith("no" if forward else "forward" if backward else "yes"), pair


def test_a_kernel_without_gradients_and_several_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(first: str, second: str, op: str) -> str | None:
        if (first, second) == ("softcap", "alibi"):
            return "no gradients" if op == "backward" else None
        return "never" if (first, second) == ("alibi", "window") else None

    monkeypatch.setattr(combinations, "refusal", refuse)
    text = table()
    assert "| alibi | yes | yes | forward (1) |" in text and text.endswith("1. no gradients.\n2. never.")
    assert "| window | yes | yes | yes | no (2) |" in text


def test_the_command_line_prints_it() -> None:
    ended = run("show", "--combinations")
    assert ended.code == 0 and ended.out == table() + "\n" and ended.err == ""


def _call(names: tuple[str, str]) -> tuple[dict[str, Any], str, int]:
    """Of a pair that is computed: options of `attention`, which causal, and the width of heads; fp8 is `_inputs`."""
    fields = {key: value for name in names for key, value in traits()[name].items()}
    given = options(*(name for name in names if name in OPTIONAL), seq_q=SEQ_Q, seq_kv=SEQ_KV)
    if "mask" in given:
        # So many hidden that some of them stand where a causal call sees.
        given["mask"] = random(2, 1, SEQ_Q, SEQ_KV, seed=7) > 0
    if "bias" in given and "fp8" in names:
        given["bias"] = given["bias"].bfloat16()
    known = {*FEATURES, "causal", "head_dim", "head_dim_v", *(["dtype"] if "fp8" in names else [])}
    assert set(fields) <= known, "tell this test how such a call is made, and what it computes"
    return given, fields.get("causal", "none"), fields.get("head_dim", 3)


def _inputs(names: tuple[str, str], q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], dict[str, float]]:
    """q, k and v as a pair takes them, with the descales of fp8."""
    if "fp8" not in names:
        return (q, k, v), {}
    return (q.to(FP8), k.to(FP8), v.to(FP8)), DESCALES


def _exact(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """What they stand for."""
    numbers = DESCALES.values() if tensors[0].dtype == FP8 else (1.0, 1.0, 1.0)
    return [each.double() * number for each, number in zip(tensors, numbers, strict=True)]


def _tolerance(names: tuple[str, str]) -> dict[str, float]:
    """Of fp8: it is computed in fp32 on a CPU and rounded to bf16, which keeps eight bits."""
    return {"rtol": 2.0**-8, "atol": 1e-6} if "fp8" in names else {"rtol": 1e-9, "atol": 1e-12}


def _row(
    q: Tensor, k: Tensor, v: Tensor, place: tuple[int, int, int], causal: str, given: dict[str, Any]
) -> list[float]:
    """One row of the output; q [heads, seq, width], k and v likewise, place (batch, head, row)."""
    b, h, i = place
    key_head, seq_q, seq_kv = h // (q.shape[0] // k.shape[0]), q.shape[1], k.shape[1]
    query, keys = q[h, i].tolist(), k[key_head].tolist()
    diagonal = i + seq_kv - seq_q
    own = i if causal == "top_left" else diagonal
    logits: dict[int, float] = {}
    for j in range(seq_kv):
        score = math.fsum(x * y for x, y in zip(query, keys[j], strict=True)) / math.sqrt(len(query))
        places = {"head": h, "q_idx": i, "kv_idx": j}
        if "score_mod" in given:
            score = eval(given["score_mod"], {"score": score, **places})
        if "softcap" in given:
            score = given["softcap"] * math.tanh(score / given["softcap"])
        if "alibi_slopes" in given:
            score -= float(given["alibi_slopes"][h]) * abs(j - diagonal)
        if "bias" in given:
            score += float(given["bias"][b, h, i, j])
        seen = causal == "none" or j <= own
        if "window" in given:
            left, right = given["window"]
            seen = seen and own - left <= j <= own + right
        if "mask" in given:
            seen = seen and bool(given["mask"][b, 0, i, j])
        if "segment_ids_q" in given:
            seen = seen and int(given["segment_ids_q"][b, i]) == int(given["segment_ids_kv"][b, j])
        if "mask_mod" in given:
            seen = seen and eval(given["mask_mod"], dict(places))
        if seen:
            logits[j] = score
    total = math.fsum(map(math.exp, logits.values()))
    if "sinks" in given:
        total += math.exp(float(given["sinks"][h]))
    weights = {j: math.exp(logit) for j, logit in logits.items()}
    if "dropout_p" in given:
        # Which stay is what tests of dropout are about.
        dropout = Dropout(given["dropout_p"], torch.as_tensor(given["dropout_seed"]), b)
        stays = kept(dropout, (1, q.shape[0]), seq_q, range(seq_kv))[0, h, i]
        weights = {j: weight * bool(stays[j]) / (1 - dropout.p) for j, weight in weights.items()}
    columns = v[key_head].T.tolist()
    return [math.fsum(weights[j] * column[j] for j in weights) / (total or 1.0) for column in columns]


def _rows(batches: Iterator[tuple[int, Tensor, Tensor, Tensor]], causal: str, given: dict[str, Any]) -> Tensor:
    """All rows, sequence after sequence: [tokens, heads, width]."""
    return torch.tensor(
        [
            [_row(q, k, v, (b, h, i), causal, given) for h in range(q.shape[0])]
            for b, q, k, v in batches
            for i in range(q.shape[1])
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("pair", [pair for pair in allowed("forward") if "varlen" not in pair], ids="+".join)
def test_what_goes_together_is_right(pair: tuple[str, str]) -> None:
    given, causal, width = _call(pair)
    drawn = ((4, SEQ_Q, 1), (2, SEQ_KV, 2), (2, SEQ_KV, 3))
    tensors, scaling = _inputs(pair, *(random(2, heads, seq, width, seed=seed) for heads, seq, seed in drawn))
    alignment = False if causal == "none" else causal
    o = flashgen.attention(*tensors, causal=alignment, **given, **scaling)
    assert isinstance(o, Tensor)
    expected = _rows(zip(range(2), *_exact(tensors), strict=True), causal, given)
    torch.testing.assert_close(o.transpose(1, 2).flatten(0, 1).double(), expected, **_tolerance(pair))
    for names in ({pair[0]}, {pair[1]}):
        # Each of the two counts: without one of them it is another number.
        rest = {name: value for name, value in given.items() if name not in options(*names & set(OPTIONAL))}
        without = flashgen.attention(*tensors, causal=alignment, **rest, **scaling)
        assert rest == given or not torch.allclose(o, without)  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", [pair for pair in allowed("forward") if "varlen" in pair], ids="+".join)
def test_what_goes_with_sequences_behind_each_other_is_right(pair: tuple[str, str]) -> None:
    given, causal, width = _call(pair)
    drawn = ((sum(Q_LENGTHS), 4, 1), (sum(K_LENGTHS), 2, 2), (sum(K_LENGTHS), 2, 3))
    tensors, scaling = _inputs(pair, *(random(tokens, heads, width, seed=seed) for tokens, heads, seed in drawn))
    ends = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in (Q_LENGTHS, K_LENGTHS)]
    o = flashgen.attention_varlen(
        *tensors, *ends, max(Q_LENGTHS), max(K_LENGTHS), causal=False if causal == "none" else causal,
        **given, **scaling,
    )  # fmt: skip
    assert isinstance(o, Tensor)
    split = (
        each.transpose(0, 1).split(lengths, 1)
        for each, lengths in zip(_exact(tensors), (Q_LENGTHS, K_LENGTHS, K_LENGTHS), strict=True)
    )
    expected = _rows(zip(range(4), *split, strict=True), causal, given)
    torch.testing.assert_close(o.double(), expected, **_tolerance(pair))


@pytest.mark.parametrize("op", OPS)
def test_what_does_not_go_together_is_refused(op: Any) -> None:
    refused = {pair: reason for pair in pairs() if (reason := refusal(*pair, op)) is not None}
    assert {pair for pair in pairs() if pair not in refused} == set(allowed(op))
    assert ("bias", "varlen") in refused
    for pair, reason in refused.items():
        with pytest.raises((InputError, UnsupportedError), match=re.escape(reason)):
            select(together(*pair, op), Problem(1, 1, 1, 64, 64), combinations.Gpu.named(combinations.GPU))
        if "varlen" in pair and "fp8" not in pair:
            given = options(*(name for name in pair if name in OPTIONAL))
            assert given and not set(given) & set(inspect.signature(flashgen.attention_varlen).parameters)
            q, ends = torch.ones(6, 4, 3), torch.tensor([0, 6], dtype=torch.int32)
            with pytest.raises(TypeError, match="unexpected keyword argument"):
                flashgen.attention_varlen(q, q, q, ends, ends, 6, 6, **given)
