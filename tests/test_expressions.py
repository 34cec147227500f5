"""Expressions: read from text and functions, differentiated, bounded over blocks, and computed."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from mods import MASKS, SCORES
from torch import Tensor

from flashgen.errors import InputError
from flashgen.expressions.bounds import block_of, is_opaque
from flashgen.expressions.emit import statements
from flashgen.expressions.evaluate import evaluate
from flashgen.expressions.given import derivative_of, judge, mask_of, score_of, written
from flashgen.expressions.parse import MAX_NODES, canonical, parse, show

WIDTH = 12.5  # a global that functions below read


def score_by_function(score: Any, b: Any, h: Any, row: Any, key: Any, slopes: Any) -> Any:
    """Named in another way."""
    far = abs(row - key)
    far *= 2
    return tl.where(far > 3, score / WIDTH, score - slopes[h] * far)  # type: ignore[name-defined]  # noqa: F821


def mask_by_function(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) | (kv_idx < 5)


def turned(function: Any) -> Any:
    return functools.wraps(function)(lambda *given: -function(*given))


@turned
def decorated(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def places(**others: Tensor) -> dict[str, Tensor]:
    known = {
        "batch": torch.arange(2)[:, None, None, None], "head": torch.arange(3)[:, None, None],
        "q_idx": torch.arange(7)[:, None], "kv_idx": torch.arange(11), "seq_q": torch.tensor(7),
        "seq_kv": torch.tensor(11),
    }  # fmt: skip
    return known | others


def test_functions_mean_what_their_text_means() -> None:
    text = "where(2 * abs(q_idx - kv_idx) > 3, score / 12.5, score - s[head] * (2 * abs(q_idx - kv_idx)))"
    score = torch.randn(2, 3, 7, 11, dtype=torch.float64)
    slopes = torch.randn(3, dtype=torch.float64)
    results = [
        evaluate(score_of(canonical(source, names, True), (("fp64", 1),)), places(score=score), [slopes], torch.float64)
        for source, names in ((text, ("s",)), (score_by_function, ("slopes",)))
    ]
    far = 2 * (torch.arange(7)[:, None] - torch.arange(11)).abs()
    expected = torch.where(far > 3, score / 12.5, score - slopes[:, None, None] * far)
    assert all(torch.equal(each, expected) for each in results)
    seen = evaluate(mask_of(canonical(mask_by_function, (), False), ()), places(), [], torch.float64)
    assert torch.equal(seen, (torch.arange(11) <= torch.arange(7)[:, None]) | (torch.arange(11) < 5))


@pytest.mark.parametrize("name", SCORES)
def test_canonical_text_reads_as_itself(name: str) -> None:
    text, types = SCORES[name]
    once = canonical(text, ("mod0",) if types != "none" else (), True)
    assert show(parse(once, True)) == once


@pytest.mark.parametrize(
    "text",
    [
        "score", "3 * score - score / 4 + 1", "score * score * score", "exp(score)", "exp2(score / 2)",
        "log(score * score + 1)",
        "log2(exp(score))", "sqrt(score * score + 2)", "sin(score) * cos(2 * score)", "erf(score)", "sigmoid(score)",
        "tanh(score / 3) * 3", "abs(score)", "-score", "1 / (1 + score * score)", "minimum(score, 0.3)",
        "maximum(score, -0.3)",
        "where(kv_idx > q_idx, score * 2, tanh(score))", "score * (kv_idx <= q_idx)", "score.to(tl.float32) * t[head]",
        "where(score > 0, score, 0.1 * score)", "t[head] * 2",
        "to_int(score) // 2 * score", "score + q_idx // 2 - kv_idx % 3",
    ],
)  # fmt: skip
def test_derivatives_are_those_of_autograd(text: str) -> None:
    once = canonical(text, ("t",), True)
    types = (("fp64", 1),)
    score = torch.randn(2, 3, 7, 11, dtype=torch.float64, requires_grad=True)
    table = torch.randn(3, dtype=torch.float64)
    value = evaluate(score_of(once, types), places(score=score), [table], torch.float64).expand(score.shape)
    (expected,) = torch.autograd.grad(value.sum() + 0 * score.sum(), score)
    found = evaluate(derivative_of(once, types), places(score=score.detach()), [table], torch.float64)
    torch.testing.assert_close(found.expand(score.shape), expected, rtol=1e-12, atol=1e-12)


def test_a_derivative_may_be_given() -> None:
    once = canonical(("to_int(score) + score", "3.0 * score"), (), True)
    score = torch.randn(2, 3, 7, 11, dtype=torch.float64)
    assert torch.equal(evaluate(derivative_of(once, ()), places(score=score), [], torch.float64), 3.0 * score)
    assert torch.equal(evaluate(score_of(once, ()), places(score=score), [], torch.float64), score.trunc() + score)


def test_whole_numbers_divide_towards_zero() -> None:
    once = canonical("(q_idx - kv_idx) // 3 * 100 + (q_idx - kv_idx) % 3", (), True)
    found = evaluate(score_of(once, ()), places(score=torch.zeros(1)), [], torch.float64)
    expected = [[math.trunc((i - j) / 3) * 100 + math.fmod(i - j, 3) for j in range(11)] for i in range(7)]
    assert found.tolist() == expected


def test_constants_are_as_exact_as_they_can_be() -> None:
    for text, value in (("1 / 3", 1 / 3), ("sqrt(2)", 2**0.5), ("(q_idx > -1) + (1 > 0)", 2.0), ("-(1 > 0)", -1.0)):
        node = score_of(canonical(f"score + ({text})", (), True), ())
        assert evaluate(node, places(score=torch.zeros(1).double()), [], torch.float64).unique().item() == value
    # Beyond fp32, which Triton has no literals for.
    assert statements([score_of("where((kv_idx > 3), 1e-50, 1e300)", ())], ()) == (
        [],
        ['tl.where(kv_idx > 3, 0.0, float("inf"))'],
    )


def test_whole_numbers_stay_within_32_bits_or_become_floats() -> None:
    square = "score - (kv_idx + 100000) * (kv_idx + 100000) * 1e-10"
    (line,), _ = statements([score_of(canonical(square, (), True), ())], ())
    assert line == "v0 = (kv_idx + 100000).to(tl.float32)"
    # A table's whole numbers may be large: their difference comes first.
    types = (("int64", 1),)
    node = score_of(canonical("score + (t[q_idx] - t[kv_idx])", ("t",), True), types)
    lines, (text,) = statements([node], types)
    assert "to(tl.float32)" in text and not any("float32" in line for line in lines)


def test_a_division_by_zero_in_the_branch_not_taken() -> None:
    once = canonical("where(head == 0, score, score + kv_idx % head)", (), True)
    found = evaluate(score_of(once, ()), places(score=torch.zeros(1).double()), [], torch.float64)
    assert not found[0].any() and found[2].tolist() == [[j % 2 for j in range(11)]]


def test_a_function_is_read_again_when_what_it_captures_changes() -> None:
    texts = []
    for width in (1, 1.0, True, 7):

        def narrow(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return q_idx - kv_idx < width  # noqa: B023

        texts.append(written(None, narrow, None)[1])
    assert texts[0] == "((q_idx - kv_idx) < 1)" and len(set(texts)) == 4


def test_an_index_outside_reads_the_nearest_inside() -> None:
    once = canonical("score + t[kv_idx - 4]", ("t",), True)
    table = torch.tensor([1.0, 2.0, 3.0])
    found = evaluate(score_of(once, (("fp32", 1),)), places(score=torch.zeros(7, 11)), [table], torch.float64)
    assert found[0].tolist() == [1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3]


BOUNDED = {name: text for name, (text, types) in MASKS.items() if types == "none"} | {
    "not": "~((kv_idx > q_idx) | (kv_idx + 9 < q_idx))",
    "xor": "(kv_idx < 8) ^ (q_idx < 8)",
    "unequal": "(kv_idx // 4) != (q_idx // 4)",
    "where": "where(head == 0, kv_idx, -kv_idx) <= where(q_idx > 5, 3, 1 - q_idx)",
    "conditions": "where(head == 1, kv_idx <= q_idx, kv_idx >= q_idx)",
    "product": "(q_idx - 9) * (kv_idx - 7) > 20",
    "remainder": "(kv_idx - 3) % 8 < 4",
    "division": "(kv_idx - 11) // 4 < (q_idx - 8) // 3",
    "extremes": "minimum(maximum(q_idx, 4), 9) - kv_idx * 1.5 > -2",
    "sizes": "kv_idx - seq_kv >= q_idx - seq_q",
    "unknown": "exp(kv_idx * 1.0) > 5.0",
    "number of a condition": "(kv_idx > q_idx) + 0.5 < 1.0",
    "whole number of a condition": "(kv_idx > q_idx) * 2 <= (q_idx > 7) + 0",
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_never_lie(name: str) -> None:
    node = mask_of(canonical(BOUNDED[name], (), False), ())
    some, every = block_of(node)
    sizes = {"seq_q": torch.tensor(23), "seq_kv": torch.tensor(29), "batch": torch.tensor(0)}
    told = 0
    for head, row, key, block in itertools.product((0, 1), range(0, 20, 3), range(0, 24, 4), (1, 4, 7)):
        rows, keys = torch.arange(row, row + block), torch.arange(key, key + block)
        known = sizes | {"head": torch.tensor(head)}
        seen = evaluate(node, known | {"q_idx": rows[:, None], "kv_idx": keys}, [], torch.float64).expand(block, block)
        corners = {"q_first": rows[0], "q_last": rows[-1], "kv_first": keys[0], "kv_last": keys[-1]}
        may, must = (bool(evaluate(each, known | corners, [], torch.float64)) for each in (some, every))
        assert may or not seen.any(), (head, row, key, block)
        assert seen.all() or not must, (head, row, key, block)
        told += (not may) + must
    # Something must be learnt, but for what arithmetic on ranges does not know.
    assert told or name == "unknown"


def test_bounds_of_a_prefix_are_exact() -> None:
    node = mask_of(canonical("(kv_idx <= q_idx) | (kv_idx < t[batch])", ("t",), False), (("int32", 1),))
    lines, texts = statements(block_of(node), (("int32", 1),))
    assert lines == ["v0 = tl.load(MOD0 + tl.minimum(tl.maximum(batch, 0), mod0_size_0 - 1))"]
    assert texts == ["(kv_first <= q_last) | (kv_first < v0)", "(kv_last <= q_first) | (kv_last < v0)"]
    assert not is_opaque(node)
    documents = mask_of(canonical("t[q_idx] == t[kv_idx]", ("t",), False), (("int32", 1),))
    assert is_opaque(documents)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("score +", "no expression"),
        ("score + nothing", "not known"),
        ("score if q_idx else 1.0", "where"),
        ("score * (0 < q_idx < 5)", "two at a time"),
        ("where(q_idx > 1 and kv_idx > 1, score, 0.0)", "& and |"),
        ("__import__('os').system('true')", "cannot be part"),
        ("score.data_ptr()", "cannot be part"),
        ("t[q_idx, kv_idx] + score", "1 dimensions"),
        ("t + score", "which element"),
        ("t[score]", "whole numbers"),
        ("q_idx < kv_idx", "is a condition"),
        ("score & 3", "must be a condition"),
        ("score // 2", "whole number"),
        ("where(q_idx, score, 0.0)", "must be a condition"),
        ("[score]", "cannot be part"),
        ("+".join(["score"] * MAX_NODES), "parts"),
        ("lambda: score", "cannot be part"),
        ("score * (6 & 1)", "must be a condition"),
        ("score * ~3", "must be a condition"),
        ("score * 3000000000", "32 bits"),
        ("score.to(tl.float16)", "float32 and int32"),
        ("where(q_idx > 1, score, float('nan'))", "no number"),
        ("score + 0.0 / 0.0", "no number"),
        ("score + 1 // 0", "no number"),
        ("1.5 // 2", "whole number"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_piece(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        score_of(canonical(text, ("t",), True), (("fp32", 1),))


def unreadable(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    for _ in range(3):
        score = score * 2
    return score


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((unreadable, None, None), "may assign names"),
        ((mask_by_function, None, None), "must take"),
        ((lambda s, b, h, q, k: s, None, None), "def"),
        ((5, None, None), "def"),
        ((None, ("kv_idx > 0", "1.0"), None), "mask_mod must be one"),
        ((("score", "1.0", "2.0"), None, None), "a pair with its derivative"),
        ((["score", "1.0"], None, None), "def"),
        ((decorated, None, None), "undecorated"),
        (("score", None, {1: torch.ones(3)}), "must be text"),
        (("score", None, dict.fromkeys("abcde", torch.ones(3))), "may be 4"),
        ((None, None, {"t": torch.ones(3)}), "neither"),
        (("score", None, [torch.ones(3)]), "dict"),
        (("score", None, {"score": torch.ones(3)}), "means nothing else"),
        (("score", None, {"a b": torch.ones(3)}), "a word"),
        ((score_by_function, None, None), "mod_tensors does not have"),
    ],
)
def test_what_is_given_is_judged(given: tuple[Any, Any, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        written(*given)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.tensor(1.0), "one dimension or more"),
        (torch.ones(3, dtype=torch.complex64), "complex"),
        (torch.ones(0), "elements"),
        (torch.ones(2**31, dtype=torch.bool, device="meta"), "q's device"),
        ("text", "str"),
    ],
)
def test_tensors_are_judged(tensor: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        judge("(score + mod0[head])", None, [tensor], torch.device("cpu"))
