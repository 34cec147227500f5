"""`attention_varlen` on CPU tensors: against each sequence on its own, gradients, tracing, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashgen
from flashgen.errors import InputError, UnsupportedError
from flashgen.modifiers import Options, modifiers_from
from flashgen.reference import plain_attention

Q_LENGTHS, K_LENGTHS = (3, 0, 7, 5, 1), (4, 2, 6, 0, 9)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.4, 4, dtype=torch.float64)},
    "alibi of each": {"alibi_slopes": torch.linspace(0.1, 0.4, 20, dtype=torch.float64).reshape(5, 4)},
    "sinks": {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)},
}


def _sums(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _qkv(extra: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q = _random(sum(Q_LENGTHS) + extra, 4, 8, seed=1, dtype=dtype)
    return q, *(_random(sum(K_LENGTHS) + extra, 2, width, seed=width, dtype=dtype) for width in (8, 6))


def _call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    result = flashgen.attention_varlen(
        q, k, v, _sums(Q_LENGTHS), _sums(K_LENGTHS), max(Q_LENGTHS), max(K_LENGTHS), return_lse=True, **options
    )
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_sequence_is_on_its_own(options: dict[str, Any], causal: bool | str) -> None:
    q, k, v = _qkv(extra=2)
    used = torch.tensor([4, 1, 6, 0, 7], dtype=torch.int32)
    o, lse = _call(q, k, v, causal=causal, seqused_k=used, **options)
    assert o.shape == (18, 4, 6) and lse.shape == (4, 18)
    alignment = {False: "none", True: "bottom_right"}.get(causal, causal)  # type: ignore[call-overload]
    for index, (first, start) in enumerate(zip(_sums(Q_LENGTHS).tolist(), _sums(K_LENGTHS).tolist(), strict=True)):
        if index == len(Q_LENGTHS):
            break
        rows, keys = slice(first, first + Q_LENGTHS[index]), slice(start, start + int(used[index]))
        one = [each.transpose(0, 1)[None] for each in (q[rows], k[keys], v[keys])]
        own = dict(options)
        if own.get("alibi_slopes", torch.empty(0)).dim() == 2:
            own["alibi_slopes"] = own["alibi_slopes"][index]
        modifiers = modifiers_from((1, 4, Q_LENGTHS[index], int(used[index])), one[0], Options(**own))
        exact, exact_lse = plain_attention(*one, causal=alignment, modifiers=modifiers)
        torch.testing.assert_close(o[rows].transpose(0, 1), exact[0])
        torch.testing.assert_close(lse[:, rows], exact_lse[0])
    assert not o[16:].any()
    assert (lse[:, 16:] == -torch.inf).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(options: dict[str, Any]) -> None:
    leaves = [each.requires_grad_() for each in _qkv(extra=1)]
    extra = [options["sinks"].clone().requires_grad_()] if "sinks" in options else []

    def call(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, Tensor]:
        given = options | ({"sinks": sinks[0]} if sinks else {})
        o, lse = _call(q, k, v, causal=True, **given)
        return o, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(call, [*leaves, *extra], fast_mode=True)


def test_negative_and_zero_scale() -> None:
    q, k, v = (each.requires_grad_() for each in _qkv())
    for scale in (-0.3, 0.0):
        assert torch.autograd.gradcheck(
            lambda q, k, v, scale=scale: _call(q, k, v, scale=scale)[0], (q, k, v), fast_mode=True
        )


def test_sequences_of_one_length_are_a_batch() -> None:
    q, k, v = (_random(2, heads, 5, 8, seed=heads) for heads in (4, 2, 2))
    packed = [each.transpose(1, 2).flatten(0, 1) for each in (q, k, v)]
    o = flashgen.attention_varlen(*packed, _sums((5, 5)), _sums((5, 5)), 5, 5, causal=True, window=(2, 0))
    expected = flashgen.attention(q, k, v, causal=True, window=(2, 0))
    assert isinstance(o, Tensor) and isinstance(expected, Tensor)
    torch.testing.assert_close(o, expected.transpose(1, 2).flatten(0, 1))


def test_no_sequence_at_all() -> None:
    q, k, v = _qkv()
    nothing = torch.zeros(1, dtype=torch.int32)
    o = flashgen.attention_varlen(q, k, v, nothing, nothing, 0, 0)
    assert isinstance(o, Tensor) and o.shape == (16, 4, 6) and not o.any()


def test_traced_as_one_operator() -> None:
    q, k, v = (each.float().requires_grad_() for each in _qkv())
    sinks = torch.zeros(4, requires_grad=True)

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        o, lse = _call(q, k, v, causal=True, sinks=sinks)
        return o.square().sum() + lse.sum()

    expected = torch.autograd.grad(loss(q, k, v, sinks), (q, k, v, sinks))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for mine, exact in zip(torch.autograd.grad(compiled(q, k, v, sinks), (q, k, v, sinks)), expected, strict=True):
        torch.testing.assert_close(mine, exact)


def test_the_operators_keep_torchs_rules() -> None:
    q, k, v = (each.float().requires_grad_() for each in _qkv())
    sinks = torch.zeros(4, requires_grad=True)
    given = (_sums(Q_LENGTHS), _sums(K_LENGTHS), None, 7, 9, "none", 0.5, True, None, None, 3, None, 0.5)
    torch.library.opcheck(
        torch.ops.flashgen.forward_varlen.default, (q, k, v, *given, None, torch.ones(2).long(), sinks)
    )


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (each.requires_grad_() for each in _qkv())
    (dq,) = torch.autograd.grad(_call(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": torch.zeros(1, 16, 4, 8)}, r"q must be a tensor \[tokens, heads, head_dim\], but got \(1, 16, 4, 8\)"),
        ({"k": torch.zeros(21, 3, 8)}, "heads"),
        ({"cu_seqlens_q": _sums(Q_LENGTHS).long()}, "cu_seqlens_q must be an int32 vector on cpu"),
        ({"cu_seqlens_k": _sums(K_LENGTHS)[:-1]}, r"must both be \[sequences \+ 1\]"),
        ({"cu_seqlens_q": [0, 3]}, r"cu_seqlens_q must be an int32 vector on cpu, as q, but got \[0, 3\]"),
        ({"max_seqlen_q": -1}, "max_seqlen_q must be a number of tokens, but got -1"),
        ({"max_seqlen_k": 2.5}, "max_seqlen_k must be a number of tokens, but got 2.5"),
        ({"seqused_k": torch.zeros(4, dtype=torch.int32)}, r"seqused_k must be \[5\], but got \[4\]"),
        ({"alibi_slopes": torch.zeros(5)}, r"alibi_slopes must be \[4\] or \[5, 4\]"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[4\]"),
        ({"window": (1,)}, "window must be None or a pair"),
        ({"scale": float("nan")}, "scale must be None or a finite number"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], words: str) -> None:
    q, k, v = _qkv(dtype=torch.float32)
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": _sums(Q_LENGTHS), "cu_seqlens_k": _sums(K_LENGTHS),
        "max_seqlen_q": 7, "max_seqlen_k": 9,
    }  # fmt: skip
    with pytest.raises(InputError, match=words):
        flashgen.attention_varlen(**(arguments | changed))


def test_what_lies_beyond_the_longest_length_is_not_computed() -> None:
    q, k, v = _qkv(dtype=torch.float64)
    short = flashgen.attention_varlen(q, k, v, _sums(Q_LENGTHS), _sums(K_LENGTHS), 4, 5, return_lse=True)
    (o, lse) = short
    rows, keys = (slice(3, 7), slice(6, 11))
    one = [each.transpose(0, 1)[None] for each in (q[rows], k[keys], v[keys])]
    exact, exact_lse = plain_attention(*one)
    torch.testing.assert_close(o[rows].transpose(0, 1), exact[0])
    torch.testing.assert_close(lse[:, rows], exact_lse[0])
    assert not o[7:10].any() and (lse[:, 7:10] == -torch.inf).all()


# torch 2.13's own, on the first dual level of a process.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused() -> None:
    q, k, v = _qkv()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        _call(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_under_torch_func() -> None:
    q, k, v = _qkv()
    (expected,) = torch.autograd.grad(_call(q.requires_grad_(), k, v)[0].sum(), q)
    torch.testing.assert_close(torch.func.grad(lambda q: _call(q, k, v)[0].sum())(q.detach()), expected)


def test_mapped_calls_are_calls_one_after_the_other() -> None:
    q, k, v = _qkv()
    queries = torch.stack([q, q + 1])

    def values(q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _call(q, k, v, causal=True)

    gradients = torch.func.grad(lambda q, v: _call(q, k, v)[0].cos().sum(), argnums=(0, 1))
    for function in (values, gradients):
        actual = torch.vmap(function, in_dims=(0, None))(queries, v)
        for one, *others in zip(actual, *(function(each, v) for each in queries), strict=True):
            torch.testing.assert_close(one, torch.stack(others))
