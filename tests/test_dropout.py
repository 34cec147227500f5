"""Dropout on CPU tensors: which probabilities stay, how random that is, what controls it, what torch makes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modified_calls import tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.dropout import Dropout, kept, philox
from flashgen.errors import InputError

LOW = 0xFFFFFFFF
# From Random123, kat_vectors.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LOW,) * 4, (LOW,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Salmon et al. 2011, section 3.3, in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & LOW, (a >> 32) ^ c3 ^ k1, a & LOW
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert _philox(counter, key) == words
    assert (
        tuple(map(int, philox([torch.tensor(each) for each in counter], [torch.tensor(each) for each in key]))) == words
    )


def _kept(p: float, seed: int, offset: int, *sizes: int, keys: range | None = None, first: int = 0) -> Tensor:
    batch, heads, seq_q, seq_kv = sizes
    dropout = Dropout(p, torch.tensor([seed, offset]), first)
    return kept(dropout, (batch, heads), seq_q, range(seq_kv) if keys is None else keys)


@pytest.mark.parametrize(("seed", "offset"), [(5, 0), (-0x123456789ABCDEF, 0x89ABCDEF), (2**63 - 1, LOW), (-1, 2**40)])
def test_what_is_kept_is_as_documented(seed: int, offset: int) -> None:
    mask = _kept(0.4, seed, offset, 2, 3, 37, 50, first=4)
    key = seed & LOW, seed >> 32 & LOW
    for b, h, r, k in itertools.product((0, 1), (0, 2), (0, 7, 8, 15, 16, 36), (0, 7, 8, 17, 24, 49)):
        counter = (k // 16 * 8 + k % 8, r // 16 * 8 + r % 8, (b + 4) * 3 + h, offset & LOW)
        word = _philox(counter, key)[2 * (r // 8 % 2) + k // 8 % 2]
        assert bool(mask[b, h, r, k]) == (word >= round(0.4 * 2**32))


def test_what_is_kept_depends_on_the_place_alone() -> None:
    whole = _kept(0.5, 3, 4, 3, 2, 40, 70)
    for start, stop in ((0, 70), (0, 1), (16, 48), (3, 9), (69, 70), (5, 5)):
        assert torch.equal(_kept(0.5, 3, 4, 3, 2, 40, 70, keys=range(start, stop)), whole[..., start:stop])
    assert torch.equal(_kept(0.5, 3, 4, 3, 2, 9, 17), whole[:, :, :9, :17])
    assert torch.equal(_kept(0.5, 3, 4, 1, 2, 40, 70, first=2), whole[2:])
    # Rows and keys in the millions have counters of their own.
    far = _kept(0.5, 3, 4, 1, 1, 16, 0, keys=range(2**31 - 640, 2**31 - 512))
    assert not torch.equal(far, whole[:1, :1, :16, :64].repeat(1, 1, 1, 2))
    # What a smaller probability drops, a larger one drops too.
    assert not (_kept(0.6, 3, 4, 3, 2, 40, 70) & ~whole).any()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked(p: float) -> None:
    """Within six standard deviations, in every row, every column, every head and as a whole."""
    stays = _kept(p, 1234, 5, 2, 4, 256, 320).double()
    for dims in ((-1,), (-2,), (-1, -2), (0, 1, 2), (0, 1, 2, 3)):
        count = math.prod(stays.shape[dim] for dim in dims)
        assert (stays.mean(dims) - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / count)


def _correlation(one: Tensor, other: Tensor, p: float) -> float:
    """In standard deviations of what independent elements would have."""
    deviation = ((one.double() - (1 - p)) * (other.double() - (1 - p))).mean() / (p * (1 - p))
    return float(deviation.abs()) * math.sqrt(one.numel())


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_elements_are_independent(p: float) -> None:
    mask = _kept(p, 7, 8, 2, 4, 256, 320)
    for down, right in itertools.product((0, 1, 2, 7, 8, 9, 16, 64), (0, 1, 2, 3, 7, 8, 9, 16, 64)):
        if (down, right) != (0, 0):
            near = mask[..., : 256 - down, : 320 - right]
            assert _correlation(near, mask[..., down:, right:], p) < 6, (down, right)
    assert _correlation(mask[..., :256], mask[..., :256].transpose(2, 3), p) < 8  # counts each pair twice
    for head, other in itertools.combinations(mask.flatten(0, 1), 2):
        assert _correlation(head, other, p) < 6
    seeds = ((7, 9), (8, 8), (8, 7), (7 + 2**32, 8), (7 - 2**63, 8), (7, 8 + 2**31))
    for seed, offset in seeds:
        assert _correlation(mask, _kept(p, seed, offset, 2, 4, 256, 320), p) < 6, (seed, offset)


def _attend(*given: Tensor, **options: Any) -> Tensor:
    result = flashgen.attention(*given, **options)
    assert isinstance(result, Tensor)
    return result


def test_dropped_probabilities_by_the_formula() -> None:
    q, k, v = tensors(20, 33)
    o, lse = flashgen.attention(q, k, v, causal=True, dropout_p=0.3, dropout_seed=(5, 6), return_lse=True)
    keys, values = (each.repeat_interleave(2, 1) for each in (k, v))
    scores = q @ keys.transpose(2, 3) * 3**-0.5
    p = scores.masked_fill(~torch.ones(20, 33, dtype=torch.bool).tril(13), -math.inf).softmax(-1)
    torch.testing.assert_close(o, (p * _kept(0.3, 5, 6, 2, 4, 20, 33) / 0.7) @ values)
    assert torch.equal(lse, flashgen.attention(q, k, v, causal=True, return_lse=True)[1])


def test_all_and_nothing() -> None:
    q, k, v = (each.requires_grad_() for each in tensors(20, 33))
    plain, plain_lse = flashgen.attention(q, k, v, return_lse=True)
    for p in (1, 1.0, 1 - 2**-53):
        o, lse = flashgen.attention(q, k, v, dropout_p=p, return_lse=True)
        assert not o.any() and torch.equal(lse, plain_lse)
        assert not any(each.any() for each in torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True))
        # The log-sum-exp has the gradient that it had.
        actual, expected = (torch.autograd.grad(each.sum(), (q, k), retain_graph=True) for each in (lse, plain_lse))
        torch.testing.assert_close(actual, expected)
    before = torch.get_rng_state()
    for p in (0, 0.0, False):
        assert torch.equal(_attend(q, k, v, dropout_p=p, dropout_seed=(1, 2)), plain)
    assert torch.equal(torch.get_rng_state(), before)
    for p in (5e-324, 1e-300, 1e-12):
        torch.testing.assert_close(_attend(q, k, v, dropout_p=p), plain)


def test_seeds_and_generators() -> None:
    q, k, v = tensors(20, 33)
    call = lambda **given: _attend(q, k, v, dropout_p=0.5, **given)  # noqa: E731
    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first) and not torch.equal(first, second)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    one, same, other = (call(generator=each) for each in generators)
    assert (
        torch.equal(one, same) and not torch.equal(one, other) and not torch.equal(call(generator=generators[0]), one)
    )
    by_pair = call(dropout_seed=(-5, LOW))
    assert torch.equal(by_pair, call(dropout_seed=torch.tensor([-5, LOW])))
    assert torch.equal(by_pair, call(dropout_seed=torch.tensor([[-5, 0], [LOW, 0]])[:, 0]))
    assert not torch.equal(by_pair, call(dropout_seed=(-5, 0)))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 1.5}, "dropout_p must be a number from 0 to 1, but got 1.5"),
    ({"dropout_p": -0.1}, "dropout_p must be"),
    ({"dropout_p": math.nan}, "dropout_p must be"),
    ({"dropout_p": True}, "dropout_p must be"),
    ({"dropout_p": "0.1"}, "dropout_p must be"),
    ({"dropout_p": 0.1, "dropout_seed": 5}, "dropout_seed must be"),
    ({"dropout_p": 0.1, "dropout_seed": (5, 6, 7)}, "dropout_seed must be"),
    ({"dropout_p": 0.1, "dropout_seed": (5, 0.5)}, "dropout_seed must be"),
    ({"dropout_p": 0.1, "dropout_seed": (2**63, 0)}, "a seed of 64 bits"),
    ({"dropout_p": 0.1, "dropout_seed": (0, -1)}, "an offset from 0"),
    ({"dropout_p": 0.1, "dropout_seed": torch.ones(2)}, "dropout_seed must be int64"),
    ({"dropout_p": 0.1, "dropout_seed": torch.ones(3).long()}, "dropout_seed must be int64"),
    ({"dropout_p": 0.1, "dropout_seed": torch.ones(2).long().to("meta")}, "on q's device cpu"),
    ({"dropout_p": 0.1, "generator": 5}, "generator must be a torch.Generator on cpu"),
    ({"dropout_p": 0.1, "dropout_seed": (1, 2), "generator": torch.Generator()}, "Leave one of them out"),
]


@pytest.mark.parametrize(("given", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes_are_told(given: dict[str, Any], words: str) -> None:
    q, k, v = tensors()
    with pytest.raises(InputError, match=words):
        flashgen.attention(q, k, v, **given)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    flat = [each[0].transpose(0, 1) for each in (q, k[:, :, :4], v[:, :, :4])]
    with pytest.raises(InputError, match=words):
        flashgen.attention_varlen(*flat, starts, starts, 4, 4, **given)


def _is_one_mask(o: Tensor, v: Tensor, **how: Any) -> bool:
    """O is linear in V by one matrix: the backward drops what the forward dropped if dO . O is dV . V."""
    do = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape)
    (dv,) = torch.autograd.grad(o, v, do, **how)
    return torch.allclose((do * o).sum(), (dv * v).sum())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_draw_anew(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    q, k, v = (each.requires_grad_() for each in tensors(20, 33))
    torch.manual_seed(0)
    first, second = compiled(q, k, v, dropout_p=0.4), compiled(q, k, v, dropout_p=0.4)
    torch.manual_seed(0)
    assert torch.equal(first, _attend(q, k, v, dropout_p=0.4)) and not torch.equal(first, second)
    assert _is_one_mask(first, v) and _is_one_mask(second, v)
    for seed in ((3, 4), (5, 4), torch.tensor([3, 4])):
        given = {"dropout_p": 0.4, "dropout_seed": seed}
        assert torch.equal(compiled(q, k, v, **given), _attend(q, k, v, **given))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="knows no generator"):
        compiled(q, k, v, dropout_p=0.4, generator=torch.Generator())
    torch._dynamo.reset()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_drop_the_same_again(use_reentrant: bool) -> None:
    q, k, v = (each.requires_grad_() for each in tensors(20, 33))
    call: Callable[..., Tensor] = lambda *given: _attend(*given, dropout_p=0.4)  # noqa: E731
    torch.manual_seed(0)
    expected = torch.autograd.grad(call(q, k, v).cos().sum(), (q, k, v))
    torch.manual_seed(0)
    o = checkpoint(call, q, k, v, use_reentrant=use_reentrant)
    torch.rand(7)  # whatever was drawn meanwhile
    o.cos().sum().backward()  # type: ignore[union-attr]
    assert all(torch.equal(leaf.grad, each) for leaf, each in zip((q, k, v), expected, strict=True))  # type: ignore[arg-type]


def test_mapped_calls_follow_vmaps_rule() -> None:
    q, k, v = tensors(20, 33)
    three = torch.stack([q, q, q])
    call = lambda q, **given: _attend(q, k, v, dropout_p=0.4, **given)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(three)
    same = torch.vmap(call, randomness="same")(three)
    different = torch.vmap(call, randomness="different")(three)
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[1])
    seeds = torch.tensor([[1, 2], [3, 4], [1, 5]])
    expected = [call(q, dropout_seed=seed) for seed in seeds]
    assert torch.equal(torch.vmap(lambda q, seed: call(q, dropout_seed=seed))(three, seeds), torch.stack(expected))
    # As are gradients by several upstreams.
    leaf = q.requires_grad_()
    o = _attend(leaf, k, v, dropout_p=0.4)
    upstream = torch.stack([torch.ones_like(o), o.detach()])
    (batched,) = torch.autograd.grad(o, leaf, upstream, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(o, leaf, each, retain_graph=True)[0] for each in upstream]
    torch.testing.assert_close(batched, torch.stack(rows))


def test_each_sequence_is_one_of_the_batch() -> None:
    q_lengths, k_lengths = (3, 0, 20, 5), (4, 2, 33, 9)
    q_ends, k_ends = ([0, *itertools.accumulate(each)] for each in (q_lengths, k_lengths))
    q, k, v = (torch.randn(length, heads, 8).double() for length, heads in ((28, 4), (48, 2), (48, 2)))
    starts = [torch.tensor(each, dtype=torch.int32) for each in (q_ends, k_ends)]
    v.requires_grad_()
    o = flashgen.attention_varlen(q, k, v, *starts, 20, 33, dropout_p=0.4, dropout_seed=(5, 6))
    assert isinstance(o, Tensor) and _is_one_mask(o, v)
    for index in (0, 2, 3):
        rows, keys = slice(*q_ends[index : index + 2]), slice(*k_ends[index : index + 2])
        one = [each.transpose(0, 1) for each in (q[rows], k[keys], v[keys])]
        p = (one[0] @ one[1].repeat_interleave(2, 0).transpose(1, 2) * 8**-0.5).softmax(-1)
        stays = _kept(0.4, 5, 6, 1, 4, q_lengths[index], k_lengths[index], first=index)[0]
        torch.testing.assert_close(o[rows].transpose(0, 1), (p * stays / 0.6) @ one[2].repeat_interleave(2, 0))
    drawn = [flashgen.attention_varlen(q, k, v, *starts, 20, 33, dropout_p=0.4) for _ in range(2)]
    assert not torch.equal(*drawn)  # type: ignore[arg-type]
