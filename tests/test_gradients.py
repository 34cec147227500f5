"""Gradients of `attention` on CPU tensors, in numbers: finite differences, closed forms, torch and itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import flashgen
from flashgen.errors import UnsupportedError

Three = tuple[Tensor, Tensor, Tensor]
CAUSAL = (False, True, "top_left")
every_causal = pytest.mark.parametrize("causal", CAUSAL)


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _qkv(
    seq_q: int = 5, seq_kv: int = 7, heads: int = 4, kv_heads: int = 2, width: int = 6, width_v: int = 6, batch: int = 2
) -> Three:
    q, k = _random(batch, heads, seq_q, width, seed=1), _random(batch, kv_heads, seq_kv, width, seed=2)
    return q, k, _random(batch, kv_heads, seq_kv, width_v, seed=3)


def _map(change: Callable[[Tensor], Tensor], tensors: Three) -> Three:
    q, k, v = map(change, tensors)
    return q, k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    result = flashgen.attention(q, k, v, return_lse=True, **options)
    assert isinstance(result, tuple)
    return result


def _o(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    result = flashgen.attention(q, k, v, **options)
    assert isinstance(result, Tensor)
    return result


def _gradients(tensors: Three, do: Tensor | None = None, dlse: Tensor | None = None, **options: Any) -> Three:
    """dq, dk and dv; `do` is random where it is not given, `dlse` nothing."""
    leaves = _map(lambda tensor: tensor.detach().requires_grad_(), tensors)
    o, lse = _attend(*leaves, **options)
    if do is None:
        do = _random(*o.shape, seed=4, dtype=o.dtype)
    results, upstream = ((o,), (do,)) if dlse is None else ((o, lse), (do, dlse))
    dq, dk, dv = torch.autograd.grad(results, leaves, upstream)
    return dq, dk, dv


def _close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-12) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def _equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def _plainly(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """The formula with keys repeated over their group, for torch to differentiate; every row has to see a key."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * math.sqrt(1.0 / q.shape[-1])
    return (scores if seen is None else scores.masked_fill(~seen, -math.inf)).softmax(-1) @ v


@every_causal
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"heads": 4}, {"scale": 0.7}),
        ({"kv_heads": 1}, {"scale": -0.4}),
        ({"width_v": 3}, {"layout": "bshd"}),
        ({"width": 3, "width_v": 8}, {"scale": 2}),
        ({"width": 1, "width_v": 1, "heads": 2, "kv_heads": 1}, {"scale": 0}),
        ({"seq_q": 7, "seq_kv": 4}, {}),
        ({"seq_q": 7, "seq_kv": 1, "heads": 6}, {"layout": "bshd"}),
        ({"seq_q": 1, "seq_kv": 6}, {}),
        ({"seq_q": 4, "seq_kv": 4, "batch": 1}, {}),
    ],
    ids=str,
)
def test_finite_differences(sizes: dict[str, Any], options: dict[str, Any], causal: bool | str) -> None:
    """Of the output and, where every row sees a key, of the log-sum-exp: elsewhere it is -inf."""
    sizes = {"seq_q": 3, "seq_kv": 4, "heads": 2, "kv_heads": 2, "width": 3, "batch": 1} | sizes
    q, k, v = _qkv(**sizes)
    if options.get("layout") == "bshd":
        q, k, v = _map(lambda tensor: tensor.transpose(1, 2), (q, k, v))
    leaves = _map(lambda tensor: tensor.detach().clone().requires_grad_(), (q, k, v))

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        o, lse = _attend(*tensors, causal=causal, **options)
        rows = max(0, sizes["seq_q"] - sizes["seq_kv"]) if causal is True else 0
        return o, lse[:, :, rows:]

    assert torch.autograd.gradcheck(call, leaves, fast_mode=bool(options))


@every_causal
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(9, 13), (13, 9), (3, 600)])
def test_what_v_receives_is_what_the_rows_give(causal: bool | str, layout: str, seq_q: int, seq_kv: int) -> None:
    tensors = _qkv(seq_q, seq_kv, width_v=10)
    do = _random(2, 4, seq_q, 10, seed=4)
    seen = _attend(*tensors, causal=causal)[1] > -math.inf
    given = (do * seen[..., None]).reshape(2, 2, 2, seq_q, 10).sum((2, 3))
    if layout == "bshd":
        tensors, do = _map(lambda tensor: tensor.transpose(1, 2), tensors), do.transpose(1, 2)
    dv = _gradients(tensors, do, causal=causal, layout=layout)[2]
    _close((dv.sum(2 if layout == "bhsd" else 1),), (given,))


@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 7), (7, 5)])
def test_equal_values_leave_nothing_to_learn_of_scores(causal: bool | str, seq_q: int, seq_kv: int) -> None:
    q, k, v = _qkv(seq_q, seq_kv)
    dq, dk, dv = _gradients((q, k, v[:, :, :1].expand_as(v)), causal=causal)
    _close((dq, dk), (torch.zeros_like(q), torch.zeros_like(k)))
    assert dv.any()


@every_causal
def test_shifting_all_keys_or_values_moves_no_gradient(causal: bool | str) -> None:
    """Rows of dS sum to 0: a constant added to the keys or values cancels, and each row's dS knows no constant key."""
    q, k, v = _qkv(7, 5)
    dq, dk, dv = _gradients((q, k, v), causal=causal)
    shift_k, shift_v = _random(2, 2, 1, 6, seed=5), _random(2, 2, 1, 6, seed=6)
    _close(_gradients((q, k + shift_k, v), causal=causal), (dq, dk, dv))
    _close(_gradients((q, k, v + shift_v), causal=causal), (dq, dk, dv))
    # All keys moved along one direction change no output, so that what they receive sums to 0.
    _close((dk.sum(2),), (torch.zeros(2, 2, 6, dtype=torch.float64),))


@every_causal
def test_scaling_q_up_and_k_down_is_free(causal: bool | str) -> None:
    """(c q) k = q (c k): along that direction the loss is flat, and the scale is a factor of q."""
    q, k, v = _qkv(5, 7)
    dq, dk, dv = _gradients((q, k, v), causal=causal)
    along_q, along_k = ((one * other).sum((1, 2, 3)) for one, other in ((q, dq), (k, dk)))
    _close((along_q,), (along_k,))
    other = _gradients((q * 3.0, k, v), causal=causal, scale=6**-0.5 / 3.0)
    _close(other, (dq / 3.0, dk, dv))


@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 7), (7, 5)])
def test_zero_queries_and_a_zero_scale_share_evenly(causal: bool | str, seq_q: int, seq_kv: int) -> None:
    q, k, v = _qkv(seq_q, seq_kv, heads=1, kv_heads=1)
    do = _random(2, 1, seq_q, 6, seed=4)
    first = {False: seq_kv, True: 1 + seq_kv - seq_q, "top_left": 1}[causal]
    counts = [seq_kv if causal is False else min(max(first + row, 0), seq_kv) for row in range(seq_q)]
    shares = [[1.0 / count if key < count else 0.0 for key in range(seq_kv)] for count in counts]
    dv = torch.tensor(shares, dtype=torch.float64).T @ do
    _close((_gradients((torch.zeros_like(q), k, v), do, causal=causal)[2],), (dv,))
    dq, dk, even = _gradients((q, k, v), do, torch.ones(2, 1, seq_q).double(), causal=causal, scale=0)
    _close((even,), (dv,))
    assert not dq.any() and not dk.any()


@every_causal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seq_q", "seq_kv"),
    [(0, 2, 1, 8, 8), (2, 0, 0, 8, 8), (2, 2, 1, 0, 8), (2, 2, 1, 8, 0), (1, 1, 1, 0, 0)],
)
def test_nothing_to_attend_gives_zero_gradients(
    causal: bool | str, dtype: torch.dtype, batch: int, heads: int, kv_heads: int, seq_q: int, seq_kv: int
) -> None:
    q, k, v = _qkv(seq_q, seq_kv, batch=batch, heads=heads, kv_heads=kv_heads, width_v=3)
    tensors = _map(lambda tensor: tensor.to(dtype), (q, k, v))
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    actual = _gradients(tensors, None, torch.ones(batch, heads, seq_q, dtype=lse_dtype), causal=causal)
    assert _equal(actual, _map(torch.zeros_like, tensors)) and all(each.dtype == dtype for each in actual)


@every_causal
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (9, 3), (4, 1)])
def test_shared_keys_collect_what_their_group_gives(causal: bool | str, heads: int, kv_heads: int) -> None:
    """Grouped queries, and lengths at which the two masks differ: as torch differentiates repeated keys."""
    tensors = _qkv(3, 5, heads=heads, kv_heads=kv_heads, width_v=9)
    do = _random(2, heads, 3, 9, seed=4)
    seen = torch.ones(3, 5, dtype=torch.bool).tril({False: 5, True: 2, "top_left": 0}[causal])
    leaves = _map(lambda tensor: tensor.clone().requires_grad_(), tensors)
    expected = torch.autograd.grad(_plainly(*leaves, seen=seen), leaves, do)
    _close(_gradients(tensors, do, causal=causal), expected)


def test_group_sums_of_16_bit_inputs_are_rounded_once() -> None:
    """Eight heads share one key head; bf16 running sums over them would be several times less exact."""
    tensors = _map(Tensor.bfloat16, _qkv(64, 64, heads=8, kv_heads=1, width=32, width_v=32, batch=1))
    do = _random(1, 8, 64, 32, seed=4, dtype=torch.bfloat16)
    exact = _gradients(_map(Tensor.double, tensors), do.double())
    for actual, expected in zip(_gradients(tensors, do)[1:], exact[1:], strict=True):
        assert (actual.double() - expected).abs().max() <= torch.finfo(torch.bfloat16).eps * expected.abs().max()


@pytest.mark.parametrize("reduce", [Tensor.sum, Tensor.mean, lambda o: o[..., 0].sum(), lambda o: o[:, :, :, :1].sum()])
def test_an_output_that_is_summed_up_has_an_expanded_gradient(reduce: Callable[[Tensor], Tensor]) -> None:
    tensors = _qkv(width_v=4)
    leaves = _map(lambda tensor: tensor.clone().requires_grad_(), tensors)
    actual = torch.autograd.grad(reduce(_o(*leaves)), leaves)
    expected = torch.autograd.grad(reduce(_plainly(*leaves)), leaves)
    _close(actual, expected)
    o = _o(*leaves)
    (upstream,) = torch.autograd.grad(reduce(o), o)
    assert _equal(actual, _gradients(tensors, upstream.contiguous()))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0), (1, 0, 2, 3)])
def test_strides_of_the_upstream_gradient_do_not_matter(order: tuple[int, ...], layout: str) -> None:
    q, k, v = _qkv(4, 4, width_v=10)
    o, lse = _attend(q, k, v, layout=layout)
    do, dlse = _random(*o.shape, seed=4), _random(*lse.shape, seed=5)
    back = sorted(range(4), key=order.__getitem__)
    strided = do.permute(order).contiguous().permute(back)
    assert torch.equal(strided, do) and strided.stride() != do.stride()
    turned = dlse.transpose(1, 2).contiguous().transpose(1, 2)
    _close(_gradients((q, k, v), strided, turned, layout=layout), _gradients((q, k, v), do, dlse, layout=layout))


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "gaps after rows": lambda tensor: _poisoned(tensor, 3)[..., : tensor.shape[3]],
    "gaps between rows": lambda tensor: _poisoned(tensor, 2)[:, :, : tensor.shape[2]],
    "gaps between heads": lambda tensor: _poisoned(tensor, 1)[:, : tensor.shape[1]],
    "strided last": lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3),
    "shifted": lambda tensor: torch.cat([tensor.new_full((1,), math.nan), tensor.flatten()])[1:].view_as(tensor),
}


def _poisoned(tensor: Tensor, dim: int) -> Tensor:
    """The tensor followed by as much NaN."""
    return torch.cat([tensor, torch.full_like(tensor, math.nan)], dim)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_and_poison_change_no_bit(memory: str, which: tuple[int, ...], layout: str) -> None:
    q, k, v = _map(Tensor.float, _qkv(5, 5, width=8, width_v=8))
    given = [MEMORY[memory](each) if index in which else each for index, each in enumerate((q, k, v))]
    actual = _gradients((given[0], given[1], given[2]), causal=True, layout=layout)
    assert _equal(actual, _gradients((q, k, v), causal=True, layout=layout))
    for gradient, tensor in zip(actual, given, strict=True):
        # In the input's memory order, but rows are contiguous.
        same = torch.empty_like(tensor) if memory != "strided last" else tensor.contiguous()
        assert gradient.isfinite().all() and gradient.stride() == same.stride()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_packed_projections_collect_their_gradients(layout: str) -> None:
    packed = _random(2, 5, 3, 4, 6, seed=1).requires_grad_()
    q, k, v = packed.unbind(2)
    if layout == "bhsd":
        q, k, v = _map(lambda tensor: tensor.transpose(1, 2), (q, k, v))
    o = _o(q, k, v, causal=True, layout=layout)
    do = _random(*o.shape, seed=4)
    (actual,) = torch.autograd.grad(o, packed, do)
    parts = _gradients(_map(Tensor.contiguous, (q, k, v)), do, causal=True, layout=layout)
    parts = parts if layout == "bshd" else _map(lambda tensor: tensor.transpose(1, 2), parts)
    assert torch.equal(actual, torch.stack(parts, 2))


def test_expanded_keys_collect_the_gradients_of_all_copies() -> None:
    q, k, v = _qkv(kv_heads=1)
    few = _map(lambda tensor: tensor.clone().requires_grad_(), (q, k, v))
    actual = torch.autograd.grad(_o(few[0], *(each.expand(2, 4, 7, 6) for each in few[1:])).cos().sum(), few)
    _close(actual, torch.autograd.grad(_o(*few).cos().sum(), few))


def test_one_tensor_as_query_key_and_value_adds_three_gradients() -> None:
    x = _random(2, 3, 5, 6, seed=1).requires_grad_()
    (actual,) = torch.autograd.grad(_o(x, x, x, causal=True), x, _random(2, 3, 5, 6, seed=4))
    dq, dk, dv = _gradients((x, x, x), causal=True)
    _close((actual,), (dq + dk + dv,))


@every_causal
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 3), (76, 1), (130, 65)])
def test_rows_without_keys_neither_get_nor_give_gradients(causal: bool | str, seq_q: int, seq_kv: int) -> None:
    tensors = _qkv(seq_q, seq_kv)
    do, dlse = _random(2, 4, seq_q, 6, seed=4), _random(2, 4, seq_q, seed=5)
    dq, dk, dv = _gradients(tensors, do, dlse, causal=causal)
    blind = seq_q - seq_kv if causal is True else 0
    assert not dq[:, :, :blind].any() and all(each.isfinite().all() for each in (dq, dk, dv))
    visible = (tensors[0][:, :, blind:], *tensors[1:])
    rest = _gradients(visible, do[:, :, blind:], dlse[:, :, blind:], causal=causal)
    _close((dq[:, :, blind:], dk, dv), rest)


@pytest.mark.parametrize("causal", [True, "top_left"])
def test_later_tokens_do_not_reach_earlier_rows(causal: bool | str) -> None:
    q, k, v = _qkv(6, 6)
    do = _random(2, 4, 6, 6, seed=4)
    dq, _, _ = _gradients((q, k, v), do, causal=causal)
    k[:, :, 4:], v[:, :, 4:] = 3.0, -2.0
    assert torch.equal(_gradients((q, k, v), do, causal=causal)[0][:, :, :4], dq[:, :, :4])
    do[:, :, 4:] = 0.0
    assert not any(each[:, :, 4:].any() for each in _gradients((q, k, v), do, causal=causal))


@every_causal
def test_batch_elements_do_not_meet(causal: bool | str) -> None:
    tensors, do, dlse = _qkv(batch=3), _random(3, 4, 5, 6, seed=4), _random(3, 4, 5, seed=5)
    together = _gradients(tensors, do, dlse, causal=causal)
    for index in range(3):
        one = slice(index, index + 1)
        alone = _gradients(_map(lambda each: each[one], tensors), do[one], dlse[one], causal=causal)  # noqa: B023
        _close(alone, _map(lambda each: each[one], together))  # noqa: B023


@every_causal
def test_gradients_repeat_bitwise(causal: bool | str) -> None:
    tensors = _map(Tensor.float, _qkv(130, 65, heads=8, kv_heads=1))
    first = _gradients(tensors, causal=causal)
    assert all(_equal(_gradients(tensors, causal=causal), first) for _ in range(10))


def test_each_result_alone_and_both_add_up() -> None:
    tensors = _qkv()
    do, dlse = _random(2, 4, 5, 6, seed=4), _random(2, 4, 5, seed=5)
    leaves = _map(lambda tensor: tensor.clone().requires_grad_(), tensors)
    of_lse = torch.autograd.grad(_attend(*leaves)[1], leaves, dlse)
    group = tensors[1].repeat_interleave(2, 1)
    p = (tensors[0] @ group.mT * 6**-0.5).softmax(-1)
    _close((of_lse[0], of_lse[2]), (p @ group * 6**-0.5 * dlse[..., None], torch.zeros_like(tensors[2])))
    both = zip(_gradients(tensors, do), of_lse, strict=True)
    _close(_gradients(tensors, do, dlse), tuple(one + other for one, other in both))


@pytest.mark.parametrize("magnitude", [300.0, 1e4, 1e5])
@pytest.mark.parametrize("width", [16, 24, 64, 72])
def test_large_scores_have_exact_gradients(magnitude: float, width: int) -> None:
    """One key wins each row: what v receives is known exactly, however large the scores are."""
    q, k, v = (_random(1, 1, 8, width, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
    tensors = (q * magnitude, k * magnitude, v)
    do = _random(1, 1, 8, width, seed=4, dtype=torch.float32)
    best, keys = (tensors[0].double() @ tensors[1].double().mT * width**-0.5).topk(2)
    assert (best[..., 0] - best[..., 1] > 100.0).all()
    dv = torch.nn.functional.one_hot(keys[..., 0], 8).mT.float() @ do
    actual = _gradients(tensors, do)
    _close(actual[2:], (dv,), 1e-5)
    assert all(each.isfinite().all() for each in actual)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 4, 2), (0, None, 3), (None, 0, None), (2, None, None)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_mapped_and_differentiated_as_in_a_loop(in_dims: tuple[int | None, ...], layout: str) -> None:
    tensors = _qkv(4, 4)
    loops = [
        [each if dim is None else each * (1.0 + step) for each, dim in zip(tensors, in_dims, strict=True)]
        for step in range(3)
    ]
    given = [each[0] if dim is None else torch.stack(each, dim) for *each, dim in zip(*loops, in_dims, strict=True)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = _attend(q, k, v, causal=True, layout=layout)
        return o.cos().sum() + lse.square().sum()

    def values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _attend(q, k, v, causal="top_left", layout=layout)

    for function in (values, grad(loss, argnums=(0, 1, 2))):
        expected = tuple(torch.stack(each) for each in zip(*(function(*each) for each in loops), strict=True))
        _close(vmap(function, in_dims=in_dims)(*given), expected)


def test_jacobians_are_rows_of_gradients() -> None:
    q, k, v = _qkv(2, 3, width=2, width_v=2, batch=1)
    jacobians = jacrev(_o, argnums=(0, 1, 2))(q, k, v)
    basis = torch.eye(q.numel(), dtype=torch.float64).view(-1, *q.shape)
    rows = [_gradients((q, k, v), each) for each in basis]
    for actual, *expected in zip(jacobians, *rows, strict=True):
        _close((actual.flatten(0, 3),), (torch.stack(expected),))
    leaves = _map(lambda tensor: tensor.clone().requires_grad_(), (q, k, v))
    batched = torch.autograd.grad(_o(*leaves), leaves, basis, is_grads_batched=True)
    _close(batched, tuple(torch.stack(each) for each in zip(*rows, strict=True)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused_not_zero() -> None:
    q, k, v = _qkv()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))  # type: ignore[no-untyped-call]
        with pytest.raises(UnsupportedError, match="no forward-mode derivative of attention"):
            _o(dual, k, v)
        assert torch.equal(_o(q, k, v), _o(q, k, v))

    def tangent(q: Tensor) -> Tensor:
        return torch.func.jvp(lambda q: _o(q, k, v), (q,), (torch.ones_like(q),))[1]  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match="forward-mode"):
        tangent(q)
    with pytest.raises(Exception, match="forward-mode"):
        torch.compile(tangent, backend="aot_eager")(q)


def test_tensors_that_hold_nothing_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="runs on CUDA and CPU tensors, but got meta"):
        _gradients(_map(lambda tensor: tensor.to("meta"), _qkv()))


def test_autocast_casts_inputs_and_nothing_else() -> None:
    """Sums stay in fp32 inside, forward and backward."""
    tensors = _map(Tensor.bfloat16, _qkv())
    dlse = _random(2, 4, 5, seed=5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lse, gradients = _attend(*tensors)[1], _gradients(tensors, None, dlse)
    assert torch.equal(lse, _attend(*tensors)[1]) and _equal(gradients, _gradients(tensors, None, dlse))
