"""Sequences of different lengths behind each other: `attention_varlen`'s work on a GPU, and on the CPU in plain torch.

A kernel sees as many sequences of the longest length as there are, all of which start at the first token; it finds in
the cumulative lengths where its own one starts and ends. No length is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.cpu import attend_on_cpu, gradients_on_cpu
from flashgen.descales import FP8, Descales, check_descales, descales_from, refuse_gradients
from flashgen.errors import InputError
from flashgen.modified import planned
from flashgen.modifiers import Modifiers, Options, check_cap, modifiers_from
from flashgen.tensors import (
    CPU_DTYPES,
    GPU_DTYPES,
    MAX_SCALE,
    MIN_SCALE,
    check_scale,
    check_tensors,
    positive_scale,
    turned_back,
    with_contiguous_rows,
)


class Lengths(NamedTuple):
    """Where sequences start and end.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], cumulative, on the tensors' device.
        seqused_k: int32 [sequences], how many keys of each count; None for all.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int

    def arguments(self, q: Tensor, k: Tensor) -> tuple[Tensor | int, ...]:
        """What kernels take of it; an empty tensor is a null pointer."""
        used = self.cu_seqlens_k.new_empty(0) if self.seqused_k is None else self.seqused_k
        return self.cu_seqlens_q, self.cu_seqlens_k, used, q.shape[0], k.shape[0]

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1


def check_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Lengths:
    """Judge tensors and lengths, without a look at their values, which would wait for the GPU.

    Raises:
        InputError: they are not what `attention_varlen` says.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            what = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"{name} must be a tensor [tokens, heads, head_dim], but got {what}.")
    sequences = None
    for name, value in (("cu_seqlens_q", lengths.cu_seqlens_q), ("cu_seqlens_k", lengths.cu_seqlens_k)):
        _check_ints(name, value, q)
        if value.shape[0] < 1 or sequences not in (None, value.shape[0]):
            raise InputError(
                f"cu_seqlens_q and cu_seqlens_k must both be [sequences + 1], but got {name} {list(value.shape)}."
            )
        sequences = value.shape[0]
    if lengths.seqused_k is not None:
        _check_ints("seqused_k", lengths.seqused_k, q)
        if lengths.seqused_k.shape[0] != lengths.sequences:
            raise InputError(f"seqused_k must be [{lengths.sequences}], but got {list(lengths.seqused_k.shape)}.")
    for name, number in (("max_seqlen_q", lengths.max_seqlen_q), ("max_seqlen_k", lengths.max_seqlen_k)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise InputError(f"{name} must be a number of tokens, but got {number!r}.")
    return lengths._replace(
        cu_seqlens_q=lengths.cu_seqlens_q.contiguous(),
        cu_seqlens_k=lengths.cu_seqlens_k.contiguous(),
        seqused_k=None if lengths.seqused_k is None else lengths.seqused_k.contiguous(),
        # A longer sequence does not fit, and views may not reach beyond the tensor.
        max_seqlen_q=min(lengths.max_seqlen_q, q.shape[0]),
        max_seqlen_k=min(lengths.max_seqlen_k, k.shape[0]),
    )


def _check_ints(name: str, value: object, like: Tensor) -> None:
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != torch.int32 or value.device != like.device:
        what = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise InputError(f"{name} must be an int32 vector on {like.device}, as q, but got {what}.")


def _views(lengths: Lengths, *tensors: Tensor) -> list[Tensor]:
    """Of tensors of queries, and then two of keys: [sequences, heads, longest length, width], from the first token."""
    return [
        tensor.as_strided(
            (lengths.sequences, tensor.shape[1], longest, tensor.shape[2]), (0, tensor.stride(1), tensor.stride(0), 1)
        )
        for tensor, longest in zip(tensors, _longest(lengths, len(tensors)), strict=True)
    ]


def _longest(lengths: Lengths, count: int) -> list[int]:
    q, k = lengths.max_seqlen_q, lengths.max_seqlen_k
    # q, k, v and o; of a backward also dO, dQ, dK and dV.
    return [q, k, k, q, q, q, k, k][:count]


def _judged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    options: Options,
    lengths: Lengths,
    descales: Descales | None = None,
) -> Modifiers:
    """Modifiers for all sequences at once, as if each had the longest length."""
    check_descales(q, descales)
    dtypes = GPU_DTYPES if q.is_cuda else CPU_DTYPES
    # As if all tokens were one sequence.
    check_tensors(q[None], k[None], v[None], "bshd", dtypes if descales is None else (FP8,))
    check_scale(scale, q.dtype)
    sizes = (lengths.sequences, q.shape[1], lengths.max_seqlen_q, lengths.max_seqlen_k)
    modifiers = modifiers_from(sizes, q, options)
    check_cap(options, scale)
    if descales is None:
        return modifiers
    heads = (lengths.sequences, q.shape[1], k.shape[1])
    return modifiers._replace(descales=descales_from(heads, sizes[2:], q, descales, blocks=False))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    family: str | None,
    options: Options,
    lengths: Lengths,
    descales: Descales | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [total_q, heads, head_dim_v] and lse [heads, total_q]; 0 and -inf for tokens of no sequence."""
    lengths = check_lengths(q, k, v, lengths)
    if descales is not None:
        refuse_gradients(*(each for each in (q, k, v, *options, *descales) if isinstance(each, Tensor)))
    modifiers = _judged(q, k, v, scale, options, lengths, descales)
    dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    out = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]), dtype=dtype)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=wide, device=q.device)
    if not q.is_cuda:
        for rows, keys, own in _sequences(lengths, modifiers):
            each, its_lse = attend_on_cpu(q[None, rows], k[None, keys], v[None, keys], causal, scale, "bshd", own)
            out[rows], lse[:, rows] = each[0], its_lse[0]
        return out, lse
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        q, scale = positive_scale(q, scale)
    q, k, v = (with_contiguous_rows(tensor) for tensor in (q, k, v))
    plan = planned("forward", _views(lengths, q, k, v, out), causal, "bhsd", family, modifiers, varlen=True)
    if plan.bound is not None:
        given = (*modifiers.arguments(causal), *lengths.arguments(q, k))
        plan.bound(q, k, v, out, lse, *given, q.shape[2] ** -0.5 if scale is None else scale)
    elif modifiers.sinks is not None and lengths.max_seqlen_q > 0:
        # No keys at all: the tokens of sequences have the sink.
        tokens = torch.arange(q.shape[0], device=q.device)
        starts, ends = lengths.cu_seqlens_q[:-1, None], lengths.cu_seqlens_q[1:, None]
        inside = ((tokens >= starts) & (tokens < torch.minimum(ends, starts + lengths.max_seqlen_q))).any(0)
        lse = torch.where(inside, modifiers.sinks[:, None], lse)
    return out, lse


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float | None,
    options: Options,
    lengths: Lengths,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `attend`; 0 for tokens of no sequence and keys that don't count."""
    lengths = check_lengths(q, k, v, lengths)
    modifiers = _judged(q, k, v, scale, options._replace(sinks=None), lengths)
    dq, dk, dv = (torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in (q, k, v))
    if not q.is_cuda:
        for rows, keys, own in _sequences(lengths, modifiers):
            found = gradients_on_cpu(
                q[None, rows], k[None, keys], v[None, keys], o[None, rows], lse[None, :, rows], do[None, rows],
                None if dlse is None else dlse[None, :, rows], causal, scale, "bshd", own,
            )  # fmt: skip
            dq[rows], dk[keys], dv[keys] = found.dq[0], found.dk[0], found.dv[0]
        return dq, dk, dv
    given = scale
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        q, scale = positive_scale(q, scale)
    q, k, v, o, do = (with_contiguous_rows(tensor) for tensor in (q, k, v, o, do))
    plan = planned(
        "backward", _views(lengths, q, k, v, o, do, dq, dk, dv), causal, "bhsd", None, modifiers, varlen=True
    )
    if plan.bound is not None:
        workspace = torch.empty(plan.workspace, dtype=torch.float32, device=q.device)
        plan.bound(
            q, k, v, o, lse.contiguous(), do, None if dlse is None else dlse.float().contiguous(), dq, dk, dv,
            workspace, *modifiers.arguments(causal), *lengths.arguments(q, k),
            q.shape[2] ** -0.5 if scale is None else scale,
        )  # fmt: skip
    return turned_back(dq, given), dk, dv


def _sequences(lengths: Lengths, modifiers: Modifiers) -> Iterator[tuple[slice, slice, Modifiers]]:
    """Rows and keys of each sequence on the CPU, with its own modifiers."""
    q_ends, k_ends = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    for index in range(lengths.sequences):
        first, last = q_ends[index], min(q_ends[index + 1], q_ends[index] + lengths.max_seqlen_q)
        start, stop = k_ends[index], min(k_ends[index + 1], k_ends[index] + lengths.max_seqlen_k)
        if lengths.seqused_k is not None:
            stop = min(stop, start + int(lengths.seqused_k[index]))
        slopes = modifiers.alibi_slopes
        own = modifiers if slopes is None else modifiers._replace(alibi_slopes=slopes[index : index + 1])
        if own.dropout is not None:
            own = own._replace(dropout=own.dropout._replace(first=index))
        if own.descales is not None:
            parts = (each[index : index + 1] if isinstance(each, Tensor) else each for each in own.descales)
            own = own._replace(descales=Descales(*parts))
        yield slice(first, last), slice(start, stop), own
