"""The caller's own expressions on this machine's GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from mods import MASKS, SCORES, features
from torch import Tensor

import flashgen
from flashgen.check import Accuracy, max_error
from flashgen.evaluate import checked
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import current_gpu
from flashgen.problem import Problem
from flashgen.select import select
from flashgen.spec import Causal, DType, Spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ALL = [("score_mod", name) for name in SCORES] + [("mask_mod", name) for name in MASKS]
KINDS: tuple[tuple[DType, int], ...] = (("bf16", 64), ("fp16", 128), ("fp32", 40))


@pytest.mark.parametrize("family", ["triton_fwd", "triton_bwd"])
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_conformance(kind: str, name: str, family: str) -> None:
    kernel = FAMILIES[family]
    dtype, head_dim = KINDS[len(name) % 3]
    causal: Causal = "bottom_right" if name in ("table", "dilated", "random") else "none"
    spec = Spec(kernel.op, head_dim, head_dim, dtype, causal, **features(kind, name))
    result = checked(Variant(kernel, spec, kernel.default(spec, current_gpu())))
    assert isinstance(result, Accuracy), result


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("name", ["prefix", "window by head", "documents", "chunks"])
def test_the_config_that_a_call_gets(name: str, op: Any) -> None:
    spec = Spec(op, 128, 128, "bf16", **features("mask_mod", name))
    selection = select(spec, Problem(2, 4, 2, 4096, 4096), current_gpu())
    result = checked(selection.variant)
    assert isinstance(result, Accuracy), (result, str(selection))


@triton.jit
def slanted(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, slopes: Any) -> Any:
    far = tl.abs(q_idx - kv_idx)
    return score - tl.load(slopes + head) * far


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


def test_a_function_of_triton_is_alibi() -> None:
    q, k, v = (_random(2, heads, 700, 64, seed=heads).requires_grad_() for heads in (8, 4, 4))
    slopes = torch.rand(8, device="cuda") * 0.1
    do = _random(2, 8, 700, 64, seed=9)
    results = []
    for given in ({"score_mod": slanted, "mod_tensors": {"slopes": slopes}}, {"alibi_slopes": slopes}):
        o = flashgen.attention(q, k, v, causal=True, **given)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    for mine, other in zip(*results, strict=True):
        assert max_error(mine, other) <= 2e-2 * other.abs().max().item()


@pytest.mark.parametrize(
    "mask", ["(kv_idx <= q_idx) | (kv_idx < 256)", "abs(q_idx - kv_idx) <= 200", "kv_idx % 2 == 0"]
)
def test_many_blocks(mask: str) -> None:
    """Enough of them that the search for the blocks that are seen takes several steps."""
    seq_q, seq_kv = 1500, 20000
    q, k, v = _random(1, 2, seq_q, 64, seed=1), _random(1, 1, seq_kv, 64, seed=2), _random(1, 1, seq_kv, 64, seed=3)
    do = _random(1, 2, seq_q, 64, seed=4)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    o = flashgen.attention(*leaves, mask_mod=mask)
    assert isinstance(o, Tensor)
    found = (o, *torch.autograd.grad(o, leaves, do))
    dense = eval(mask, {"q_idx": torch.arange(seq_q)[:, None], "kv_idx": torch.arange(seq_kv), "abs": torch.abs})
    exact = [each.detach().double().cpu().requires_grad_() for each in leaves]
    expected_o = flashgen.attention(*exact, mask=dense.expand(seq_q, seq_kv))
    assert isinstance(expected_o, Tensor)
    expected = (expected_o, *torch.autograd.grad(expected_o, exact, do.double().cpu()))
    for mine, other in zip(found, expected, strict=True):
        assert max_error(mine.cpu(), other) <= 2e-2 * other.abs().max().item()


def test_compiled_and_captured() -> None:
    q, k, v = (_random(1, 4, 300, 64, seed=n) for n in range(3))
    table = torch.randn(4, 300, device="cuda")
    given: dict[str, Any] = {"score_mod": "score + t[head, kv_idx]", "mod_tensors": {"t": table}}
    eager = flashgen.attention(q, k, v, **given)
    assert isinstance(eager, Tensor)
    compiled = torch.compile(flashgen.attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v, **given), eager)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v, **given)
    table.zero_()
    graph.replay()
    assert isinstance(out, Tensor) and torch.equal(out, flashgen.attention(q, k, v, score_mod="score + 0.0 * kv_idx"))  # type: ignore[arg-type]
