"""What a call of `attention_kvcache` is given beside q, judged: caches, how full they are, and what is appended."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.descales import FP8, Number
from flashgen.errors import InputError
from flashgen.problem import Problem
from flashgen.tensors import CPU_DTYPES, GPU_DTYPES

# What caches may hold beside q's own dtype, with descales.
QUANTISED = (FP8, torch.int8)


class Cache(NamedTuple):
    """Keys and values of earlier tokens, and those that are appended; arguments of `attention_kvcache`.

    Attributes:
        k, v: [batch, seq_kv, kv_heads, head_dim] and [..., head_dim_v], or [pages, page_size, kv_heads, ...].
        seqlens: int32 [batch], how many keys of each sequence are there.
        table: int32 [batch, pages per sequence]; None where the caches are not paged.
        new_k, new_v: [batch, seq_new, kv_heads, ...], or with cu_seqlens_q [total_q, kv_heads, ...]; None for nothing.
        cu_seqlens_q: int32 [batch + 1], where sequences of q [total_q, heads, head_dim] start and end.
        max_seqlen_q: no sequence of them is longer.
        descale_k, descale_v: what quantised caches are multiplied by.
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor
    table: Tensor | None = None
    new_k: Tensor | None = None
    new_v: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    descale_k: Number | None = None
    descale_v: Number | None = None

    @property
    def capacity(self) -> int:
        """How many keys a sequence may have."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    @property
    def quantised(self) -> bool:
        return self.k.dtype in QUANTISED

    @property
    def tensors(self) -> list[Tensor]:
        """All that are given."""
        return [each for each in self if isinstance(each, Tensor)]


def check(q: Tensor, cache: Cache) -> Problem:
    """Judge the tensors of one call, without a look at lengths and tables, which would wait for the GPU.

    Raises:
        InputError: they are not what `attention_kvcache` says.
    """
    packed = cache.cu_seqlens_q is not None
    if packed != (cache.max_seqlen_q is not None):
        raise InputError("cu_seqlens_q and max_seqlen_q go together, but got only one of them.")
    _check_shape("q", q, "[total_q, heads, head_dim]" if packed else "[batch, seq_q, heads, head_dim]")
    layout = "[batch, seq_kv" if cache.table is None else "[pages, page_size"
    _check_shape("k_cache", cache.k, f"{layout}, kv_heads, head_dim]")
    _check_shape("v_cache", cache.v, f"{layout}, kv_heads, head_dim_v]")
    _check_kinds(q, cache)
    if cache.k.shape[:3] != cache.v.shape[:3]:
        raise InputError(
            f"k_cache and v_cache must agree in {layout}, kv_heads], but got {list(cache.k.shape)} and "
            f"{list(cache.v.shape)}."
        )
    if q.shape[-1] != cache.k.shape[3] or 0 in (q.shape[-1], cache.v.shape[3]):
        raise InputError(
            f"q and k_cache must have one head_dim and all head dims must be at least 1, but got q {q.shape[-1]}, "
            f"k_cache {cache.k.shape[3]} and v_cache {cache.v.shape[3]}."
        )
    for name, tensor in (("k_cache", cache.k), ("v_cache", cache.v)):
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            raise InputError(
                f"{name} must have a contiguous last dimension, but got strides {list(tensor.stride())}: a cache is "
                "never copied. Lay it out anew."
            )
    batch = _check_lengths(q, cache)
    _check_pages(q, cache, batch)
    _check_new(q, cache, batch)
    longest = q.shape[1] if cache.max_seqlen_q is None else min(cache.max_seqlen_q, q.shape[0])
    return Problem(batch, q.shape[-2], cache.k.shape[2], longest, cache.capacity)


def _check_shape(name: str, tensor: object, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, but got {type(tensor).__name__}.")
    if tensor.dim() != shape.count(",") + 1:
        more = " Packed q goes with cu_seqlens_q." if name == "q" else ""
        raise InputError(f"{name} must be {shape}, but got {list(tensor.shape)}.{more}")


def _check_kinds(q: Tensor, cache: Cache) -> None:
    """Devices and dtypes."""
    dtypes = GPU_DTYPES if q.is_cuda else CPU_DTYPES
    if q.dtype not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise InputError(f"dtype of q must be one of {names} on {q.device.type}, but got {q.dtype}. Cast it.")
    if cache.k.dtype != cache.v.dtype or cache.k.dtype not in (q.dtype, *QUANTISED):
        raise InputError(
            f"k_cache and v_cache must both be {q.dtype}, as q, or float8_e4m3fn or int8, but got {cache.k.dtype} and "
            f"{cache.v.dtype}. Cast q; under autocast it has autocast's dtype, and caches are never cast."
        )
    for name, value in (("descale_k", cache.descale_k), ("descale_v", cache.descale_v)):
        if value is not None and not cache.quantised:
            raise InputError(f"{name} is for caches of float8_e4m3fn or int8, but got {cache.k.dtype}. Leave it out.")
    for name, tensor in cache._asdict().items():
        if isinstance(tensor, Tensor) and tensor.device != q.device:
            raise InputError(
                f"all tensors must be on q's device {q.device}, but got {NAMES.get(name, name)} on {tensor.device}. "
                "Move it there."
            )


# Fields of Cache that a caller knows by another name.
NAMES = {"k": "k_cache", "v": "v_cache", "seqlens": "cache_seqlens", "table": "block_table", "new_k": "k", "new_v": "v"}


def _check_lengths(q: Tensor, cache: Cache) -> int:
    """Where sequences start and how long they are; returns how many there are."""
    batch = q.shape[0]
    if cache.cu_seqlens_q is not None:
        _check_ints("cu_seqlens_q", cache.cu_seqlens_q, "[batch + 1]")
        batch = cache.cu_seqlens_q.shape[0] - 1
        longest = cache.max_seqlen_q
        if isinstance(longest, bool) or not isinstance(longest, int) or longest < 0:
            raise InputError(f"max_seqlen_q must be a number of tokens, but got {longest!r}.")
    _check_ints("cache_seqlens", cache.seqlens, "[batch]", batch)
    return batch


def _check_ints(name: str, value: object, shape: str, batch: int | None = None) -> None:
    if (
        not isinstance(value, Tensor)
        or value.dtype != torch.int32
        or value.dim() != shape.count(",") + 1
        or (value.shape[0] == 0 if batch is None else value.shape[0] != batch)
    ):
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        wanted = shape if batch is None else f"{shape} with batch {batch}"
        raise InputError(f"{name} must be an int32 tensor {wanted}, but got {what}.")


def _check_pages(q: Tensor, cache: Cache, batch: int) -> None:
    if cache.table is None:
        if cache.k.shape[0] != batch:
            raise InputError(
                f"k_cache and v_cache must have q's batch size {batch}, but got {cache.k.shape[0]}. Pages need a "
                "block_table."
            )
    else:
        _check_ints("block_table", cache.table, "[batch, pages per sequence]", batch)
    if q.numel() > 0 and 0 in (cache.k.numel(), cache.capacity):
        raise InputError(
            f"the caches must have room for at least one token, but got k_cache {list(cache.k.shape)}"
            f"{'' if cache.table is None else f' and block_table {list(cache.table.shape)}'}."
        )


def _check_new(q: Tensor, cache: Cache, batch: int) -> None:
    """What is appended."""
    if (cache.new_k is None) != (cache.new_v is None):
        raise InputError("k and v must be given together, but got only one of them.")
    packed = cache.cu_seqlens_q is not None
    lengths = []
    for name, tensor, store in (("k", cache.new_k, cache.k), ("v", cache.new_v, cache.v)):
        if tensor is None:
            continue
        _check_shape(
            name, tensor, "[total_q, kv_heads, head_dim]" if packed else "[batch, seq_new, kv_heads, head_dim]"
        )
        if tensor.dtype != store.dtype:
            raise InputError(
                f"{name} must be {store.dtype}, as {name}_cache, to be appended, but got {tensor.dtype}. Cast it, or "
                "quantise it as the cache is."
            )
        if tensor.shape[0] != q.shape[0] or tensor.shape[-2:] != store.shape[-2:]:
            raise InputError(
                f"{name} must be [{q.shape[0]}, {'' if packed else 'seq_new, '}{store.shape[2]}, {store.shape[3]}], as "
                f"q and {name}_cache ask for, but got {list(tensor.shape)}."
            )
        if any(size > 1 and stride == 0 for size, stride in zip(store.shape, store.stride(), strict=True)):
            raise InputError(f"{name}_cache is expanded, so that nothing can be appended to it. Make a copy of it.")
        lengths.append(tensor.shape[1])
    if len(set(lengths)) > 1:
        raise InputError(f"k and v must have one length, but got {lengths[0]} and {lengths[1]}.")
    if q.numel() == 0 and cache.new_k is not None and cache.new_k.numel() > 0:
        raise InputError(f"k and v are appended by a call with rows, but got q {list(q.shape)}. Write them yourself.")
