"""The operator behind `attention` under torch.compile: its contract, its shapes, and that lengths never recompile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.errors import InputError, UnsupportedError
from flashgen.tensors import causal_from

CAUSAL = (False, True, "bottom_right", "top_left")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _qkv(
    seq_q: int = 9, seq_kv: int = 13, *, width_v: int = 24, layout: str = "bhsd", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seq_q * 100 + seq_kv)
    shapes = ((2, 6, seq_q, 24), (2, 2, seq_kv, 24), (2, 2, seq_kv, width_v))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    q, k, v = drawn if layout == "bhsd" else [tensor.transpose(1, 2).contiguous() for tensor in drawn]
    return q, k, v


# How the same values may lie in memory.
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "with gaps": lambda tensor: torch.cat([tensor, tensor], dim=3)[..., : tensor.shape[3]],
    "strided last": lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda tensor: tensor[:1].expand_as(tensor),
}


def _opcheck(*arguments: object) -> None:
    results = torch.library.opcheck(torch.ops.flashgen.forward, arguments)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("layout", "width_v"), [("bhsd", 24), ("bhsd", 40), ("bshd", 24), ("bshd", 40)])
def test_the_operator_keeps_its_contract(memory: str, layout: str, width_v: int) -> None:
    """Schema, fake kernel and real results agree in shape, dtype and strides; also with symbolic sizes."""
    q, k, v = map(MEMORY[memory], _qkv(width_v=width_v, layout=layout))
    _opcheck(q, k, v, "bottom_right", None, layout, True, None)


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "causal", "scale", "return_lse"),
    [(9, 13, "none", 0.3, False), (13, 9, "bottom_right", -0.3, True), (1, 1, "top_left", 0.0, False)],
)
def test_the_operator_keeps_its_contract_whatever_the_options(
    seq_q: int, seq_kv: int, causal: str, scale: float, return_lse: bool
) -> None:
    _opcheck(*_qkv(seq_q, seq_kv), causal, scale, "bhsd", return_lse, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_operator_in_every_dtype(dtype: torch.dtype) -> None:
    q, k, v = _qkv(dtype=dtype)
    _opcheck(q, k, v, "bottom_right", None, "bhsd", True, None)
    o, lse = torch.ops.flashgen.forward(q, k, v, "bottom_right", None, "bhsd", True, None)
    expected, expected_lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)


def _compiled(dynamic: bool | None, backend: object = "aot_eager", **options: Any) -> Callable[..., Any]:
    @torch.compile(fullgraph=True, backend=backend, dynamic=dynamic)
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        # Something before and after, so that the operator is one of several.
        result = flashgen.attention(q + 0.0, k, v, **options)
        return (result[0] * 2.0, result[1]) if isinstance(result, tuple) else result * 2.0

    return model


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", CAUSAL)
def test_compiled_equals_eager(dynamic: bool, layout: str, causal: bool | str) -> None:
    return_lse = causal in ("bottom_right", False)
    options = {"causal": causal, "layout": layout, "return_lse": return_lse, "scale": 0.25}
    model = _compiled(dynamic, **options)
    for seq_q, seq_kv in ((9, 13), (17, 5)):
        q, k, v = _qkv(seq_q, seq_kv, layout=layout, width_v=40)
        actual, expected = model(q, k, v), flashgen.attention(q, k, v, **options)  # type: ignore[arg-type]
        if return_lse:
            assert torch.equal(actual[0], expected[0] * 2.0) and torch.equal(actual[1], expected[1])
        else:
            assert torch.equal(actual, expected * 2.0)  # type: ignore[operator]


@pytest.mark.parametrize("memory", MEMORY)
def test_compiled_output_has_the_eager_strides(memory: str) -> None:
    q, k, v = map(MEMORY[memory], _qkv())
    compiled = torch.compile(flashgen.attention, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(q, k, v), flashgen.attention(q, k, v)
    assert isinstance(actual, Tensor) and isinstance(expected, Tensor)
    assert torch.equal(actual, expected) and actual.stride() == expected.stride()


class _Counting:
    """A backend that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)])
def test_new_lengths_never_recompile(dynamic: bool | None, most: int) -> None:
    """With automatic dynamic shapes the second length makes them symbolic; no third one compiles anything."""
    backend = _Counting()
    model = _compiled(dynamic, backend, causal=True)
    for seq_q, seq_kv in ((9, 13), (10, 14), (64, 64), (65, 300), (300, 65), (7, 128), (1000, 1001)):
        q, k, v = _qkv(seq_q, seq_kv)
        expected = flashgen.attention(q, k, v, causal=True)
        assert torch.equal(model(q, k, v), expected * 2.0)  # type: ignore[operator]
    assert len(backend.graphs) == most


def test_attention_is_one_operator_in_the_graph() -> None:
    backend = _Counting()
    _compiled(None, backend, causal=True)(*_qkv())
    (graph,) = backend.graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls.count(torch.ops.flashgen.forward) + calls.count(torch.ops.flashgen.forward.default) == 1
    assert not any("softmax" in str(call) or "matmul" in str(call) for call in calls)


def test_exported_programs_keep_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flashgen.attention(q, k, v, causal=True)
            assert isinstance(out, Tensor)
            return out

    seq = torch.export.Dim("seq", min=2, max=4096)
    given = _qkv(9, 9)
    program = torch.export.export(Model(), given, dynamic_shapes=({2: seq}, {2: seq}, {2: seq}))
    for length in (9, 31):
        q, k, v = _qkv(length, length)
        assert torch.equal(program.module()(q, k, v), flashgen.attention(q, k, v, causal=True))  # type: ignore[arg-type]


def test_tensors_that_do_not_fit_are_refused_at_run_time() -> None:
    q, k, v = _qkv()
    model = torch.compile(flashgen.attention, fullgraph=True, backend="aot_eager", dynamic=False)
    for given, word in (
        ((q[:, :3], k, v), "multiple of kv_heads"),
        ((q, k, v[:, :, 1:]), "agree in length"),
        ((q, k[..., :8], v), "one head_dim"),
        ((q[:1], k, v), "one batch size"),
        ((q[0], k, v), "must have 4 dimensions"),
        ((q, k.half(), v), "share one dtype"),
        ((q.int(), k.int(), v.int()), "dtype must be one of"),
    ):
        with pytest.raises(InputError, match=word):
            model(*given)


def test_options_that_mean_nothing_are_refused_at_run_time() -> None:
    q, k, v = _qkv()
    model = torch.compile(flashgen.attention, fullgraph=True, backend="aot_eager")
    for options, error, word in (
        ({"scale": float("nan")}, InputError, "scale"),
        ({"scale": float("inf")}, InputError, "scale"),
        ({"layout": "bhds"}, InputError, "layout must be"),
        ({"family": "triton_fwd"}, UnsupportedError, "runs on a GPU"),
    ):
        with pytest.raises(error, match=word):
            model(q, k, v, **options)


def test_the_operator_refuses_by_itself() -> None:
    q, k, v = _qkv()
    for arguments, word in (
        ((q, k, v, "upper", None, "bhsd", False, None), "causal must be"),
        ((q, k, v, "none", None, "bhds", False, None), "layout must be"),
        ((q[0], k, v, "none", None, "bhsd", False, None), "4 dimensions"),
        ((q[:, :5], k, v, "none", None, "bhsd", False, None), "multiple of kv_heads"),
    ):
        with pytest.raises(InputError, match=word):
            torch.ops.flashgen.forward(*arguments)


def test_masks_have_one_spelling_each_in_the_operator() -> None:
    q, k, v = _qkv()
    for causal in CAUSAL:
        o, lse = torch.ops.flashgen.forward(q, k, v, causal_from(causal), None, "bhsd", False, None)
        assert torch.equal(o, flashgen.attention(q, k, v, causal=causal)) and lse.shape == (0,)  # type: ignore[arg-type]
