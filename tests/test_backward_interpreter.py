"""What generated backward kernels compute, in Triton's interpreter on the CPU: float64 autograd and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import interpreted
import pytest
import torch
from torch import Tensor

from flashgen.cases import strided_like
from flashgen.check import FLOOR, LSE_RELATIVE, max_error
from flashgen.reference import plain_attention, tiled_attention
from flashgen.space import Config
from flashgen.spec import DTYPE_NAMES, TORCH_DTYPES, Causal, DType, Spec

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DTYPES: tuple[DType, ...] = ("fp16", "bf16", "fp32")
# The accept rule for gradients: error <= factor * (error of plain attention in the inputs' dtype) + floor.
FACTOR = 3.0
# The interpreter truncates fp32 to bf16 where hardware rounds to nearest: twice the error of P, dS and the results.
TRUNCATION = {torch.bfloat16: 2.0}

Tensors = tuple[Tensor, ...]
every_causal = pytest.mark.parametrize("causal", CAUSAL)


def _config(dkdv: tuple[int, int] = (16, 16), dq: tuple[int, int] = (16, 16)) -> Config:
    return Config(
        dkdv_block_q=dkdv[0],
        dkdv_block_kv=dkdv[1],
        dkdv_num_warps=4,
        dkdv_num_stages=2,
        dq_block_q=dq[0],
        dq_block_kv=dq[1],
        dq_num_warps=4,
        dq_num_stages=2,
    )


SMALL = _config()


class Interpreter(interpreted.Interpreter):
    """Gradients of plain calls, too."""

    def backward(
        self,
        inputs: Tensors,
        do: Tensor,
        dlse: Tensor | None = None,
        *,
        causal: Causal = "none",
        scale: float | None = None,
        config: Config = SMALL,
        gradients: Tensors | None = None,
        o: Tensor | None = None,
    ) -> Tensors:
        """dq, dk and dv of tensors q, k and v, written over NaN; the forward is that of plain torch, unless given."""
        q, k, v = inputs
        scale = q.shape[3] ** -0.5 if scale is None else scale
        right_o, lse = tiled_attention(q, k, v, causal=causal, scale=scale)
        o = right_o if o is None else o.copy_(right_o)
        if gradients is None:
            gradients = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in inputs)
        for gradient in gradients:
            gradient.fill_(torch.nan)
        spec = Spec("backward", q.shape[3], v.shape[3], DTYPE_NAMES[q.dtype], causal)
        self.launcher(spec, config)(q, k, v, o, lse, do, dlse, *gradients, scale)
        return gradients


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreted.interpreter_of("backward", Interpreter) as started:
        yield started


def _random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _inputs(
    seq_q: int,
    seq_kv: int,
    heads: tuple[int, int] = (2, 1),
    width: tuple[int, int] = (16, 16),
    dtype: DType = "fp32",
    batch: int = 1,
) -> tuple[Tensors, Tensor]:
    """(q, k, v), and dO."""
    shapes = (
        (batch, heads[0], seq_q, width[0]),
        (batch, heads[1], seq_kv, width[0]),
        (batch, heads[1], seq_kv, width[1]),
        (batch, heads[0], seq_q, width[1]),
    )
    q, k, v, do = (_random(*shape, dtype=TORCH_DTYPES[dtype], seed=seed) for seed, shape in enumerate(shapes))
    return (q, k, v), do


def _by_autograd(
    inputs: Tensors, do: Tensor, dlse: Tensor | None, causal: Causal, scale: float | None, dtype: torch.dtype
) -> Tensors:
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    o, lse = plain_attention(*leaves, causal=causal, scale=scale)
    given = torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype)
    return torch.autograd.grad((o, lse), leaves, (do.to(dtype), given))


def _assert_close(
    actual: Tensors,
    inputs: Tensors,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Causal = "none",
    scale: float | None = None,
) -> None:
    """The accept rule for gradients."""
    exact = _by_autograd(inputs, do, dlse, causal, scale, torch.float64)
    plain = _by_autograd(inputs, do, dlse, causal, scale, do.dtype)
    _, lse = plain_attention(*(each.double() for each in inputs), causal=causal, scale=scale)
    # P is recomputed from a log-sum-exp in fp32, whose absolute error is P's relative one.
    relative = LSE_RELATIVE * lse[lse.isfinite()].abs().max().item() if lse.isfinite().any() else 0.0
    for name, gradient, truth, yardstick in zip(("dq", "dk", "dv"), actual, exact, plain, strict=True):
        assert gradient.dtype == do.dtype
        allowed = FACTOR * TRUNCATION.get(do.dtype, 1.0) * max_error(yardstick, truth) + FLOOR
        allowed += relative * truth.abs().max().item() if truth.numel() else 0.0
        error = max_error(gradient, truth)
        assert error <= allowed, f"{name} is off by {error:.3g}, allowed {allowed:.3g}"


def _assert_right(
    interpreter: Interpreter,
    inputs: Tensors,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Causal = "none",
    scale: float | None = None,
    config: Config = SMALL,
) -> None:
    actual = interpreter.backward(inputs, do, dlse, causal=causal, scale=scale, config=config)
    _assert_close(actual, inputs, do, dlse, causal=causal, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(33, 49), (40, 17)])
def test_every_mask_and_dtype(interpreter: Interpreter, causal: Causal, dtype: DType, seq_q: int, seq_kv: int) -> None:
    _assert_right(interpreter, *_inputs(seq_q, seq_kv, (4, 2), (32, 32), dtype), causal=causal)


@every_causal
@pytest.mark.parametrize("seq_q", [1, 15, 17, 33])
@pytest.mark.parametrize("seq_kv", [1, 15, 17, 33])
def test_every_length(interpreter: Interpreter, seq_q: int, seq_kv: int, causal: Causal) -> None:
    _assert_right(interpreter, *_inputs(seq_q, seq_kv), causal=causal)


@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
@pytest.mark.parametrize("seq_q", [3, 20, 37])
@pytest.mark.parametrize("config", [SMALL, _config((16, 32), (32, 16)), _config((32, 16), (16, 32))], ids=repr)
def test_every_place_of_the_diagonal_in_a_block(
    interpreter: Interpreter, causal: Causal, seq_q: int, config: Config
) -> None:
    for seq_kv in range(1, 60, 7):
        _assert_right(interpreter, *_inputs(seq_q, seq_kv, (1, 1)), causal=causal, config=config)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("width", [(16, 16), (40, 40), (72, 72), (16, 40), (40, 16), (72, 40), (40, 72), (1, 17)])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_every_width(interpreter: Interpreter, width: tuple[int, int], causal: Causal, dtype: DType) -> None:
    _assert_right(interpreter, *_inputs(35, 21, (2, 2), width, dtype), causal=causal)


@every_causal
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_gradients_of_keys_are_summed_over_their_group(
    interpreter: Interpreter, heads: tuple[int, int], causal: Causal, dtype: DType
) -> None:
    _assert_right(interpreter, *_inputs(19, 23, heads, dtype=dtype, batch=2), causal=causal)


@every_causal
@pytest.mark.parametrize("heads", [(1, 1), (11, 11), (20, 10)])
def test_every_block_of_every_head_is_written(interpreter: Interpreter, causal: Causal, heads: tuple[int, int]) -> None:
    # Heads take turns, eight at a time, and the last of them are fewer.
    _assert_right(interpreter, *_inputs(17, 19, heads), causal=causal)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-30])
def test_scale_is_used_as_given(interpreter: Interpreter, scale: float) -> None:
    _assert_right(interpreter, *_inputs(9, 11, width=(72, 72)), scale=scale)


@every_causal
def test_gradient_of_the_log_sum_exp(interpreter: Interpreter, causal: Causal) -> None:
    for seq_q, seq_kv in ((21, 37), (37, 21)):
        inputs, do = _inputs(seq_q, seq_kv, (4, 2))
        dlse = _random(1, 4, seq_q, dtype=torch.float32, seed=9)
        _assert_right(interpreter, inputs, do, dlse, causal=causal)
        _assert_right(interpreter, inputs, torch.zeros_like(do), dlse, causal=causal)
        without = interpreter.backward(inputs, do, causal=causal)
        zero = interpreter.backward(inputs, do, torch.zeros_like(dlse), causal=causal)
        assert all(map(torch.equal, without, zero))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(76, 1), (40, 17), (18, 16)])
def test_rows_that_see_nothing_have_no_gradient(
    interpreter: Interpreter, seq_q: int, seq_kv: int, dtype: DType
) -> None:
    inputs, do = _inputs(seq_q, seq_kv, dtype=dtype)
    dlse = _random(1, 2, seq_q, dtype=torch.float32, seed=9)
    first = interpreter.backward(inputs, do, dlse, causal="bottom_right")
    assert not first[0][:, :, : seq_q - seq_kv].any()
    do[:, :, : seq_q - seq_kv], dlse[:, :, : seq_q - seq_kv] = 6e4, 6e4
    second = interpreter.backward(inputs, do, dlse, causal="bottom_right")
    assert all(map(torch.equal, first, second))
    _assert_close(second, inputs, do, dlse, causal="bottom_right")


def test_nothing_to_attend(interpreter: Interpreter) -> None:
    for seq_q, seq_kv in ((5, 0), (0, 5)):
        for causal in CAUSAL:
            inputs, do = _inputs(seq_q, seq_kv)
            for gradient in interpreter.backward(inputs, do, causal=causal):
                assert torch.equal(gradient, torch.zeros_like(gradient))


@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(33, 21), (21, 33)])
def test_what_v_receives_is_what_the_rows_give(
    interpreter: Interpreter, causal: Causal, seq_q: int, seq_kv: int
) -> None:
    inputs, do = _inputs(seq_q, seq_kv, (2, 2), (24, 40))
    _, lse = plain_attention(*inputs, causal=causal)
    _, _, dv = interpreter.backward(inputs, do, causal=causal)
    given = do.masked_fill((lse == -math.inf)[..., None], 0.0)
    torch.testing.assert_close(dv.sum(2), given.sum(2), rtol=0, atol=1e-5)


@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(33, 21), (21, 33)])
def test_equal_values_leave_nothing_to_learn(interpreter: Interpreter, causal: Causal, seq_q: int, seq_kv: int) -> None:
    (q, k, v), do = _inputs(seq_q, seq_kv, (4, 2))
    v = v[:, :, :1].expand(v.shape)
    dq, dk, dv = interpreter.backward((q, k, v), do, causal=causal)
    assert dq.abs().max() <= 1e-5 and dk.abs().max() <= 1e-5
    assert dv.abs().max() > 0.1


def _empty(values: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=values.dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every other row": lambda t: _empty(t, t.shape[0], t.shape[1], 2 * t.shape[2], t.shape[3])[:, :, ::2],
    "heads inside": lambda t: _empty(t, t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2),
    "odd row stride": lambda t: _empty(t, *t.shape[:3], t.shape[3] + 1)[..., : t.shape[3]],
    "offset of one": lambda t: _empty(t, t.numel() + 1)[1:].view(t.shape),
    "batch inside": lambda t: strided_like(t, (2, 1, 0, 3)),
}
TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


@every_causal
@pytest.mark.parametrize("turn", range(len(LAYOUTS)))
def test_every_tensor_has_a_layout_of_its_own(interpreter: Interpreter, causal: Causal, turn: int) -> None:
    (q, k, v), do = _inputs(18, 21, (4, 2), (24, 40), "fp16", batch=2)
    expected = interpreter.backward((q, k, v), do, causal=causal)
    _assert_close(expected, (q, k, v), do, causal=causal)
    given = dict(zip(TENSORS, (q, k, v, do, do, q, k, v), strict=True))
    names = list(LAYOUTS)
    views = {
        name: LAYOUTS[names[(place + turn) % len(names)]](tensor).copy_(tensor)
        for place, (name, tensor) in enumerate(given.items())
    }
    slack = {name: int(_memory(view).isnan().sum()) for name, view in views.items()}
    actual = interpreter.backward(
        (views["q"], views["k"], views["v"]),
        views["do"],
        causal=causal,
        o=views["o"],
        gradients=(views["dq"], views["dk"], views["dv"]),
    )
    assert all(map(torch.equal, actual, expected))
    for name in ("dq", "dk", "dv"):
        assert int(_memory(views[name]).isnan().sum()) == slack[name], f"memory outside {name} was written"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSORS)
def test_layout_of_one_tensor_changes_no_bit(interpreter: Interpreter, name: str, layout: str) -> None:
    (q, k, v), do = _inputs(18, 21, (2, 2), (24, 40), "fp16", batch=2)
    expected = interpreter.backward((q, k, v), do, causal="bottom_right")
    given = dict(zip(TENSORS, (q, k, v, do.clone(), do, *map(torch.empty_like, (q, k, v))), strict=True))
    given[name] = LAYOUTS[layout](given[name]).copy_(given[name])
    q, k, v, o, do, *gradients = given.values()
    actual = interpreter.backward((q, k, v), do, causal="bottom_right", o=o, gradients=tuple(gradients))
    assert all(map(torch.equal, actual, expected))


def _memory(view: Tensor) -> Tensor:
    return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())


def test_gradients_may_be_views_of_one_packed_tensor(interpreter: Interpreter) -> None:
    (q, k, v), do = _inputs(18, 18, (2, 2), (24, 24), "fp16", batch=2)
    expected = interpreter.backward((q, k, v), do)
    packed = torch.stack([tensor.transpose(1, 2) for tensor in (q, k, v)], dim=2)
    views = tuple(tensor.transpose(1, 2) for tensor in packed.unbind(2))
    assert all(map(torch.equal, interpreter.backward(views, do), expected))
    for place in range(3):
        memory = torch.empty_like(packed)
        gradients = list(map(torch.empty_like, (q, k, v)))
        gradients[place] = memory.unbind(2)[place].transpose(1, 2)
        assert all(map(torch.equal, interpreter.backward(views, do, gradients=tuple(gradients)), expected))


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1, 2)])
def test_expanded_gradients_change_no_bit(interpreter: Interpreter, axes: tuple[int, ...]) -> None:
    inputs, do = _inputs(18, 21, (4, 2), (24, 40), "fp16", batch=2)
    narrow = do[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))]
    expanded = narrow.expand(do.shape)
    assert [expanded.stride(axis) for axis in axes] == [0] * len(axes)
    for causal in CAUSAL:
        actual = interpreter.backward(inputs, expanded, causal=causal)
        expected = interpreter.backward(inputs, expanded.contiguous(), causal=causal)
        assert all(map(torch.equal, actual, expected))
        _assert_close(actual, inputs, expanded, causal=causal)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_expanded_inputs_change_no_bit(interpreter: Interpreter, axis: int) -> None:
    inputs, do = _inputs(18, 21, (2, 2), (24, 40), "fp16", batch=2)
    expanded = tuple(tensor.narrow(axis, 0, 1).expand(tensor.shape) for tensor in inputs)
    gradients = tuple(map(torch.empty_like, inputs))
    actual = interpreter.backward(expanded, do, causal="bottom_right", gradients=gradients)
    expected = interpreter.backward(tuple(tensor.contiguous() for tensor in expanded), do, causal="bottom_right")
    assert all(map(torch.equal, actual, expected))


@every_causal
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_two_runs_are_bitwise_equal(interpreter: Interpreter, causal: Causal, dtype: DType) -> None:
    inputs, do = _inputs(40, 37, (4, 2), dtype=dtype)
    first, second = (interpreter.backward(inputs, do, causal=causal) for _ in range(2))
    assert all(map(torch.equal, first, second))


TILES = [(16, 16), (16, 64), (64, 16), (32, 32), (64, 64), (128, 32), (32, 128), (128, 128)]


@every_causal
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(41, 57), (70, 45)])
def test_configs_agree_within_rounding(
    interpreter: Interpreter, tile: tuple[int, int], causal: Causal, seq_q: int, seq_kv: int
) -> None:
    inputs, do = _inputs(seq_q, seq_kv, (1, 1), (24, 24), "fp16")
    _assert_right(interpreter, inputs, do, causal=causal, config=_config(tile, tile[::-1]))


@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 3), (5, 7), (7, 5)])
def test_tiles_larger_than_the_sequence(interpreter: Interpreter, causal: Causal, seq_q: int, seq_kv: int) -> None:
    config = _config((128, 128), (128, 128))
    _assert_right(interpreter, *_inputs(seq_q, seq_kv, dtype="bf16", batch=2), causal=causal, config=config)


def test_batch_elements_are_independent(interpreter: Interpreter) -> None:
    inputs, do = _inputs(17, 20, (4, 2), batch=2)
    both = interpreter.backward(inputs, do, causal="bottom_right")
    for index in (0, 1):
        one = interpreter.backward(
            tuple(tensor[index, None] for tensor in inputs), do[index, None], causal="bottom_right"
        )
        assert all(torch.equal(mine[index], alone[0]) for mine, alone in zip(both, one, strict=True))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_logits_of_a_thousand(interpreter: Interpreter, dtype: DType) -> None:
    (q, k, v), do = _inputs(33, 49, dtype=dtype)
    inputs = (q * 16, k * 16, v)
    _, lse = plain_attention(*inputs)
    assert lse.max() > 1e3
    # exp of a difference of two fp32 numbers of that size: each is off by half a unit in the last place.
    exact = _by_autograd(inputs, do, None, "none", None, torch.float64)
    plain = _by_autograd(inputs, do, None, "none", None, do.dtype)
    for gradient, truth, yardstick in zip(interpreter.backward(inputs, do), exact, plain, strict=True):
        rounding = 4 * lse.max().item() * 2.0**-24 * truth.abs().max().item()
        assert max_error(gradient, truth) <= FACTOR * max_error(yardstick, truth) + FLOOR + rounding
