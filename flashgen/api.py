"""`flashgen.attention`: autocast, then straight to the kernel, or by the operator that autograd and tracers know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.autograd import Attention, Direct, is_direct, is_watched, refuse_tangents
from flashgen.descales import FP8, Descales, Number
from flashgen.dispatch import attend
from flashgen.dropout import drawn
from flashgen.expressions.given import written
from flashgen.flat import flat
from flashgen.fp8 import attention_fp8
from flashgen.modified import judged
from flashgen.modified_autograd import Modified, run
from flashgen.modifiers import Options, check_gradients
from flashgen.tensors import (
    CPU_DTYPES,
    GPU_DTYPES,
    as_autocast,
    causal_from,
    check_device,
    check_scale,
    check_tensors,
    from_tensors,
    has_memory,
)

Mod = str | Callable[..., Any] | tuple[Any, Any]

_direct: Any = Direct.apply
_traceable: Any = Attention.apply
_differentiable: Any = Modified.apply


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    family: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    segment_ids_q: Tensor | None = None,
    segment_ids_kv: Tensor | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    mod_tensors: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
    descale_q: Number | None = None,
    descale_k: Number | None = None,
    descale_v: Number | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v, by the fastest kernel known for this GPU; for CPU tensors, up to fp64, in plain torch.

    Args:
        q: [batch, heads, seq_q, head_dim], any strides; fp16, bf16 or fp32; or fp8, e4m3, which has no gradients.
        k, v: [batch, kv_heads, seq_kv, head_dim] and head_dim_v; query head h reads head h // (heads // kv_heads).
        causal: True or "bottom_right" shows row i the keys j <= i + (seq_kv - seq_q); "top_left" j <= i.
        scale: multiplies the scores; default head_dim ** -0.5. Used as given: 0, or from 2**-100 to 2**126 in size.
        layout: "bshd" for tensors [batch, seq, heads, head_dim]; the output has the inputs' layout.
        return_lse: return (output, lse) with the natural log-sum-exp of the scores, fp32 [batch, heads, seq_q].
        family: run this kernel family or raise; None chooses, and `flashgen.explain` says how.
        window: (left, right): row i sees the keys i + d - left <= j <= i + d + right, where d is 0 for "top_left" and
            else seq_kv - seq_q; None is an open side.
        softcap: scaled scores become softcap * tanh(scores / softcap), before all that follows.
        alibi_slopes: [heads] or [batch, heads]; slope * |j - (i + seq_kv - seq_q)| is subtracted.
        bias: added, of the output's dtype or fp32, broadcastable to [batch, heads, seq_q, seq_kv] in either layout.
        mask: bool, broadcastable likewise; True is seen.
        sinks: [heads]; one more logit of every row, which has no value; lse includes it.
        segment_ids_q: int [batch, seq_q], with segment_ids_kv [batch, seq_kv]; a row sees the keys with its own id.
        score_mod: the caller's own expression of the scaled scores, before all of these: text with `score`, `batch`,
            `head`, `q_idx`, `kv_idx`, `seq_q` and `seq_kv`, such as "score + 0.1 * (kv_idx - q_idx)"; or a function of
            (score, batch, head, q_idx, kv_idx, *tensors by name), plain or of triton.jit. Its derivative by the score
            is derived; of a pair, the second is the derivative. Operators are Triton's: // and % go towards zero.
        mask_mod: likewise a condition of (batch, head, q_idx, kv_idx, *tensors); blocks outside are not visited where
            arithmetic on the indices shows it.
        mod_tensors: by name the tensors of which both read elements, as in "score + table[head, kv_idx - q_idx + 99]";
            an index outside reads the nearest inside. Not differentiable.
        dropout_p: this part of the probabilities is dropped, the rest divided by 1 - dropout_p; lse does not change.
        dropout_seed: (seed, offset), or int64 [2] on q's device: equal ones drop the same, in any kernel.
        generator: draws the seed where none is given; default the device's own, which torch.manual_seed sets.
        descale_q, descale_k, descale_v: what fp8 inputs are multiplied by; None is 1. A number, or fp32 [], [heads],
            [batch, heads] or, one for each 128 tokens, [batch, heads, blocks], in either layout; not negative.

    Returns:
        [batch, heads, seq_q, head_dim_v] in the inputs' dtype, or autocast's; bf16 of fp8. A row that sees no key is 0
        and its lse -inf, or the sink. Differentiable by q, k, v, slopes, bias and sinks, once, bitwise repeatable.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: no kernel does this.
    """
    if (
        window is None and softcap is None and alibi_slopes is None and bias is None and mask is None
        and sinks is None and segment_ids_q is None and segment_ids_kv is None and dropout_p == 0
        and score_mod is None and mask_mod is None and mod_tensors is None
        and descale_q is None and descale_k is None and descale_v is None
    ):  # fmt: skip
        return _plain(q, k, v, causal, scale, layout, return_lse, family)
    options = Options(
        softcap, alibi_slopes, bias, window, mask, segment_ids_q, segment_ids_kv, dropout_p, None, sinks,
        *written(score_mod, mask_mod, mod_tensors),
    )  # fmt: skip
    descales = Descales(descale_q, descale_k, descale_v)
    return _modified(q, k, v, causal, scale, layout, return_lse, family, options, descales, dropout_seed, generator)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Without options: the hot path."""
    try:
        device = "cuda" if q.is_cuda else q.device.type
        if device in ("cuda", "cpu") and torch.is_autocast_enabled(device):
            q, k, v = (as_autocast(tensor, device) for tensor in (q, k, v))
        wants_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    except AttributeError:
        from_tensors(q, k, v, causal=causal, layout=layout)  # not tensors: validation says which
        raise
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v)
    if wants_grad:
        if is_direct(q, k, v) and q.dtype is not FP8:
            out, lse = _direct(q, k, v, causal_from(causal), scale, layout, True, family)
            return (out, lse) if return_lse else out
    elif device == "cuda" and not is_watched():
        try:
            return attend(q, k, v, causal, scale, layout, return_lse, family)
        except RuntimeError:
            if has_memory(q, k, v):
                raise
    return _by_operator(q, k, v, causal, scale, layout, return_lse, family, wants_grad)


def _modified(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
    options: Options,
    descales: Descales,
    dropout_seed: object,
    generator: torch.Generator | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """With options, judged before anything is launched; those of the seed as the caller gave them."""
    if not all(isinstance(each, Tensor) for each in (q, k, v)):
        from_tensors(q, k, v, causal=causal, layout=layout)  # says which
    if q.dtype == FP8 or descales.given:
        options = options._replace(dropout_seed=drawn(options.dropout_p, dropout_seed, generator, q.device))
        return attention_fp8(q, k, v, causal, scale, layout, return_lse, family, options, descales)
    if q.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(q.device.type):
        q, k, v = (as_autocast(tensor, q.device.type) for tensor in (q, k, v))
        if isinstance(options.bias, Tensor) and options.bias.dtype != torch.float32:
            options = options._replace(bias=as_autocast(options.bias, q.device.type))
    check_gradients(options)
    options = options._replace(dropout_seed=drawn(options.dropout_p, dropout_seed, generator, q.device))
    tensors = [each for each in (q, k, v, *options, *options.mod_tensors) if isinstance(each, Tensor)]
    if forward_ad._current_level >= 0:
        refuse_tangents(*tensors)
    wants_grad = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    mask = causal_from(causal)
    # A direct call judges by itself; what an operator would say of misfits is less clear.
    if not is_direct(*tensors) and _has_sizes(q, k, v):
        judged(q, k, v, scale, layout, family, options)
    operator = _differentiable if wants_grad and not torch.compiler.is_compiling() else run
    out, lse = operator(q, k, v, mask, scale, layout, return_lse or wants_grad, family, *flat(options))
    return (out, lse) if return_lse else out


def _by_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
    wants_grad: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls that are differentiated, traced, mapped or on the CPU: one operator, which torch sees as a whole."""
    if q.dtype == FP8:
        return attention_fp8(q, k, v, causal, scale, layout, return_lse, family, Options(), Descales())
    mask = causal_from(causal)
    if _has_sizes(q, k, v):
        check_tensors(q, k, v, layout, GPU_DTYPES if q.is_cuda else CPU_DTYPES)
        check_scale(scale, q.dtype)
        check_device(q.device, family)
    # The operator alone serves tracers; torch.func.grad knows only autograd functions.
    operator = _traceable if wants_grad and not torch.compiler.is_compiling() else torch.ops.flashgen.forward
    out, lse = operator(q, k, v, mask, scale, layout, return_lse or wants_grad, family)
    return (out, lse) if return_lse else out


def _has_sizes(*tensors: Tensor) -> bool:
    """Whether there is something to judge: symbolic sizes are not, and a traced operator validates as it runs."""
    return not torch.compiler.is_compiling() and all(type(size) is int for each in tensors for size in each.shape)
