"""`torch.ops.flashgen.forward_varlen` and `.backward_varlen`: sequences of different lengths as opaque operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.autograd import is_direct, mapped, no_second_derivative, save_nothing
from flashgen.errors import UnsupportedError
from flashgen.modified_autograd import sinks_gradient
from flashgen.modifiers import Options
from flashgen.varlen import Lengths, attend, gradients

# The place of `sinks` among the operator's arguments, the last of them.
_SINKS = 18


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: str,
    scale: float | None,
    return_lse: bool,
    family: str | None,
    softcap: float | None,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(output, lse), lse empty when it is not wanted; gradients need it."""
    options = Options(
        softcap=softcap, alibi_slopes=alibi_slopes, window=(window_left, window_right), dropout_p=dropout_p,
        dropout_seed=dropout_seed, sinks=sinks,
    )  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
    out, lse = attend(q, k, v, causal, scale, family, options, lengths)
    return out, lse if return_lse else lse.new_empty(0)


forward_varlen = torch.library.custom_op("flashgen::forward_varlen", mutates_args=())(compute)


@forward_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse_shape = (q.shape[1], q.shape[0]) if others[7] else (0,)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(lse_shape, dtype=lse_dtype)


@torch.library.custom_op("flashgen::backward_varlen", mutates_args=())
def backward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: str,
    scale: float | None,
    softcap: float | None,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    alibi_slopes: Tensor | None,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of what `forward_varlen` computed."""
    options = Options(
        softcap=softcap, alibi_slopes=alibi_slopes, window=(window_left, window_right), dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
    return gradients(q, k, v, o, lse, do, dlse, causal, scale, options, lengths)


@backward_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def run(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The operator, or what it does where nobody needs to see one."""
    tensors = (each for each in inputs if isinstance(each, Tensor))
    results: tuple[Tensor, Tensor] = (compute if is_direct(*tensors) else torch.ops.flashgen.forward_varlen)(*inputs)
    return results


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *lengths, ctx.max_seqlen_q, ctx.max_seqlen_k, ctx.causal, ctx.scale, ctx.with_lse, _ = inputs[:12]
    ctx.numbers = inputs[12:16]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *lengths, *inputs[16:])


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.with_lse:
        raise UnsupportedError(
            "gradients of torch.ops.flashgen.forward_varlen need the log-sum-exp: pass return_lse=True."
        )
    if do is None and dlse is None:
        return (None,) * (_SINKS + 1)
    q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, seqused_k, slopes, seed, sinks = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    # With a graph of the backward, which torch.func always makes, its operator would be differentiated again.
    operator: Any = VarlenGradients.apply if torch.is_grad_enabled() else torch.ops.flashgen.backward_varlen
    dq, dk, dv = operator(
        q, k, v, o, lse, do, dlse, cu_seqlens_q, cu_seqlens_k, seqused_k, ctx.max_seqlen_q, ctx.max_seqlen_k,
        ctx.causal, ctx.scale, *ctx.numbers, slopes, seed,
    )  # fmt: skip
    dsinks = None
    if ctx.needs_input_grad[_SINKS]:
        # As if all tokens were one sequence; those of none have no probability.
        dsinks = sinks_gradient(sinks, o[None], lse[None], do[None], None if dlse is None else dlse[None], "bshd")
    return (dq, dk, dv, *(None,) * (_SINKS - 3), dsinks)


forward_varlen.register_autograd(_differentiate, setup_context=_save)
backward_varlen.register_autograd(no_second_derivative, setup_context=save_nothing)


_map_forward, _map_backward = mapped(torch.ops.flashgen.forward_varlen), mapped(torch.ops.flashgen.backward_varlen)
forward_varlen.register_vmap(_map_forward)
backward_varlen.register_vmap(_map_backward)


class Varlen(torch.autograd.Function):
    """Eager calls that are differentiated."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.forward_varlen`."""
        return run(*inputs)

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    vmap = staticmethod(_map_forward)


class VarlenGradients(torch.autograd.Function):
    """Their gradients, which are not differentiated again."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.backward_varlen`."""
        results: tuple[Tensor, Tensor, Tensor] = torch.ops.flashgen.backward_varlen(*inputs)
        return results

    setup_context = staticmethod(save_nothing)
    backward = staticmethod(no_second_derivative)
    vmap = staticmethod(_map_backward)
