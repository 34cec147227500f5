"""The operators behind calls with options: their contract, and what torch.compile, torch.func and autocast see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modified_calls import DIFFERENTIABLE, FEATURES, options, random, tensors
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.errors import InputError, UnsupportedError
from flashgen.flat import flat
from flashgen.modifiers import Options

every_feature = pytest.mark.parametrize("features", [*((name,) for name in FEATURES), FEATURES], ids="+".join)
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _o_lse(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    result = flashgen.attention(q, k, v, return_lse=True, **given)
    assert isinstance(result, tuple)
    return result


def _loss(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    o, lse = _o_lse(q, k, v, **given)
    return (o.cos() * o).sum() + lse.masked_fill(lse.isinf(), 0.0).sin().sum()


def _leaves(given: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """q, k and v with the options, what is differentiable as leaves."""
    named = dict(zip("qkv", tensors(dtype=dtype), strict=True)) | given
    return {
        name: each.detach().clone().requires_grad_() if name in DIFFERENTIABLE else each for name, each in named.items()
    }


def _results(call: Call, named: dict[str, Any]) -> tuple[Tensor, ...]:
    """Of a call, with the gradients of all leaves."""
    o, lse = call(**named)
    wanted = [each for each in named.values() if isinstance(each, Tensor) and each.requires_grad]
    upstream = random(*o.shape, seed=4, dtype=o.dtype), random(*lse.shape, seed=5, dtype=lse.dtype)
    return o, lse, *torch.autograd.grad((o, lse), wanted, upstream)


def _equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def _opcheck(operator: Any, *arguments: object) -> None:
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@every_feature
@pytest.mark.parametrize(("causal", "layout", "return_lse"), [("none", "bhsd", True), ("top_left", "bshd", False)])
def test_the_operators_keep_their_contract(
    features: tuple[str, ...], causal: str, layout: str, return_lse: bool
) -> None:
    """Schema, fake kernel and real results agree; also with symbolic sizes."""
    given = options(*features)
    flattened = flat(Options(**given))
    q, k, v = tensors(layout=layout)
    forward, backward = torch.ops.flashgen.forward_modified, torch.ops.flashgen.backward_modified
    leaves = [each.requires_grad_(return_lse) for each in (q, k, v)]
    _opcheck(forward, *leaves, causal, 0.4, layout, return_lse, None, *flattened)
    o, lse = (each.detach() for each in forward(q, k, v, causal, 0.4, layout, True, None, *flattened))
    for of_bias in (False, True):
        arguments = (o, lse, o * 2.0, lse * 0.5, causal, 0.4, layout, *flattened[:-1], of_bias, of_bias)
        _opcheck(backward, *(each.detach() for each in leaves), *arguments)


@pytest.mark.parametrize("shape", [(2, 1, 4, 6), (4, 1, 6), (4, 6), (1,), ()], ids=str)
def test_the_operators_take_options_as_they_were_given(shape: tuple[int, ...]) -> None:
    q, k, v = tensors()
    bias = random(*shape, seed=9).requires_grad_()
    slopes, sinks = random(4, seed=5).abs(), random(4, seed=8, dtype=torch.float32).requires_grad_()
    mask = torch.rand(6) < 0.7
    mods = ("(score + mod0[head])", None, random(4, seed=3), None, None, None)
    dropping = (0.5, torch.ones(2).long())
    rest = (1, None, mask, torch.zeros(2, 4).long(), torch.zeros(2, 6).int(), *dropping, *mods, sinks)
    for given in (bias, bias.detach().float().transpose(-1, -2).contiguous().transpose(-1, -2) if shape[1:] else bias):
        _opcheck(
            torch.ops.flashgen.forward_modified, q, k, v, "none", None, "bhsd", True, None, 3.0, slopes, given, *rest
        )
        o, lse = (torch.randn(2, 4, 4, 2).double(), torch.randn(2, 4, 4).double())
        _opcheck(
            torch.ops.flashgen.backward_modified, q, k, v, o, lse, o, None, "none", None, "bhsd", 3.0, slopes,
            given.detach(), *rest[:-1], True, True,
        )  # fmt: skip


def test_the_operators_judge_by_themselves() -> None:
    q, k, v = tensors()
    for given, word in (
        ({"softcap": -1.0}, "softcap must be"),
        ({"bias": torch.ones(5)}, "bias must be broadcastable"),
        ({"mask": torch.ones(4, 6)}, "mask must hold bool"),
        ({"window": (-1, None)}, "each side of window"),
        ({"sinks": torch.ones(3)}, "sinks must be"),
        ({"segment_ids_q": torch.ones(2, 4).int()}, "given together"),
    ):
        with pytest.raises(InputError, match=word):
            torch.ops.flashgen.forward_modified(q, k, v, "none", None, "bhsd", True, None, *flat(Options(**given)))  # type: ignore[arg-type]


def test_fake_tensors_promise_what_real_ones_hold() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        real = _results(_o_lse, _leaves(options(*FEATURES, dtype=dtype), dtype))
        with FakeTensorMode() as mode:
            named = {
                name: mode.from_tensor(each) if isinstance(each, Tensor) else each
                for name, each in _leaves(options(*FEATURES, dtype=dtype), dtype).items()
            }
            fake = _results(_o_lse, named)
        for one, other in zip(real, fake, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@every_feature
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(features: tuple[str, ...], dynamic: bool) -> None:
    given = options(*features)
    model = torch.compile(_o_lse, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for causal in (False, "top_left"):
        how = {"causal": causal, "scale": 0.4}
        expected = _results(_o_lse, _leaves(given) | how)
        assert _equal(_results(model, _leaves(given) | how), expected)
        with torch.no_grad():
            assert _equal(model(*tensors(), **given, **how), expected[:2])


def test_compiled_with_a_bias_that_is_broadcast() -> None:
    model = torch.compile(_o_lse, fullgraph=True, backend="aot_eager")
    for shape in ((2, 1, 4, 6), (4, 6), (1,), ()):
        named = _leaves({"bias": random(*shape, seed=9)})
        assert _equal(_results(model, named), _results(_o_lse, named))


@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)])
def test_new_lengths_never_recompile(dynamic: bool | None, most: int) -> None:
    backend = CompileCounterWithBackend("aot_eager")
    model = torch.compile(_o_lse, fullgraph=True, backend=backend, dynamic=dynamic)
    for seq_q, seq_kv in ((9, 13), (10, 14), (64, 65), (65, 200), (200, 66), (7, 128)):
        given = options("bias", "mask", "sinks", "segments", seq_q=seq_q, seq_kv=seq_kv)
        q, k, v = tensors(seq_q, seq_kv)
        assert _equal(model(q, k, v, **given), _o_lse(q, k, v, **given))
    assert backend.frame_count == most


def test_mistakes_are_refused_when_compiled_code_runs() -> None:
    q, k, v = tensors()
    model = torch.compile(flashgen.attention, fullgraph=True, backend="aot_eager", dynamic=False)
    for given, word in (
        ({"softcap": -1.0}, "softcap must be"),
        ({"bias": torch.ones(5).double()}, "bias must be broadcastable"),
        ({"mask": torch.ones(4, 6)}, "mask must hold bool"),
        ({"window": (-1, 3)}, "each side of window"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must be"),
    ):
        with pytest.raises(InputError, match=word):
            model(q, k, v, **given)
    with pytest.raises(Exception, match="window must be None or a pair"):
        model(q, k, v, window=5)


def test_graphs_hold_one_operator_each_way() -> None:
    calls: list[list[str]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> Call:
        calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    named = _leaves(options(*FEATURES))
    model = torch.compile(_loss, fullgraph=True, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    model(**named).backward()
    assert len(calls) == 2
    for graph, name in zip(calls, ("forward", "backward"), strict=True):
        assert [call for call in graph if "flashgen" in call] == [f"flashgen.{name}_modified.default"]
    assert all(named[name].grad is not None for name in DIFFERENTIABLE)


def test_plain_calls_never_meet_the_new_operators() -> None:
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for given, names in (({}, ("forward", "backward")), ({"softcap": 1.0}, ("forward_modified", "backward_modified"))):
        seen.clear()
        with Watch():
            _loss(**_leaves(given)).backward()
        assert [call for call in seen if "flashgen" in call] == [f"flashgen.{name}.default" for name in names]


def test_exported_programs_keep_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
            return flashgen.attention(q, k, v, bias=bias, window=(3, 0))

    given = (*tensors(), random(4, 6, seed=9))
    program = torch.export.export(Model(), given)
    assert any("forward_modified" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*given), Model()(*given))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(use_reentrant: bool) -> None:
    mine, theirs = _leaves(options(*FEATURES)), _leaves(options(*FEATURES))
    rest = {name: each for name, each in mine.items() if name not in DIFFERENTIABLE}

    def recomputed(*leaves: Tensor) -> Tensor:
        return _loss(**dict(zip(DIFFERENTIABLE, leaves, strict=True)), **rest)

    checkpoint(recomputed, *(mine[name] for name in DIFFERENTIABLE), use_reentrant=use_reentrant).backward()
    _loss(**theirs).backward()
    assert all(torch.equal(mine[name].grad, theirs[name].grad) for name in DIFFERENTIABLE)


def test_what_the_backward_reads_may_not_change() -> None:
    for changed in ("bias", "mask", "alibi_slopes", "sinks", "segment_ids_q"):
        named = {
            name: each.detach() if isinstance(each, Tensor) else each
            for name, each in _leaves(options(*FEATURES)).items()
        }
        named["q"].requires_grad_()
        o, _ = _o_lse(**named)
        named[changed].copy_(named[changed].clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


def test_second_derivatives_are_refused() -> None:
    named = _leaves(options("bias", "window"))
    for name in ("q", "bias"):
        (first,) = torch.autograd.grad(_loss(**named), named[name], create_graph=True)
        with pytest.raises(UnsupportedError, match="no second derivative of attention"):
            torch.autograd.grad(first.sum(), named["v"])


def test_the_operator_without_its_log_sum_exp_has_no_gradient() -> None:
    q, k, v = (each.requires_grad_() for each in tensors())
    o, _ = torch.ops.flashgen.forward_modified(q, k, v, "none", None, "bhsd", False, None, *flat(Options(softcap=1.0)))
    with pytest.raises(UnsupportedError, match="pass return_lse=True"):
        o.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused_for_every_input() -> None:
    for name in ("q", "bias", "sinks", "alibi_slopes"):
        with torch.autograd.forward_ad.dual_level():
            named = {
                each: value.detach() if isinstance(value, Tensor) else value
                for each, value in _leaves(options(*FEATURES)).items()
            }
            named[name] = torch.autograd.forward_ad.make_dual(named[name], torch.ones_like(named[name]))  # type: ignore[no-untyped-call]
            with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
                _o_lse(**named)


MAPPED = {
    "all": {"q": 0, "k": 1, "v": 4, "bias": 0, "alibi_slopes": 1, "mask": 2, "segment_ids_q": 0, "segment_ids_kv": 2},
    "bias": {"bias": 3},
    "mask": {"mask": 0, "k": 0},
    "q": {"q": 2},
    "slopes and ids": {"alibi_slopes": 0, "segment_ids_kv": 1},
}


@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("shape", [(2, 4, 4, 6), (4, 1, 6), (1, 4, 4, 1)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_mapped_and_differentiated_as_in_a_loop(mapped: str, shape: tuple[int, ...], layout: str) -> None:
    given = options(*FEATURES) | {"bias": random(*shape, seed=9)}
    names = ("q", "k", "v", "bias", "alibi_slopes", "mask", "segment_ids_q", "segment_ids_kv", "sinks")
    base = dict(zip("qkv", tensors(layout=layout), strict=True)) | {name: given[name] for name in names[3:]}
    dims = [MAPPED[mapped].get(name) for name in names]

    def step(tensor: Tensor, index: int) -> Tensor:
        if tensor.dtype == torch.bool:
            return tensor ^ (index == 1)
        return tensor + index if tensor.dtype == torch.int64 else tensor * (1.0 + index)

    loops = [
        [base[name] if dim is None else step(base[name], index) for name, dim in zip(names, dims, strict=True)]
        for index in range(3)
    ]
    stacked = [
        base[name] if dim is None else torch.stack([loop[place] for loop in loops], min(dim, base[name].dim()))
        for place, (name, dim) in enumerate(zip(names, dims, strict=True))
    ]
    dims = [None if dim is None else min(dim, base[name].dim()) for name, dim in zip(names, dims, strict=True)]

    def values(*each: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *rest = each
        return _o_lse(q, k, v, layout=layout, window=(3, 2), **dict(zip(names[3:], rest, strict=True)))

    def loss(*each: Tensor) -> Tensor:
        o, lse = values(*each)
        return (o.cos() * o).sum() + lse.sin().sum()

    argnums = (0, 1, 2, 3) if mapped == "bias" else (0, 1, 2, 3, 8)
    for function in (values, torch.func.grad(loss, argnums=argnums)):
        expected = tuple(torch.stack(each) for each in zip(*(function(*loop) for loop in loops), strict=True))
        actual = torch.vmap(function, in_dims=tuple(dims))(*stacked)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_mapped_sinks() -> None:
    q, k, v = tensors()
    sinks = random(3, 4, seed=8)

    def loss(sinks: Tensor, v: Tensor) -> Tensor:
        o, lse = _o_lse(q, k, v, sinks=sinks)
        return (o.cos() * o).sum() + lse.sin().sum()

    for function in (loss, torch.func.grad(loss, argnums=(0, 1))):
        rows = [function(each, v) for each in sinks]
        actual = torch.vmap(function, in_dims=(0, None))(sinks, v)
        results = [[each] if isinstance(each, Tensor) else each for each in (actual, *rows)]
        for one, *others in zip(*results, strict=True):
            torch.testing.assert_close(one, torch.stack(others))


def test_jacobians_are_rows_of_gradients() -> None:
    named = _leaves(options("bias", "sinks", "softcap"))
    o, _ = _o_lse(**named)
    leaves = [named[name] for name in ("q", "k", "v", "bias", "sinks")]
    basis = random(3, *o.shape, seed=4)
    batched = torch.autograd.grad(o, leaves, basis, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(o, leaves, each, retain_graph=True) for each in basis]
    for one, *others in zip(batched, *rows, strict=True):
        torch.testing.assert_close(one, torch.stack(others))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_leaves_what_is_fp32_beside_q(compiled: bool) -> None:
    q, k, v = tensors(dtype=torch.float32)
    call = torch.compile(_o_lse, fullgraph=True, backend="aot_eager") if compiled else _o_lse
    for bias_dtype in (torch.float32, torch.float16):
        named = _leaves(options("bias", "sinks", "alibi", dtype=torch.float32), torch.float32)
        named["bias"] = named["bias"].detach().to(bias_dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o, lse = call(**named)
        assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
        torch.autograd.backward((o.float().sum(), lse.sum()))
        assert all(named[name].grad.dtype == named[name].dtype for name in DIFFERENTIABLE)
        bias = named["bias"].detach() if bias_dtype == torch.float32 else named["bias"].detach().bfloat16()
        rest = {name: named[name] for name in ("sinks", "alibi_slopes")}
        assert _equal((o, lse), _o_lse(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=bias, **rest))
