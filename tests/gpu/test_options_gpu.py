"""attention() with options on a real GPU: values and gradients against float64 on the CPU, which other tests check."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from modified_calls import FEATURES, options, random
from torch import Tensor

import flashgen

SETS = (*((feature,) for feature in FEATURES), ("softcap", "window"), ("bias", "mask", "sinks"), FEATURES)


def _results(tensors: list[Tensor], given: dict[str, Any], upstream: list[Tensor], **how: Any) -> dict[str, Tensor]:
    """o, lse and the gradients of all that is differentiable, in float64 on the CPU."""
    leaves = dict(zip("qkv", tensors, strict=True)) | {name: given[name] for name in ("bias", "sinks") if name in given}
    leaves = {name: each.detach().clone().requires_grad_() for name, each in leaves.items()}
    o, lse = flashgen.attention(**{**given, **leaves}, return_lse=True, **how)
    gradients = torch.autograd.grad((o, lse), list(leaves.values()), [each.to(o) for each in upstream])
    found = {"o": o, "lse": lse} | {f"d{name}": each for name, each in zip(leaves, gradients, strict=True)}
    return {name: each.detach().double().cpu() for name, each in found.items()}


@pytest.mark.parametrize("features", SETS, ids="+".join)
@pytest.mark.parametrize(
    ("causal", "layout", "scale"), [(False, "bhsd", None), (True, "bshd", 0.2), ("top_left", "bhsd", -0.1)]
)
def test_values_and_gradients(features: tuple[str, ...], causal: bool | str, layout: str, scale: float | None) -> None:
    seq_q, seq_kv = 150, 210
    shapes = ((2, 4, seq_q, 64), (2, 2, seq_kv, 64), (2, 2, seq_kv, 64))
    tensors = [random(*shape, seed=seed, dtype=torch.float16) for seed, shape in enumerate(shapes, 1)]
    if layout == "bshd":
        tensors = [each.transpose(1, 2).contiguous() for each in tensors]
    given = options(*features, seq_q=seq_q, seq_kv=seq_kv, dtype=torch.float32)
    if "window" in given:
        given["window"] = (70, 33)
    upstream = [random(*tensors[0].shape, seed=4), random(2, 4, seq_q, seed=5)]
    how = {"causal": causal, "layout": layout, "scale": scale}
    wide = {name: each.double() if name in ("bias", "sinks") else each for name, each in given.items()}
    expected = _results([each.double() for each in tensors], wide, upstream, **how)
    there = {name: each.cuda() if isinstance(each, Tensor) else each for name, each in given.items()}
    actual = _results([each.cuda() for each in tensors], there, [each.cuda() for each in upstream], **how)
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0.02, atol=0.02 * max(1.0, float(value[value.isfinite()].abs().max()))
        )


@pytest.mark.parametrize("seq_kv", [0, 64])
def test_rows_that_see_nothing(seq_kv: int) -> None:
    q, k = (torch.randn(1, 2, seq, 64, device="cuda", dtype=torch.float16) for seq in (32, seq_kv))
    mask = torch.zeros(32, seq_kv, dtype=torch.bool, device="cuda")
    o, lse = flashgen.attention(q, k, k, mask=mask, return_lse=True)
    assert not o.any() and (lse == -math.inf).all()
    sinks = torch.tensor([0.5, -1.0], device="cuda")
    o, lse = flashgen.attention(q, k, k, mask=mask, sinks=sinks, return_lse=True)
    assert not o.any() and torch.equal(lse, sinks[None, :, None].expand(1, 2, 32))


def test_a_bias_without_a_gradient_of_its_own() -> None:
    q, k, v = (torch.randn(1, 2, 100, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 100, 100, device="cuda")
    expected = torch.autograd.grad(flashgen.attention(q, k, v, bias=bias.clone().requires_grad_()).sum(), (q, k, v))  # type: ignore[union-attr]
    actual = torch.autograd.grad(flashgen.attention(q, k, v, bias=bias).sum(), (q, k, v))  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_compiled_is_eager() -> None:
    q, k, v = (torch.randn(2, 4, 100, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    given = {
        name: each.cuda() if isinstance(each, Tensor) else each
        for name, each in options(*FEATURES, seq_q=100, seq_kv=100, dtype=torch.float32).items()
    }
    compiled = torch.compile(flashgen.attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v, **given), flashgen.attention(q, k, v, **given))  # type: ignore[arg-type]
