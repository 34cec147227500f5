"""`flashgen.attention_kvcache`: judged, then by the operator that tracers know."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.autograd import refuse_tangents
from flashgen.caches import Cache
from flashgen.descales import Number
from flashgen.errors import InputError, UnsupportedError
from flashgen.judging import window_sides
from flashgen.kvcache_autograd import run
from flashgen.modifiers import Options
from flashgen.serving import Call
from flashgen.tensors import as_autocast, causal_from

if TYPE_CHECKING:
    from flashgen.select import Selection


def attention_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    causal: bool | str = True,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    descale_k: Number | None = None,
    descale_v: Number | None = None,
    family: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of new tokens to a cache of keys and values, contiguous or in pages, which may be appended to first.

    For inference: one new token of each sequence (decode), several (speculative decoding), or parts of prompts beside
    single tokens (chunked prefill, with cu_seqlens_q). The rows of q are the last tokens of their sequence. Lengths and
    tables stay on the device, so that a CUDA graph can be replayed with others; what lies behind a sequence's end, and
    entries of the table for pages behind it, is never read. There are no gradients.

    Args:
        q: [batch, seq_q, heads, head_dim], any strides; fp16, bf16 or fp32. With cu_seqlens_q [total_q, heads,
            head_dim].
        k_cache, v_cache: [batch, seq_kv, kv_heads, head_dim] and [..., head_dim_v], or, with a block_table, [pages,
            page_size, kv_heads, ...]; any strides, but the last dimension is contiguous. In q's dtype, or both in
            float8_e4m3fn or int8.
        cache_seqlens: int32 [batch]; how many keys each sequence has in the cache, without those that this call
            appends. What exceeds the cache counts as full.
        block_table: int32 [batch, pages per sequence]; the pages of each sequence, which others may share.
        k, v: [batch, seq_new, kv_heads, ...], or with cu_seqlens_q [total_q, kv_heads, ...], in the caches' dtype;
            they are written to the caches behind the keys that are there, and seen. What finds no room is neither.
        causal: True or "bottom_right": row i of seq_q sees the keys j <= i + (keys - seq_q), where keys counts all of
            the sequence's, appended ones too. False: all of them.
        scale, softcap, sinks: as for `attention`.
        window: (left, right), as for `attention`, around j = i + (keys - seq_q).
        alibi_slopes: [heads] or [batch, heads].
        return_lse: whether to return the log-sum-exp, too.
        num_splits: into how many parts keys are divided, 1 to 128, which are computed beside each other. None chooses
            by what fills the GPU; with a number the bits of a row do not depend on the others of the batch.
        cu_seqlens_q: int32 [batch + 1], cumulative: sequence s has the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] of
            q, or none.
        max_seqlen_q: with cu_seqlens_q; no sequence has more rows; what lies beyond is neither computed nor appended.
        descale_k, descale_v: what fp8 and int8 caches are multiplied by; None is 1. A number, or fp32 [], [kv_heads],
            [batch, kv_heads], or one for each token, in the caches' own first three dimensions; not negative.
        family: only this family of kernels, or an error; None chooses.

    Returns:
        [batch, seq_q, heads, head_dim_v] in q's dtype, or autocast's, and, if asked for, the natural log-sum-exp, fp32
        [batch, heads, seq_q]; with cu_seqlens_q [total_q, heads, head_dim_v] and [heads, total_q]. A row that sees no
        key, or belongs to no sequence, is 0 and its lse -inf, or, of a sequence, the sink.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: no kernel does this, or something requires its gradient.
    """
    call = _call(
        q, k_cache, v_cache, cache_seqlens, block_table, k, v, causal, scale, window, softcap, alibi_slopes, sinks,
        return_lse, num_splits, cu_seqlens_q, max_seqlen_q, descale_k, descale_v, family,
    )  # fmt: skip
    given = call.tensors
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        raise UnsupportedError(
            "attention_kvcache has no backward, but a tensor requires its gradient. Call it under torch.no_grad(), "
            "detach() the tensors, or train with attention or attention_varlen."
        )
    if forward_ad._current_level >= 0:
        refuse_tangents(*given)
    out, lse = run(call, given)
    return out if lse is None or not return_lse else (out, lse)


def explain_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> Selection:
    """Which kernel `attention_kvcache` would launch for these tensors, from which file and why, and what was refused.

    Arguments as for `attention_kvcache`; nothing is launched. `str()` of the result is meant for people.
    """
    from flashgen.kvcache_plans import selected

    given = inspect.signature(attention_kvcache).bind(q, k_cache, v_cache, **options)
    given.apply_defaults()
    return selected(_call(*given.arguments.values()))


def _call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    causal: bool | str,
    scale: float | None,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
    num_splits: int | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    descale_k: Number | None,
    descale_v: Number | None,
    family: str | None,
) -> Call:
    """The arguments of `attention_kvcache`, in its order, with autocast, which does not cast caches."""
    mask = causal_from(causal)
    if mask == "top_left":
        raise InputError(
            "causal must be False, True or 'bottom_right', but got 'top_left': rows are the last of their sequence."
        )
    device = q.device.type if isinstance(q, Tensor) else ""
    if device in ("cuda", "cpu") and torch.is_autocast_enabled(device):
        q = as_autocast(q, device)
        k, v = (as_autocast(each, device) if isinstance(each, Tensor) else each for each in (k, v))
    cache = Cache(k_cache, v_cache, cache_seqlens, block_table, k, v, cu_seqlens_q, max_seqlen_q, descale_k, descale_v)
    options = Options(softcap=softcap, alibi_slopes=alibi_slopes, window=window_sides(window), sinks=sinks)
    return Call(q, cache, mask, scale, return_lse, num_splits, family, options)
