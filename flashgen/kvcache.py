"""`attention_kvcache`'s work: on a GPU one launch of a cached plan, on the CPU plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.gradients import remember
from flashgen.kvcache_cpu import attend_cached_on_cpu
from flashgen.modifiers import check_cap
from flashgen.serving import Call, descales_of, judged
from flashgen.tensors import MAX_SCALE, MIN_SCALE, positive_scale

if TYPE_CHECKING:
    from flashgen.kvcache_plans import Plan


_plans: dict[tuple[object, ...], Plan] = {}


def attend(call: Call) -> tuple[Tensor, Tensor | None]:
    """`flashgen.attention_kvcache` without autocast and tracing.

    Returns:
        (output, lse), lse None when it is not wanted.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: no kernel does this.
    """
    if not call.q.is_cuda:
        out, lse = attend_cached_on_cpu(call, judged(call)[1])
        return out, lse if call.return_lse else None
    return attend_on_gpu(call)


def attend_on_gpu(call: Call) -> tuple[Tensor, Tensor | None]:
    """The same by a kernel; its plan is cached, and of what has one only the numbers are judged."""
    scale = call.scale
    if scale is not None and not (type(scale) is float and MIN_SCALE <= scale <= MAX_SCALE):
        q, scale = positive_scale(call.q, scale)
        call = call._replace(q=q, scale=scale)
    plan = planned(call)
    check_cap(call.options, scale)
    q, packed = call.q, call.cache.cu_seqlens_q is not None
    # Of packed rows some may belong to no sequence.
    out = (q.new_zeros if packed else q.new_empty)(plan.out_shape)
    lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device) if call.return_lse else None
    if packed and lse is not None:
        lse.fill_(-math.inf)
    if plan.bound is not None:
        plan.bound(*plan.pick(_named(call, plan, out, lse)))
    return out, lse


def _named(call: Call, plan: Plan, out: Tensor, lse: Tensor | None) -> dict[str, Any]:
    """Everything that a kernel may take, by its name."""
    q, cache, *_ = call.with_rows() if plan.copies else call
    workspace, counters = (None, None) if plan.scratch is None else plan.scratch()
    named: dict[str, Any] = {
        **plan.numbers, "q": q, "k": cache.k, "v": cache.v, "o": out, "lse": lse, "workspace": workspace,
        "counters": counters, "cache_seqlens": cache.seqlens, "block_table": cache.table, "k_new": cache.new_k,
        "v_new": cache.new_v, "cu_seqlens_q": cache.cu_seqlens_q,
    }  # fmt: skip
    if call.scale is not None:
        named["scale"] = call.scale
    if call.options.alibi_slopes is not None:
        named["alibi_slopes"] = call.options.alibi_slopes.to(torch.float32)
    if call.options.sinks is not None:
        named["sinks"] = call.options.sinks.to(torch.float32).contiguous()
    if cache.quantised:
        named["descale_k"], named["descale_v"] = descales_of(cache, plan.batch)
    return named


def planned(call: Call) -> Plan:
    """The plan for a call, which is judged where there is none; of descales that are numbers only the type counts."""
    cache, options = call.cache, call.options
    key = (
        call.causal, call.return_lse, call.num_splits, call.family, cache.max_seqlen_q, options.softcap, options.window,
        *map(_kind, (call.q, *cache[:7], *cache[8:], options.alibi_slopes, options.sinks)),
    )  # fmt: skip
    try:
        plan = _plans.get(key)
    except TypeError:
        # Options that no dict can hold: validation says which.
        judged(call)
        raise
    if plan is None:
        # Imported here: rendering and reading YAML are for the first call of a kind, not for `import flashgen`.
        from flashgen.kvcache_plans import make

        plan, keep = make(call)
        if keep:
            remember(_plans, key, plan)
    return plan


def _kind(value: object) -> object:
    """What of a tensor, or of a descale, a plan is made for."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15
    return type(value)


def forget() -> None:
    """Drop all plans."""
    _plans.clear()
