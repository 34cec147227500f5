"""`flashgen.attention_varlen` and the operators that autograd and tracers know it by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.autograd import is_direct, looped, no_second_derivative, refuse_tangents, save_nothing
from flashgen.descales import FP8, Descales, Number
from flashgen.dropout import drawn
from flashgen.errors import UnsupportedError
from flashgen.modified_autograd import sinks_gradient
from flashgen.modifiers import Options, check_gradients, window_sides
from flashgen.tensors import as_autocast, causal_from, check_device
from flashgen.varlen import Lengths, attend, check_lengths, gradients

# The place of `sinks` among the operator's arguments, the last of them.
_SINKS = 18


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    family: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
    descale_q: Number | None = None,
    descale_k: Number | None = None,
    descale_v: Number | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention within sequences of different lengths that lie behind each other, without padding.

    Sequence s has the queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] and the keys cu_seqlens_k[s] to
    cu_seqlens_k[s + 1]; either may be none. Lengths are read by the kernel, never by the host: whatever they say, no
    memory outside the tensors is touched.

    Args:
        q: [total_q, heads, head_dim], any strides; fp16, bf16, fp32, or fp8 (e4m3), which has no gradients.
        k, v: [total_k, kv_heads, head_dim] and [total_k, kv_heads, head_dim_v].
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], cumulative lengths from 0.
        max_seqlen_q, max_seqlen_k: no sequence is longer; what lies beyond is not computed.
        causal, scale, return_lse, family, window, softcap, sinks: as for `attention`; a sequence's own lengths count.
        alibi_slopes: [heads] or [sequences, heads].
        seqused_k: int32 [sequences]; only so many keys of each sequence count.
        dropout_p, dropout_seed, generator: as for `attention`, whose batch sequences are, each from row and key 0 on.
        descale_q, descale_k, descale_v: of fp8, as for `attention`, but with sequences for batch and without blocks.

    Returns:
        [total_q, heads, head_dim_v] and, if asked for, the log-sum-exp, fp32 [heads, total_q]; 0 and -inf for tokens
        that belong to no sequence. Both are differentiable by q, k, v and sinks, once.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: no kernel does this.
    """
    options = Options(softcap=softcap, alibi_slopes=alibi_slopes, window=window, sinks=sinks)
    check_gradients(options, of_slopes=False)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
    if not torch.compiler.is_compiling():
        check_lengths(q, k, v, lengths)
        check_device(q.device, family)
    options = options._replace(dropout_p=dropout_p, dropout_seed=drawn(dropout_p, dropout_seed, generator, q.device))
    descales = Descales(descale_q, descale_k, descale_v)
    if q.dtype == FP8 or descales.given:
        if torch.compiler.is_compiling():
            raise UnsupportedError("attention_varlen of fp8 inputs is no operator: call it outside of torch.compile.")
        out, lse = attend(q, k, v, causal_from(causal), scale, family, options, lengths, descales)
    else:
        out, lse = _attend(q, k, v, causal_from(causal), scale, return_lse, family, options, lengths)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    return_lse: bool,
    family: str | None,
    options: Options,
    lengths: Lengths,
) -> tuple[Tensor, Tensor]:
    """With autocast and gradients."""
    if q.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(q.device.type):
        q, k, v = (as_autocast(each, q.device.type) for each in (q, k, v))
    given = [each for each in (q, k, v, options.sinks) if isinstance(each, Tensor)]
    if forward_ad._current_level >= 0:
        refuse_tangents(*given)
    wants_grad = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    operator: Any = Varlen.apply if wants_grad and not torch.compiler.is_compiling() else _run
    results: tuple[Tensor, Tensor] = operator(
        q, k, v, *lengths, causal, scale, return_lse or wants_grad, family, options.softcap,
        *window_sides(options.window), options.dropout_p, options.alibi_slopes, options.dropout_seed, options.sinks,
    )  # fmt: skip
    return results


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


def _run(*inputs: Any) -> tuple[Tensor, Tensor]:
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


def _map_forward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
    return looped(info.batch_size, in_dims, inputs, torch.ops.flashgen.forward_varlen)


def _map_backward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
    return looped(info.batch_size, in_dims, inputs, torch.ops.flashgen.backward_varlen)


forward_varlen.register_vmap(_map_forward)
backward_varlen.register_vmap(_map_backward)


class Varlen(torch.autograd.Function):
    """Eager calls that are differentiated."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.forward_varlen`."""
        return _run(*inputs)

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
