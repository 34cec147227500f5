"""`flashgen.merge`: results over two sets of keys against one call over all of them, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from modified_calls import options, random, tensors
from torch import Tensor

import flashgen
from flashgen.errors import InputError


def _o_lse(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    result = flashgen.attention(q, k, v, return_lse=True, **given)
    assert isinstance(result, tuple)
    return result


def _in_two(q: Tensor, k: Tensor, v: Tensor, at: int, layout: str = "bhsd", **given: Any) -> tuple[Tensor, Tensor]:
    """The keys before `at`, with the sinks, merged with the others."""
    dim = 2 if layout == "bhsd" else 1
    parts = []
    for keys in (slice(0, at), slice(at, None)):
        index = (slice(None),) * dim + (keys,)
        own = {name: each[..., keys] if name in ("bias", "mask") else each for name, each in given.items()}
        if "segment_ids_kv" in own:
            own["segment_ids_kv"] = own["segment_ids_kv"][:, keys]
        if keys.start:
            own.pop("sinks", None)
        parts += _o_lse(q, k[index], v[index], layout=layout, **own)
    return flashgen.merge(*parts, layout=layout)


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize(
    ("features", "layout"),
    [
        ((), "bhsd"),
        ((), "bshd"),
        (("bias", "softcap"), "bhsd"),
        (("mask", "segments"), "bshd"),
        (("sinks", "mask"), "bhsd"),
    ],
)
def test_two_halves_are_the_whole(at: int, features: tuple[str, ...], layout: str) -> None:
    given = options(*features)
    if "mask" in given:
        given["mask"][:, :, 0] = False
    results = []
    for call in (
        lambda *each: _in_two(*each, at, layout, **given),
        lambda *each: _o_lse(*each, layout=layout, **given),
    ):
        leaves = [each.requires_grad_() for each in tensors(layout=layout)]
        o, lse = call(*leaves)
        seen = lse.isfinite()
        upstream = random(*o.shape, seed=4), random(int(seen.sum()), seed=5)
        results.append((o, lse, *torch.autograd.grad((o, lse[seen]), leaves, upstream)))
    torch.testing.assert_close(*results)


def test_finite_differences() -> None:
    o1, lse1 = random(1, 2, 3, 4, seed=1), random(1, 2, 3, seed=2) * 3
    given = [each.requires_grad_() for each in (o1, lse1, random(1, 2, 3, 4, seed=3), random(1, 2, 3, seed=4) * 3)]
    assert torch.autograd.gradcheck(flashgen.merge, given)


def test_rows_that_one_or_neither_saw() -> None:
    o1, o2 = random(1, 1, 4, 2, seed=1), random(1, 1, 4, 2, seed=2)
    lse1, lse2 = (
        torch.tensor([[values]]).double()
        for values in ([-math.inf, 1.0, -math.inf, 5.0], [2.0, -math.inf, -math.inf, 5.0])
    )
    o1[0, 0, [0, 2]], o2[0, 0, [1, 2]] = 0.0, 0.0
    leaves = [each.requires_grad_() for each in (o1, lse1, o2, lse2)]
    o, lse = flashgen.merge(*leaves)
    expected = torch.tensor([[[2.0, 1.0, -math.inf, 5.0 + math.log(2.0)]]], dtype=torch.float64)
    torch.testing.assert_close(lse, expected)
    torch.testing.assert_close(o[0, 0], torch.stack([o2[0, 0, 0], o1[0, 0, 1], torch.zeros(2), (o1 + o2)[0, 0, 3] / 2]))
    gradients = torch.autograd.grad((o.sum(), lse.sum()), leaves)
    assert all(each.isfinite().all() for each in gradients)
    assert not any(each[:, :, 2].any() for each in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_outputs_are_merged_in_fp32_however_large_the_scores(dtype: torch.dtype) -> None:
    q, k, v = tensors(64, 32, dtype=dtype)
    for scale in (1.0, 1e4, 1e30):
        o, lse = _in_two(q, k, v, 7, scale=scale)
        whole, whole_lse = _o_lse(q, k, v, scale=scale)
        assert o.dtype == dtype and lse.dtype == torch.float32
        torch.testing.assert_close(o.float(), whole.float(), rtol=0, atol=4 * torch.finfo(dtype).eps)
        torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)


def test_order_does_not_matter_and_compiled_is_eager() -> None:
    parts = (random(1, 2, 3, 4, seed=1), random(1, 2, 3, seed=2), random(1, 2, 3, 4, seed=3), random(1, 2, 3, seed=4))
    expected = flashgen.merge(*parts)
    torch.testing.assert_close(flashgen.merge(*parts[2:], *parts[:2]), expected)
    compiled = torch.compile(flashgen.merge, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*parts), expected)


def test_what_does_not_fit_is_refused() -> None:
    o, lse = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3)
    for given, word in (
        ((o, lse, None, lse), "o2 must be a torch.Tensor, but got NoneType"),
        ((o, lse.to("meta"), o, lse), "lse1 must be on o1's device cpu, but got meta"),
        ((o, lse, o[..., :2], lse), r"one shape of 4 dimensions, but got \(1, 2, 3, 4\) and \(1, 2, 3, 2\)"),
        ((o[0], lse, o[0], lse), "one shape of 4 dimensions"),
        ((o, lse, o.half(), lse), r"one floating dtype, but got torch\.float32 and torch\.float16"),
        ((o.int(), lse, o.int(), lse), "one floating dtype"),
        ((o, lse, o, lse[:, :1]), r"lse2 must be \[batch, heads, seq_q\] = \[1, 2, 3\].*got \(1, 1, 3\)"),
        ((o, lse.half(), o, lse), r"lse1 must be .* in float32 or float64, but got \(1, 2, 3\) in torch\.float16"),
    ):
        with pytest.raises(InputError, match=word):
            flashgen.merge(*given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"layout='bshd'"):
        flashgen.merge(o, lse, o, lse, layout="bshd")
    with pytest.raises(InputError, match="layout must be 'bhsd' or 'bshd', but got 'bhds'"):
        flashgen.merge(o, lse, o, lse, layout="bhds")
