"""`flashgen.attention_varlen`: judged, then by the operator that autograd and tracers know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.autograd import refuse_tangents
from flashgen.descales import FP8, Descales, Number
from flashgen.dropout import drawn
from flashgen.errors import UnsupportedError
from flashgen.judging import window_sides
from flashgen.modifiers import Options, check_gradients
from flashgen.tensors import as_autocast, causal_from, check_device
from flashgen.varlen import Lengths, attend, check_lengths
from flashgen.varlen_autograd import Varlen, run


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
    operator: Any = Varlen.apply if wants_grad and not torch.compiler.is_compiling() else run
    results: tuple[Tensor, Tensor] = operator(
        q, k, v, *lengths, causal, scale, return_lse or wants_grad, family, options.softcap,
        *window_sides(options.window), options.dropout_p, options.alibi_slopes, options.dropout_seed, options.sinks,
    )  # fmt: skip
    return results
