"""attention() with options on a real GPU: values and gradients against float64 on the CPU, which other tests check."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from modified_calls import FEATURES, options, random
from torch import Tensor
from waiting import waits_are_errors

import flashgen
from flashgen.check import Accuracy
from flashgen.errors import InputError
from flashgen.evaluate import checked
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import current_gpu
from flashgen.spec import Spec

SETS = (*((feature,) for feature in FEATURES), ("softcap", "window"), ("bias", "mask", "sinks"), FEATURES)


def _results(tensors: list[Tensor], given: dict[str, Any], upstream: list[Tensor], **how: Any) -> dict[str, Tensor]:
    """o, lse and the gradients of all that is differentiable, in float64 on the CPU."""
    # With gradients of slopes none would come from kernels.
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


BLOCKS = {
    "triton_fwd": ({"block_q": 16, "block_kv": 16}, {"block_q": 64, "block_kv": 128, "num_stages": 2}),
    "triton_bwd": (
        {"dkdv_block_q": 16, "dkdv_block_kv": 64, "dq_block_q": 16, "dq_block_kv": 128, "dq_num_stages": 2},
        {"dkdv_block_q": 64, "dkdv_block_kv": 32, "dq_block_q": 128, "dq_block_kv": 32, "dkdv_num_warps": 4},
    ),
}


@pytest.mark.parametrize("family", BLOCKS)
def test_every_tile_drops_the_same(family: str) -> None:
    kernel = FAMILIES[family]
    spec = Spec(kernel.op, 64, 64, "fp16", "bottom_right", dropout=True)
    for blocks in BLOCKS[family]:
        config = kernel.default(spec, current_gpu())
        result = checked(Variant(kernel, spec, kernel.config({**config, **blocks})))
        assert isinstance(result, Accuracy), result


def test_replayed_graphs_draw_anew() -> None:
    q, k, v, do = (torch.randn(2, 4, 200, 64, device="cuda") for _ in range(4))
    v.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        o = flashgen.attention(q, k, v, dropout_p=0.4)
        assert isinstance(o, Tensor)
        return o, torch.autograd.grad(o, v, do)[0]

    def is_one_mask(o: Tensor, dv: Tensor) -> bool:
        """O is linear in V by one matrix: dO . O is dV . V if both drop the same."""
        return torch.allclose((do.double() * o.double()).sum(), (dv.double() * v.double()).sum(), rtol=1e-4, atol=1e-2)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert is_one_mask(*step())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, dv = step()
    seen = []
    for _ in range(3):
        graph.replay()
        assert is_one_mask(o, dv)
        seen.append(o.detach().clone())
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(seen, 2))


def test_seeds_and_generators_on_the_gpu() -> None:
    q, k, v = (torch.randn(2, 4, 100, 64, device="cuda", dtype=torch.float16) for _ in range(3))

    def call(**given: Any) -> Tensor:
        o = flashgen.attention(q, k, v, dropout_p=0.4, **given)
        assert isinstance(o, Tensor)
        return o

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first) and not torch.equal(first, second)
    one, same = (call(generator=torch.Generator("cuda").manual_seed(1)) for _ in range(2))
    assert torch.equal(one, same)
    assert torch.equal(call(dropout_seed=(5, 6)), call(dropout_seed=torch.tensor([5, 6], device="cuda")))
    with pytest.raises(InputError, match="generator must be a"):
        call(generator=torch.Generator())
    with waits_are_errors():
        call()
        call(dropout_seed=(5, 6))


def test_the_gradient_of_slopes() -> None:
    drawn = [random(2, heads, seq, 64, seed=seed) for seed, (heads, seq) in enumerate([(4, 150), (2, 210), (2, 210)])]
    given = [*drawn, random(4, seed=5).abs()]
    results = []
    for dtype, device in ((torch.float32, "cuda"), (torch.float64, "cpu")):
        leaves = [each.to(device, dtype).requires_grad_() for each in given]
        o = flashgen.attention(*leaves[:3], causal=True, alibi_slopes=leaves[3])
        assert isinstance(o, Tensor)
        results.append([each.double().cpu() for each in torch.autograd.grad(o.cos().sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
