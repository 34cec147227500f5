"""`flashgen.nn.FlashAttention` on CPU tensors: values and gradients against torch in float64, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flashgen.errors import InputError
from flashgen.nn import FlashAttention

CAUSAL = (False, True, "bottom_right", "top_left")
# d_model, heads, kv_heads, head_dim; None is the default.
SIZES = ((24, 4, None, None), (24, 6, 2, 12), (20, 5, 1, 7), (16, 1, None, 33))
NAMES = tuple(f"{layer}.{name}" for layer in ("q_proj", "k_proj", "v_proj", "out_proj") for name in ("weight", "bias"))


def _layer(*sizes: int | None, **options: Any) -> FlashAttention:
    d_model, heads, kv_heads, head_dim = sizes or (24, 6, 2, 12)
    assert d_model is not None and heads is not None
    torch.manual_seed(d_model + heads)
    return FlashAttention(d_model, heads, kv_heads=kv_heads, head_dim=head_dim, **options)


def _input(seq: int = 9, d_model: int = 24, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, seq, d_model, generator=torch.Generator().manual_seed(seq), dtype=torch.float64).to(dtype)


def _doubles(layer: FlashAttention) -> dict[str, Tensor]:
    return {name: tensor.detach().double().requires_grad_() for name, tensor in layer.named_parameters()}


def _reference(layer: FlashAttention, weights: Mapping[str, Tensor], x: Tensor, *context: Tensor) -> Tensor:
    """The same in float64 by torch's own attention; of the layer only sizes and options are used."""

    def heads_of(name: str, given: Tensor, heads: int) -> Tensor:
        projected = F.linear(given, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        split = projected.reshape(*given.shape[:2], heads, layer.head_dim).transpose(1, 2)
        return split.repeat_interleave(layer.heads // heads, dim=1)

    source = context[0] if context else x
    q = heads_of("q_proj", x, layer.heads)
    k, v = (heads_of(name, source, layer.kv_heads) for name in ("k_proj", "v_proj"))
    mask = None
    if layer.causal is not False:
        diagonal = 0 if layer.causal == "top_left" else source.shape[1] - x.shape[1]
        mask = torch.ones(x.shape[1], source.shape[1], dtype=torch.bool).tril(diagonal)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)
    return F.linear(o.transpose(1, 2).flatten(2), weights["out_proj.weight"], weights.get("out_proj.bias"))


def _truth(layer: FlashAttention, *given: Tensor) -> Tensor:
    with torch.no_grad():
        return _reference(layer, _doubles(layer), *(tensor.double() for tensor in given))


def _assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{"bias": False}, {"scale": 0.0}, {"scale": -0.5}, {"scale": 1e39}])
def test_bias_and_scale_are_used_as_given(options: dict[str, Any]) -> None:
    layer, x = _layer(causal=True, dtype=torch.float64, **options), _input(dtype=torch.float64)
    assert set(layer.state_dict()) == {name for name in NAMES if options.get("bias", True) or name.endswith("weight")}
    _assert_near(layer(x), _truth(layer, x), 1e-13)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seq_kv", [None, 1, 5, 13])
def test_values_and_gradients(sizes: tuple[Any, ...], causal: bool | str, seq_kv: int | None) -> None:
    """Gradients of inputs and every parameter; with 5 keys, a bottom-right mask hides all of them from some rows."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        layer = _layer(*sizes, causal=causal, dtype=dtype)
        mine = [_input(seq, sizes[0], dtype=dtype).requires_grad_() for seq in (9, seq_kv) if seq is not None]
        theirs = [tensor.detach().double().requires_grad_() for tensor in mine]
        weights = _doubles(layer)
        y, expected_y = layer(*mine), _reference(layer, weights, *theirs)
        assert y.dtype == dtype
        _assert_near(y, expected_y, tolerance)
        with torch.no_grad():
            _assert_near(layer(*mine), expected_y, tolerance)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
        torch.autograd.backward(y, upstream)
        torch.autograd.backward(expected_y, upstream.double())
        pairs = {f"input {i}": pair for i, pair in enumerate(zip(mine, theirs, strict=True))}
        pairs |= {name: (tensor, weights[name]) for name, tensor in layer.named_parameters()}
        assert len(pairs) == len(mine) + len(NAMES)
        for name, (actual, expected) in pairs.items():
            assert actual.grad is not None and expected.grad is not None and actual.grad.dtype == dtype, name
            _assert_near(actual.grad, expected.grad, 10 * tolerance * max(1.0, float(expected.grad.abs().max())))


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_gradcheck(causal: bool | str) -> None:
    layer = _layer(4, 2, 1, 3, causal=causal, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    parameters = [tensor.detach().clone().requires_grad_() for tensor in layer.parameters()]

    def call(*tensors: Tensor) -> Tensor:
        inputs, weights = tensors[: -len(names)], dict(zip(names, tensors[-len(names) :], strict=True))
        result = torch.func.functional_call(layer, weights, inputs)
        assert isinstance(result, Tensor)
        return result

    for lengths in ((3,), (3, 4)):
        inputs = [_input(seq, 4, dtype=torch.float64).requires_grad_() for seq in lengths]
        assert torch.autograd.gradcheck(call, (*inputs, *parameters))


def test_the_state_is_that_of_plain_linears() -> None:
    torch.manual_seed(0)
    widths = {"q_proj": (24, 72), "k_proj": (24, 24), "v_proj": (24, 24), "out_proj": (72, 24)}
    linears = torch.nn.ModuleDict({name: torch.nn.Linear(*width) for name, width in widths.items()})
    layer = _layer(24, 6, 2, 12, causal=True)
    assert all(type(module) is torch.nn.Linear for module in layer.children())
    assert tuple(layer.state_dict()) == NAMES == tuple(linears.state_dict())
    x = _input()
    expected = _reference(layer, linears.double().state_dict(), x.double())
    assert not torch.allclose(layer(x).double(), expected, atol=1e-3)
    layer.load_state_dict(linears.state_dict())
    _assert_near(layer(x), expected, 1e-5)


@pytest.mark.parametrize("value", [0, -2, 2.0, True, "2"])
@pytest.mark.parametrize("name", ["d_model", "heads", "kv_heads", "head_dim"])
def test_sizes_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        FlashAttention(**{"d_model": 8, "heads": 2, name: value})
    assert str(error.value) == f"{name} must be a whole number of at least 1, but got {value!r}. Pass one."


KV_HEADS = "Choose kv_heads among the divisors of heads."
HEAD_DIM = "Use more heads, or pass a smaller head_dim."
SCALE = "the scale of torch.float32 inputs must be 0 or between 7.89e-31 and 8.51e+37 in size, but got "
CAUSES = "causal must be False, True, 'bottom_right' or 'top_left', but got "


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 4), "d_model must be a multiple of heads, but got 10 and 4. Change one of them, or pass head_dim."),
        ((12, 6, 4), f"heads must be a multiple of kv_heads, but got 6 and 4. {KV_HEADS}"),
        ((6, 2, 4), f"heads must be a multiple of kv_heads, but got 2 and 4. {KV_HEADS}"),
        ((1154, 2), f"head_dim must be at most 576, but got 577 (d_model 1154, heads 2). {HEAD_DIM}"),
        ((8, 2, None, None, "upper"), f"{CAUSES}'upper'."),
        ((8, 2, None, None, None), f"{CAUSES}None."),
        ((8, 2, None, None, False, math.nan), "scale must be None or a finite number, but got nan."),
        ((8, 2, None, None, False, 1e39), f"{SCALE}1e+39. Scale q instead."),
    ],
)
def test_layers_that_cannot_be(sizes: tuple[Any, ...], message: str) -> None:
    names = ("d_model", "heads", "kv_heads", "head_dim", "causal", "scale")
    with pytest.raises(InputError) as error:
        FlashAttention(**dict(zip(names, sizes, strict=False)))
    assert str(error.value) == message


def test_inputs_that_do_not_fit() -> None:
    layer, x = _layer(), _input()
    for name, wrong in (("x", x[0]), ("x", x[None]), ("x", x[..., :23]), ("context", x[0]), ("context", x[..., :8])):
        with pytest.raises(InputError) as error:
            layer(**{"x": x, name: wrong})
        assert str(error.value) == (
            f"{name} must have shape [batch, seq, 24], but got {tuple(wrong.shape)}: "
            "reshape it, or build the layer with its width as d_model."
        )
    with pytest.raises(InputError, match="one batch size, but got 2, 1 and 1"):
        layer(x, x[:1])


def test_nothing_to_attend() -> None:
    layer = _layer(causal=True)
    assert torch.equal(layer(_input(), torch.empty(2, 0, 24)), layer.out_proj.bias.expand(2, 9, 24))
    for batch, seq in ((0, 9), (2, 0)):
        assert torch.equal(layer(torch.empty(batch, seq, 24)), torch.empty(batch, seq, 24))


def test_copies_and_pickles_compute_the_same() -> None:
    layer = _layer(causal="top_left", scale=0.3)
    x, context = _input(), _input(13)
    expected = layer(x, context)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for twin in twins:
        assert repr(twin) == repr(layer)
        assert torch.equal(twin(x, context), expected)
    with torch.no_grad():
        layer.v_proj.weight.zero_()
    assert not torch.equal(layer(x, context), expected)
    assert all(torch.equal(twin(x, context), expected) for twin in twins)


def test_repr() -> None:
    shown = "FlashAttention(\n  d_model=24, heads=6, kv_heads=2, head_dim=12, causal=True\n  (q_proj): Linear("
    assert repr(_layer(causal=True)).startswith(shown)
    default = FlashAttention(24, 4, causal="top_left", scale=0.5)
    assert default.extra_repr() == "d_model=24, heads=4, kv_heads=4, head_dim=6, causal='top_left', scale=0.5"


def test_device_and_dtype_reach_every_parameter() -> None:
    layer = _layer(device="meta", dtype=torch.float64, causal=True)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}
    filled = _layer(dtype=torch.float64, causal=True)
    assert {p.dtype for p in filled.parameters()} == {torch.float64}
    layer.load_state_dict(filled.state_dict(), assign=True)
    assert torch.equal(layer(_input(dtype=torch.float64)), filled(_input(dtype=torch.float64)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_to_another_dtype(dtype: torch.dtype) -> None:
    layer, x = _layer(causal=True).to(dtype), _input(dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    _assert_near(y, _truth(layer, x), max(1e-13, 2 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    layer, x = _layer(causal=True), _input()
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    _assert_near(y, _truth(layer, x), 4 * torch.finfo(dtype).eps)
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize(("causal", "differentiated"), [(False, False), (True, True), ("top_left", False)])
def test_under_torch_compile(causal: bool | str, differentiated: bool) -> None:
    """One graph without a break, for self and for cross attention, at any length."""
    torch._dynamo.reset()
    layer = _layer(causal=causal).requires_grad_(differentiated)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((9,), (9, 13), (5,), (17,), (5, 3), (17, 29)):
        given = tuple(map(_input, lengths))
        # The first two calls compile, self attention and cross attention.
        with torch.compiler.set_stance("default" if 9 in lengths else "fail_on_recompile"):
            y = compiled(*given)
        _assert_near(y, _truth(layer, *given), 1e-5)
        if differentiated:
            mine, eager = (torch.autograd.grad(out.sum(), tuple(layer.parameters())) for out in (y, layer(*given)))
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5 * max(float(g.abs().max()) for g in eager))
