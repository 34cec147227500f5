"""`torch.ops.flashgen.forward` and `.backward`: attention as opaque operators that torch can differentiate.

What autograd, torch.compile, torch.export, activation checkpointing, torch.func and fake tensors see of flashgen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.dispatch import attend
from flashgen.errors import UnsupportedError
from flashgen.gradients import gradients
from flashgen.tensors import empty_gradient, empty_output, has_memory


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
) -> tuple[Tensor, Tensor]:
    """`attention` with one return type: (output, lse), lse empty when it is not wanted; gradients need it."""
    result = attend(q, k, v, False if causal == "none" else causal, scale, layout, return_lse, family)
    if isinstance(result, tuple):
        return result
    return result, q.new_empty(0, dtype=torch.float32)


forward = torch.library.custom_op("flashgen::forward", mutates_args=())(compute)


@torch.library.custom_op("flashgen::backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float | None,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of what `forward` computed, given the gradients of both its results."""
    return gradients(q, k, v, o, lse, do, dlse, causal, scale, layout)


@forward.register_fake
def fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    *_: object,
) -> tuple[Tensor, Tensor]:
    """What `forward` returns, without values."""
    batch, first, second = q.shape[:3]
    heads, seq_q = (first, second) if layout == "bhsd" else (second, first)
    lse_shape = (batch, heads, seq_q) if return_lse else (0,)
    lse_dtype = torch.float64 if return_lse and q.dtype == torch.float64 else torch.float32
    return empty_output(q, v), q.new_empty(lse_shape, dtype=lse_dtype)


@backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradient(q), empty_gradient(k), empty_gradient(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.layout, ctx.with_lse, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.with_lse:
        raise UnsupportedError("gradients of torch.ops.flashgen.forward need the log-sum-exp: pass return_lse=True.")
    nothing = (None,) * 5
    if do is None and dlse is None:
        return (None, None, None, *nothing)
    q, k, v, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    if torch.is_grad_enabled():
        # With a graph of the backward, which torch.func always makes, its operator would be differentiated again.
        operator: Any = Gradients.apply
    else:
        operator = gradients if is_direct(q, k, v, o, lse, do) else torch.ops.flashgen.backward
    return (*operator(q, k, v, o, lse, do, dlse, ctx.causal, ctx.scale, ctx.layout), *nothing)


forward.register_autograd(_differentiate, setup_context=_save)


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def no_second_derivative(ctx: Any, *_: Tensor) -> None:
    raise UnsupportedError(
        "flashgen has no second derivative of attention. Write it out in torch (softmax(q k^T * scale) v) where you "
        "need one."
    )


backward.register_autograd(no_second_derivative, setup_context=save_nothing)


def folded(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Tensors whose mapped dimension has become part of the batch."""

    def fold(tensor: Tensor, dim: int | None) -> Tensor:
        whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        return whole.flatten(0, 1)

    return [None if tensor is None else fold(tensor, dim) for tensor, dim in zip(tensors, dims, strict=True)]


def looped(
    size: int, dims: tuple[int | None, ...], inputs: tuple[Any, ...], operator: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What an operator returns for each of `size` mapped calls, one after the other, and where that is mapped."""
    each = [
        operator(*(given if dim is None else given.select(dim, index) for given, dim in zip(inputs, dims, strict=True)))
        for index in range(size)
    ]
    results = tuple(torch.stack(result) for result in zip(*each, strict=True))
    return results, (0,) * len(results)


def mapped(operator: Any) -> Callable[..., Any]:
    """The rule of vmap for an operator whose calls cannot be one: `looped`."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return looped(info.batch_size, in_dims, inputs, operator)

    return rule


def _map_forward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], Any]:
    o, lse = torch.ops.flashgen.forward(*folded(info.batch_size, in_dims[:3], inputs[:3]), *inputs[3:])
    with_lse = inputs[6]
    return (
        (o.unflatten(0, (info.batch_size, -1)), lse.unflatten(0, (info.batch_size, -1)) if with_lse else lse),
        (0, 0 if with_lse else None),
    )


def _map_backward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
    results = torch.ops.flashgen.backward(*folded(info.batch_size, in_dims[:7], inputs[:7]), *inputs[7:])
    return tuple(result.unflatten(0, (info.batch_size, -1)) for result in results), (0, 0, 0)


forward.register_vmap(_map_forward)
backward.register_vmap(_map_backward)


def is_direct(*tensors: Tensor) -> bool:
    """Whether nobody needs to see an operator: eager calls, on tensors of a GPU that have memory of their own."""
    return (
        tensors[0].is_cuda
        and not is_watched()
        and not torch._C._are_functorch_transforms_active()
        and has_memory(*tensors)
    )


def is_watched() -> bool:
    """Whether somebody records operators: torch.compile, make_fx, jit.trace, a counter of FLOPs."""
    return bool(torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state())


def refuse_tangents(*tensors: Tensor) -> None:
    """Refuse forward mode, under one of its levels: operators let tangents pass unseen, as if derivatives were zero."""
    if torch.compiler.is_compiling() or any(_has_tangent(each) for each in tensors):
        raise UnsupportedError(
            "flashgen has no forward-mode derivative of attention. Use reverse mode (torch.func.vjp, backward), or "
            "write it out in torch."
        )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


class Direct(torch.autograd.Function):
    """Training in eager mode, past the operators, whose wrappers and defaults cost more than the launches."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.forward`."""
        results = compute(*inputs)
        _save(ctx, inputs, results)
        return results

    backward = staticmethod(_differentiate)


class Attention(torch.autograd.Function):
    """The operator for other calls that are differentiated: torch.func takes none with gradients of its own."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.forward`."""
        results: tuple[Tensor, Tensor] = torch.ops.flashgen.forward(*inputs)
        return results

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    vmap = staticmethod(_map_forward)


class Gradients(torch.autograd.Function):
    """Likewise for its gradients."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.backward`."""
        results: tuple[Tensor, Tensor, Tensor] = torch.ops.flashgen.backward(*inputs)
        return results

    setup_context = staticmethod(save_nothing)
    backward = staticmethod(no_second_derivative)
    vmap = staticmethod(_map_backward)
