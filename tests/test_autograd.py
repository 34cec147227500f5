"""The operators behind `attention`: their contract, and what autograd, torch.compile and torch.func make of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.errors import InputError, UnsupportedError
from flashgen.tensors import causal_from

CAUSAL = (False, True, "bottom_right", "top_left")
Three = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _qkv(
    seq_q: int = 9, seq_kv: int = 13, *, width_v: int = 24, layout: str = "bhsd", dtype: torch.dtype = torch.float32
) -> Three:
    generator = torch.Generator().manual_seed(seq_q * 100 + seq_kv)
    shapes = ((2, 6, seq_q, 24), (2, 2, seq_kv, 24), (2, 2, seq_kv, width_v))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    q, k, v = drawn if layout == "bhsd" else [tensor.transpose(1, 2).contiguous() for tensor in drawn]
    return q, k, v


def _leaves(tensors: Three) -> Three:
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors)
    return q, k, v


def _o(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = flashgen.attention(q, k, v, **options)
    return out[0] if isinstance(out, tuple) else out


def _o_lse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out = flashgen.attention(q, k, v, return_lse=True, **options)
    assert isinstance(out, tuple)
    return out


def _loss(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    o, lse = _o_lse(q, k, v, **options)
    return (o.cos() * o).sum() + lse.sin().sum()


def _equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


# How the same values may lie in memory.
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "with gaps": lambda tensor: torch.cat([tensor, tensor], dim=3)[..., : tensor.shape[3]],
    "strided last": lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda tensor: tensor[:1].expand_as(tensor),
    "expanded heads": lambda tensor: tensor[:, :1].expand_as(tensor),
    "expanded last": lambda tensor: tensor[..., :1].expand_as(tensor),
    "odd address": lambda tensor: torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor),
    "sliced": lambda tensor: torch.cat([tensor, tensor], dim=2)[:, :, 1::2],
}


def _opcheck(*arguments: object, operator: Any = torch.ops.flashgen.forward) -> None:
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("layout", "width_v"), [("bhsd", 24), ("bshd", 40)])
def test_the_operators_keep_their_contract(memory: str, layout: str, width_v: int) -> None:
    """Schema, fake kernel and real results agree in shape, dtype and strides; also with symbolic sizes."""
    q, k, v = map(MEMORY[memory], _qkv(width_v=width_v, layout=layout))
    _opcheck(*_leaves((q, k, v)), "bottom_right", None, layout, True, None)


@pytest.mark.parametrize("memory", MEMORY)
def test_the_backward_operator_keeps_its_contract(memory: str) -> None:
    q, k, v = map(MEMORY[memory], _qkv(width_v=40))
    o, lse = torch.ops.flashgen.forward(q, k, v, "bottom_right", None, "bhsd", True, None)
    do = MEMORY[memory](torch.randn(o.shape))
    dlse = torch.ones(()).expand(lse.shape) if "expanded" in memory else None
    _opcheck(q, k, v, o, lse, do, dlse, "bottom_right", None, "bhsd", operator=torch.ops.flashgen.backward)


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
    _opcheck(*_leaves((q, k, v)), "bottom_right", None, "bhsd", True, None)
    o, lse = torch.ops.flashgen.forward(q, k, v, "bottom_right", None, "bhsd", True, None)
    assert _equal((o, lse), _o_lse(q, k, v, causal=True))
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def _forward_and_gradients(tensors: Three, layout: str) -> tuple[Tensor, ...]:
    q, k, v = _leaves(tensors)
    o, lse = _o_lse(q, k, v, causal=True, layout=layout)
    return o, lse, *torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.ones_like(lse)))


def _described(tensors: Three, layout: str) -> tuple[list[Any], list[Any]]:
    """Shape, dtype and strides that matter of all results: of real tensors, then of fake ones that lie as they do."""
    real = _forward_and_gradients(tensors, layout)
    with FakeTensorMode() as mode:
        q, k, v = map(mode.from_tensor, tensors)
        fake = _forward_and_gradients((q, k, v), layout)

    def described(each: Tensor) -> tuple[object, ...]:
        strides = [stride for size, stride in zip(each.shape, each.stride(), strict=True) if size > 1]
        return each.shape, each.dtype, strides

    return list(map(described, real)), list(map(described, fake))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    ("layout", "width_v", "dtype"),
    [("bhsd", 24, torch.bfloat16), ("bhsd", 40, torch.float64), ("bshd", 24, torch.float32)],
)
def test_fake_tensors_promise_what_real_ones_hold(memory: str, layout: str, width_v: int, dtype: torch.dtype) -> None:
    turned = MEMORY[memory]
    q, k, v = _qkv(width_v=width_v, layout=layout, dtype=dtype)
    for tensors in ((turned(q), turned(k), v), (q, turned(k), turned(v))):
        real, fake = _described(tensors, layout)
        assert fake == real


def test_fake_tensors_of_head_dim_1_promise_what_real_ones_hold() -> None:
    q, k, v = (tensor[..., :1].transpose(1, 2).contiguous().transpose(1, 2) for tensor in _qkv())
    real, fake = _described((q, k, v), "bhsd")
    assert fake == real


def _compiled(dynamic: bool | None, backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        # Something before and after, so that the operator is one of several.
        result = flashgen.attention(q + 0.0, k, v, **options)
        return (result[0] * 2.0, result[1]) if isinstance(result, tuple) else result * 2.0

    return torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)


@pytest.mark.parametrize(("dynamic", "layout"), [(False, "bhsd"), (True, "bshd")])
@pytest.mark.parametrize("causal", CAUSAL)
def test_compiled_equals_eager(dynamic: bool, layout: str, causal: bool | str) -> None:
    return_lse = causal in ("bottom_right", False)
    options = {"causal": causal, "layout": layout, "return_lse": return_lse, "scale": 0.25}
    model = _compiled(dynamic, **options)
    for seq_q, seq_kv in ((9, 13), (17, 5)):
        mine, theirs = (_leaves(_qkv(seq_q, seq_kv, layout=layout, width_v=40)) for _ in range(2))
        actual, expected = model(*mine), flashgen.attention(*theirs, **options)  # type: ignore[arg-type]
        if not return_lse:
            actual, expected = (actual,), (expected,)  # type: ignore[assignment]
        expected = (expected[0] * 2.0, *expected[1:])
        assert _equal(actual, expected)
        upstream = tuple(torch.randn(result.shape) for result in actual)
        assert _equal(torch.autograd.grad(actual, mine, upstream), torch.autograd.grad(expected, theirs, upstream))


@pytest.mark.parametrize("memory", MEMORY)
def test_compiled_results_have_the_eager_strides(memory: str) -> None:
    compiled = torch.compile(_o, fullgraph=True, backend="aot_eager_decomp_partition")
    results = []
    for function in (compiled, _o):
        leaves = _leaves(tuple(map(MEMORY[memory], _qkv())))  # type: ignore[arg-type]
        o = function(*leaves)
        results.append((o, *torch.autograd.grad(o, leaves, torch.ones_like(o))))
    assert _equal(*results)
    assert [each.stride() for each in results[0]] == [each.stride() for each in results[1]]


@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)])
@pytest.mark.parametrize("differentiated", [False, True])
def test_new_lengths_never_recompile(dynamic: bool | None, most: int, differentiated: bool) -> None:
    """With automatic dynamic shapes the second length makes them symbolic; no third one compiles anything."""
    backend = CompileCounterWithBackend("aot_eager")
    model = _compiled(dynamic, backend, causal=True)
    for seq_q, seq_kv in ((9, 13), (10, 14), (64, 64), (65, 200), (200, 65), (7, 128)):
        mine, theirs = (tuple(each.requires_grad_(differentiated) for each in _qkv(seq_q, seq_kv)) for _ in range(2))
        actual, expected = model(*mine), _o(*theirs, causal=True) * 2.0
        assert torch.equal(actual, expected)
        if differentiated:
            assert _equal(torch.autograd.grad(actual.sum(), mine), torch.autograd.grad(expected.sum(), theirs))
    assert backend.frame_count == most


def test_graphs_hold_one_operator_each_way() -> None:
    """The backward graph recomputes nothing and takes no softmax apart."""
    calls: dict[str, list[str]] = {}

    def keep(name: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
            calls[name] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return make_boxed_func(graph.forward)

        return compiler

    compilers = {"fw_compiler": keep("forward"), "bw_compiler": keep("backward")}
    backend = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)
    leaves = _leaves(_qkv())
    _compiled(None, backend, causal=True)(*leaves).square().sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)
    for name in ("forward", "backward"):
        assert [call for call in calls[name] if "flashgen" in call] == [f"flashgen.{name}.default"]
        assert not any(word in call for call in calls[name] for word in ("softmax", "mm", "exp"))


def test_exported_programs_keep_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _o(q, k, v, causal=True)

    seq = torch.export.Dim("seq", min=2, max=4096)
    given = _qkv(9, 9)
    program = torch.export.export(Model(), given, dynamic_shapes=({2: seq}, {2: seq}, {2: seq}))
    for length in (9, 31):
        q, k, v = _qkv(length, length)
        assert torch.equal(program.module()(q, k, v), _o(q, k, v, causal=True))


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
    for options in ({"scale": float("nan")}, {"scale": float("inf")}, {"layout": "bhds"}):
        with pytest.raises(InputError, match=f"{next(iter(options))} must be"):
            model(q, k, v, **options)


def test_a_family_is_refused_on_the_cpu_at_run_time() -> None:
    with pytest.raises(UnsupportedError, match="runs on a GPU"):
        torch.compile(flashgen.attention, fullgraph=True, backend="aot_eager")(*_qkv(), family="triton_fwd")


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
        assert torch.equal(o, _o(q, k, v, causal=causal)) and lse.shape == (0,)


@pytest.mark.parametrize(("use_reentrant", "compiled"), [(False, False), (True, False), (False, True)])
def test_checkpointed_gradients_are_the_same(use_reentrant: bool, compiled: bool) -> None:
    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(lambda *each: _loss(*each, causal=True), q, k, v, use_reentrant=use_reentrant)

    mine, theirs = _leaves(_qkv()), _leaves(_qkv())
    model = torch.compile(recomputed, fullgraph=True, backend="aot_eager") if compiled else recomputed
    torch.autograd.backward(model(*mine))
    expected = torch.autograd.grad(_loss(*theirs, causal=True), theirs)
    assert all(one.grad is not None and torch.equal(one.grad, other) for one, other in zip(mine, expected, strict=True))


@contextmanager
def _saving() -> Iterator[list[Tensor]]:
    """Collects what graphs that are built meanwhile keep for their backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@pytest.mark.parametrize("return_lse", [False, True])
def test_only_inputs_and_results_are_saved(return_lse: bool) -> None:
    q, k, v = _leaves(_qkv(width_v=40))
    with _saving() as saved:
        results = flashgen.attention(q, k, v, causal=True, return_lse=return_lse)
    o, *rest = results if isinstance(results, tuple) else (results,)
    lse = rest[0] if rest else _o_lse(q.detach(), k.detach(), v.detach(), causal=True)[1]
    assert [tensor.data_ptr() for tensor in saved[:4]] == [tensor.data_ptr() for tensor in (q, k, v, o)]
    assert len(saved) == 5 and torch.equal(saved[4], lse)


def test_no_graph_is_built_that_nobody_wants() -> None:
    q, k, v = _leaves(_qkv())
    with _saving() as saved:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert all(result.grad_fn is None and not result.requires_grad for result in _o_lse(q, k, v))
        assert all(result.grad_fn is None for result in _o_lse(q.detach(), k.detach(), v.detach()))
    assert not saved


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_some_inputs_need_no_gradient(wanted: tuple[int, ...], compiled: bool) -> None:
    given, every = list(_qkv()), _leaves(_qkv())
    for index in wanted:
        given[index].requires_grad_()
    loss = torch.compile(_loss, fullgraph=True, backend="aot_eager") if compiled else _loss
    torch.autograd.backward(loss(*given))
    expected = torch.autograd.grad(_loss(*every), every)
    for index, tensor in enumerate(given):
        assert (tensor.grad is not None) == (index in wanted)
        assert tensor.grad is None or torch.equal(tensor.grad, expected[index])


def test_a_graph_that_is_kept_repeats_its_gradients() -> None:
    leaves = _leaves(_qkv())
    loss = _loss(*leaves)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert _equal(first, torch.autograd.grad(loss, leaves))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)
    copies = copy.deepcopy(leaves)
    assert _equal(first, torch.autograd.grad(_loss(*copies), copies))


@pytest.mark.parametrize("changed", ["q", "k", "v", "o", "lse"])
def test_what_the_backward_reads_may_not_change(changed: str) -> None:
    q, k, v = (tensor * 1.0 for tensor in _leaves(_qkv()))
    o, lse = _o_lse(q, k, v)
    with torch.no_grad():
        {"q": q, "k": k, "v": v, "o": o, "lse": lse}[changed].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum(), q)


def test_the_operator_without_its_log_sum_exp_has_no_gradient() -> None:
    o, _ = torch.ops.flashgen.forward(*_leaves(_qkv()), "none", None, "bhsd", False, None)
    with pytest.raises(UnsupportedError, match="pass return_lse=True"):
        o.sum().backward()


def test_second_derivatives_are_refused() -> None:
    q, k, v = _leaves(_qkv())
    word = "no second derivative of attention. Write it out in torch"
    for second in (q, k, v):
        (first,) = torch.autograd.grad(_loss(q, k, v), q, create_graph=True)
        with pytest.raises(UnsupportedError, match=word):
            torch.autograd.grad(first.sum(), second)
    # Linear in the gradient of the output, but that is a derivative of the backward as well.
    upstream = torch.ones(q.shape, requires_grad=True)
    (first,) = torch.autograd.grad(_o(q, k, v), v, upstream, create_graph=True)
    with pytest.raises(UnsupportedError, match=word):
        torch.autograd.grad(first.sum(), upstream)
    with pytest.raises(UnsupportedError, match=word):
        torch.func.grad(lambda x: torch.func.grad(_loss)(x, k.detach(), v.detach()).sum())(q.detach())


@pytest.mark.parametrize(("autocast", "compiled"), [("bfloat16", False), ("float16", False), ("bfloat16", True)])
@pytest.mark.parametrize(
    "dtypes", [["float32"] * 3, ["float16"] * 3, ["float64"] * 3, ["float32", "bfloat16", "float16"]]
)
def test_autocast_is_that_of_torch(dtypes: list[str], autocast: str, compiled: bool) -> None:
    drawn = [tensor.to(getattr(torch, name)) for tensor, name in zip(_qkv(), dtypes, strict=True)]
    mine, theirs = (_leaves((drawn[0], drawn[1], drawn[2])) for _ in range(2))
    attention = torch.compile(_o_lse, fullgraph=True, backend="aot_eager") if compiled else _o_lse
    with torch.autocast("cpu", dtype=getattr(torch, autocast)):
        o, lse = attention(*mine)
        expected = torch.nn.functional.scaled_dot_product_attention(*theirs, enable_gqa=True)
    assert o.dtype == expected.dtype and lse.dtype == torch.promote_types(torch.float32, drawn[0].dtype)
    torch.autograd.backward((o.sum(), expected.sum()))
    for one, other in zip(mine, theirs, strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.dtype == other.grad.dtype == one.dtype
        torch.testing.assert_close(one.grad, other.grad, rtol=0.02, atol=0.02)
