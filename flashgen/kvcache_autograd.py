"""`torch.ops.flashgen.attention_kvcache` and `.append_kvcache`: what tracers see of calls with a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.autograd import is_direct
from flashgen.caches import Cache
from flashgen.errors import UnsupportedError
from flashgen.kvcache import attend
from flashgen.modifiers import Options
from flashgen.serving import Call, judged


def compute(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    descale_k: Tensor | None,
    descale_v: Tensor | None,
    number_k: float | None,
    number_v: float | None,
    causal: str,
    scale: float | None,
    return_lse: bool,
    num_splits: int | None,
    family: str | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    window_left: int | None,
    window_right: int | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(output, lse), lse empty when it is not wanted; of each descale the tensor or the number, or neither."""
    cache = Cache(
        k_cache, v_cache, cache_seqlens, block_table, k, v, cu_seqlens_q, max_seqlen_q,
        number_k if descale_k is None else descale_k, number_v if descale_v is None else descale_v,
    )  # fmt: skip
    options = Options(softcap=softcap, alibi_slopes=alibi_slopes, window=(window_left, window_right), sinks=sinks)
    out, lse = attend(Call(q, cache, causal, scale, return_lse, num_splits, family, options))
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


attention_kvcache = torch.library.custom_op("flashgen::attention_kvcache", mutates_args=())(compute)
# Apart, since torch may have to copy what an operator writes to.
append_kvcache = torch.library.custom_op("flashgen::append_kvcache", mutates_args=("k_cache", "v_cache"))(compute)


def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """What both return, without values."""
    return_lse = others[12]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], v_cache.shape[3])), q.new_empty(rows if return_lse else (0,), dtype=lse_dtype)


def _map(*_: Any) -> Any:
    raise UnsupportedError("flashgen has no vmap over attention_kvcache. Make the mapped dimension part of the batch.")


for each in (attention_kvcache, append_kvcache):
    each.register_fake(_fake)
    each.register_vmap(_map)


def run(call: Call, tensors: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """One of the operators, or what it does where nobody needs to see one; `tensors` are those of the call."""
    cache, options = call.cache, call.options
    if isinstance(call.q, Tensor) and is_direct(*tensors):
        found = attend(call)
        if cache.new_k is not None:
            # As torch counts what its operators write to.
            torch.autograd.graph.increment_version((cache.k, cache.v))
        return found
    if not torch.compiler.is_compiling():
        # What an operator would say of misfits is less clear.
        judged(call)
    *others, descale_k, descale_v = cache
    descales = (descale_k, descale_v)
    results: tuple[Tensor, Tensor | None] = (attention_kvcache if cache.new_k is None else append_kvcache)(
        call.q, *others, *(each if isinstance(each, Tensor) else None for each in descales),
        *(None if isinstance(each, Tensor) or each is None else float(each) for each in descales),
        *call[2:7], options.softcap, options.alibi_slopes, *(options.window or (None, None)), options.sinks,
    )  # fmt: skip
    return results
