"""Window, soft cap, ALiBi, bias, mask, segments, dropout, sinks and sequences behind each other, on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.check import Accuracy, max_error
from flashgen.cli.options import TUNABLE
from flashgen.combinations import allowed
from flashgen.evaluate import checked
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import current_gpu
from flashgen.modifiers import NOTHING, Modifiers, Options, modifiers_from
from flashgen.reference import plain_attention
from flashgen.spec import MAX_HEAD_DIM, Causal, DType, Spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
KINDS: tuple[tuple[DType, int], ...] = (("bf16", 64), ("fp16", 128), ("fp32", 40))
SINGLE = [(name,) for name in TUNABLE]
# With every causal by themselves, in pairs with one each, and all at once.
PAIRS = [pair for pair in allowed("forward") if set(pair) <= set(TUNABLE)]
PARTNERS = [name for name in TUNABLE if (name, "varlen") in allowed("forward")]
WIDE = [name for pair in allowed("forward") for name in pair if pair[1].startswith("head_dim") and name in TUNABLE]


def _spec(
    features: Sequence[str], causal: Causal, dtype: DType = "bf16", op: Any = "forward", head_dim: int = 64
) -> Spec:
    flags: dict[str, Any] = {name: dtype if name == "bias" else True for name in features}
    if op == "backward":
        flags.pop("sinks", None)
    return Spec(op, head_dim, head_dim, dtype, causal, "ieee", **flags)


def _assert_right(family: str, spec: Spec) -> None:
    kernel = FAMILIES[family]
    result = checked(Variant(kernel, spec, kernel.default(spec, current_gpu())))
    assert isinstance(result, Accuracy), result


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("features", [*SINGLE, TUNABLE], ids="-".join)
@pytest.mark.parametrize("family", ["triton_fwd", "triton_bwd"])
def test_conformance(family: str, features: tuple[str, ...], causal: Causal) -> None:
    # Each combination in one dtype and width, so that all of them are met.
    dtype, head_dim = KINDS[(len(features[0]) + CAUSAL.index(causal)) % 3]
    _assert_right(family, _spec(features, causal, dtype, FAMILIES[family].op, head_dim))


@pytest.mark.parametrize(("place", "features"), list(enumerate(PAIRS)))
@pytest.mark.parametrize("family", ["triton_fwd", "triton_bwd"])
def test_conformance_of_every_pair(family: str, place: int, features: tuple[str, ...]) -> None:
    dtype, head_dim = KINDS[place // 3 % 3]
    _assert_right(family, _spec(features, CAUSAL[place % 3], dtype, FAMILIES[family].op, head_dim))


@pytest.mark.parametrize("feature", WIDE)
@pytest.mark.parametrize("family", ["triton_fwd", "triton_bwd"])
def test_conformance_in_the_widest_heads(family: str, feature: str) -> None:
    _assert_right(family, _spec((feature,), "bottom_right", "bf16", FAMILIES[family].op, MAX_HEAD_DIM))


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


def _options(names: Sequence[str], seq_q: int, seq_kv: int) -> dict[str, Any]:
    ids = torch.arange(max(seq_q, seq_kv), device="cuda") // 70
    given: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 3.0},
        "alibi": {"alibi_slopes": torch.rand(6, device="cuda") * 0.1},
        "bias": {"bias": _random(2, 1, seq_q, seq_kv, seed=7)},
        "window": {"window": (50, 3)},
        "mask": {"mask": _random(1, 6, seq_q, seq_kv, seed=8) < 1},
        "segments": {"segment_ids_q": ids[:seq_q].expand(2, -1), "segment_ids_kv": ids[:seq_kv].expand(2, -1)},
        "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([-(2**40) - 7, 11], device="cuda")},
        "sinks": {"sinks": torch.randn(6, device="cuda")},
    }
    return {key: value for name in names for key, value in given[name].items()}


def _true_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: str, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients in float64 and, as the yardstick, in bf16."""
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [each.detach().to(dtype).requires_grad_() for each in (q, k, v)]
        given = dict(options)
        for name in ("bias", "sinks"):
            if name in given:
                given[name] = given[name].detach().to(torch.float64 if dtype == torch.float64 else given[name].dtype)
                leaves.append(given[name].requires_grad_())
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        modifiers = _of(sizes, leaves[0], given)
        o, _ = plain_attention(*leaves[:3], causal=causal, modifiers=modifiers)
        results.append([o, *torch.autograd.grad(o, leaves, do.to(dtype))])
    return results[0], results[1]


def _of(sizes: tuple[int, int, int, int], like: Tensor, given: dict[str, Any]) -> Modifiers:
    """Modifiers with float64 tensors, which callers on a GPU may not give."""
    wide = {name: given.pop(name) for name in ("bias", "sinks") if name in given}
    modifiers = modifiers_from(sizes, like.float(), Options(**given))
    if "bias" in wide:
        modifiers = modifiers._replace(bias=wide["bias"].expand(sizes))
    return modifiers._replace(**({"sinks": wide["sinks"]} if "sinks" in wide else {}))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("features", [*SINGLE, *PAIRS, TUNABLE], ids="-".join)
def test_attention_and_its_gradients(features: tuple[str, ...], layout: str) -> None:
    for (seq_q, seq_kv), causal in itertools.product(((131, 200), (1, 77)), ("none", "bottom_right")):
        q, k, v = (
            _random(2, heads, seq, 64, seed=n) for n, (heads, seq) in enumerate([(6, seq_q), (2, seq_kv), (2, seq_kv)])
        )
        do = _random(2, 6, seq_q, 64, seed=9)
        options = _options(features, seq_q, seq_kv)
        true, plain = _true_gradients(q, k, v, do, causal, options)
        leaves = [
            (each if layout == "bhsd" else each.transpose(1, 2)).contiguous().requires_grad_() for each in (q, k, v)
        ]
        extra = [options[name].requires_grad_() for name in ("bias", "sinks") if name in options]
        o = flashgen.attention(*leaves, causal=causal == "bottom_right", layout=layout, **options)
        assert isinstance(o, Tensor)
        grads = torch.autograd.grad(o, [*leaves, *extra], do if layout == "bhsd" else do.transpose(1, 2))
        turned = [each if layout == "bhsd" else each.transpose(1, 2) for each in (o, *grads[:3])]
        for mine, exact, other in zip([*turned, *grads[3:]], true, plain, strict=True):
            # Outputs and gradients of few keys: what rounding alone may cost counts, too.
            allowed = 3 * max(max_error(other, exact), 2.0**-8 * exact.abs().max().item()) + 1e-5
            assert max_error(mine, exact) <= allowed


def test_lengths_are_arguments_of_one_kernel() -> None:
    """Other windows and caps of the same kind compile nothing: the plan is the same."""
    q, k, v = (_random(1, 2, 300, 64, seed=n) for n in range(3))
    for window, cap in (((10, 0), 5.0), ((200, 7), 50.0), ((None, 0), 1.0)):
        o, lse = flashgen.attention(q, k, v, window=window, softcap=cap, return_lse=True)
        modifiers = modifiers_from((1, 2, 300, 300), q, Options(window=window, softcap=cap))
        exact, exact_lse = plain_attention(q.double(), k.double(), v.double(), modifiers=modifiers)
        assert max_error(o, exact) < 0.02
        assert max_error(lse, exact_lse) < 1e-3


def test_blocks_outside_the_window_are_not_visited() -> None:
    """NaN in their keys and values reaches nobody."""
    q, k, v = (_random(1, 2, 2048, 64, seed=n) for n in range(3))
    clean = flashgen.attention(q, k, v, window=(100, 0), causal=True)
    k[:, :, :1000] = torch.nan
    v[:, :, :1000] = torch.nan
    poisoned = flashgen.attention(q, k, v, window=(100, 0), causal=True)
    assert isinstance(clean, Tensor) and isinstance(poisoned, Tensor)
    assert torch.equal(clean[:, :, 1400:], poisoned[:, :, 1400:])


def test_modifiers_in_a_captured_graph() -> None:
    q, k, v = (_random(2, 6, 256, 64, seed=n) for n in range(3))
    options = _options(("bias", "window", "sinks"), 256, 256)
    expected = flashgen.attention(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flashgen.attention(q, k, v, **options)
    assert isinstance(o, Tensor) and isinstance(expected, Tensor)
    o.zero_()
    graph.replay()
    assert torch.equal(o, expected)


def _sequences(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", [(), *((name,) for name in PARTNERS), PARTNERS], ids="-".join)
def test_sequences_behind_each_other(features: tuple[str, ...], causal: bool) -> None:
    q_lengths, k_lengths = [5, 0, 333, 170, 1, 64], [90, 4, 200, 0, 410, 64]
    q = _random(sum(q_lengths), 6, 64, seed=1)
    k, v = (_random(sum(k_lengths), 2, 64, seed=n) for n in (2, 3))
    do = _random(sum(q_lengths), 6, 64, seed=4)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    options = _options(features, 1, 1)
    o, lse = flashgen.attention_varlen(
        *leaves, _sequences(q_lengths), _sequences(k_lengths), max(q_lengths), max(k_lengths), causal=causal,
        return_lse=True, **options,
    )  # fmt: skip
    grads = torch.autograd.grad(o, leaves, do)
    q_starts, k_starts = (_sequences(each).tolist() for each in (q_lengths, k_lengths))
    assert lse.shape == (6, sum(q_lengths))
    pairs = zip(itertools.pairwise(q_starts), itertools.pairwise(k_starts), strict=True)
    for index, ((first, last), (start, stop)) in enumerate(pairs):
        one = [each[a:b].transpose(0, 1)[None] for each, a, b in ((q, first, last), (k, start, stop), (v, start, stop))]
        back = do[first:last].transpose(0, 1)[None]
        if last == first or stop == start:
            assert not o[first:last].any()
            assert not any(
                grad[a:b].any() for grad, a, b in zip(grads, (first, start, start), (last, stop, stop), strict=True)
            )
            continue
        single = {name: value for name, value in options.items() if name != "sinks"}
        modifiers = modifiers_from((1, 6, last - first, stop - start), one[0].float(), Options(**single))
        if "sinks" in options:
            modifiers = modifiers._replace(sinks=options["sinks"].double())
        if modifiers.dropout is not None:
            modifiers = modifiers._replace(dropout=modifiers.dropout._replace(first=index))
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            wide = [each.detach().to(dtype).requires_grad_() for each in one]
            exact, _ = plain_attention(
                *wide, causal="bottom_right" if causal else "none", modifiers=modifiers or NOTHING
            )
            results.append([exact, *torch.autograd.grad(exact, wide, back.to(dtype))])
        mine = [o[first:last], grads[0][first:last], grads[1][start:stop], grads[2][start:stop]]
        for actual, exact, other in zip(mine, *results, strict=True):
            allowed = 3 * max(max_error(other, exact), 2.0**-8 * exact.abs().max().item()) + 1e-5
            assert max_error(actual.transpose(0, 1)[None], exact) <= allowed


def test_lengths_that_are_wrong_reach_no_memory_outside() -> None:
    """A sequence beyond the longest length ends there, and one that ends beyond the tensor ends with it."""
    q, k, v = (_random(300, 2, 64, seed=n).requires_grad_() for n in range(3))
    starts = torch.tensor([0, 200, 10_000], dtype=torch.int32, device="cuda")
    o = flashgen.attention_varlen(q, k, v, starts, starts, 64, 80)
    assert isinstance(o, Tensor)
    grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    one = [each[200:stop].detach().double().transpose(0, 1)[None] for each, stop in ((q, 264), (k, 280), (v, 280))]
    exact, _ = plain_attention(*one)
    assert max_error(o[200:264].transpose(0, 1)[None], exact) < 0.02
    assert not o[64:200].any() and not o[264:].any()
    assert all(each.isfinite().all() for each in grads)
    assert not grads[0][264:].any() and not grads[1][280:].any() and not grads[2][280:].any()
