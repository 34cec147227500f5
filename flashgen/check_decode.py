"""Is a kernel over a cache right? Every sequence by itself against float64, the cache against what it must hold."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.check import Accuracy, Launch, compared, expected_of
from flashgen.decode_cases import DECODE_CASES, DecodeCase, Served, served
from flashgen.launch import arguments_of
from flashgen.modifiers import Modifiers
from flashgen.reference import plain_attention
from flashgen.space import Rejection
from flashgen.spec import TORCH_DTYPES, Spec

SCRATCH = ("workspace", "counters")


@dataclass(frozen=True)
class _Results:
    """Output and log-sum-exp of all rows, as a kernel sees them, in one dtype of three."""

    o: Tensor
    lse: Tensor


@functools.lru_cache(maxsize=64)
def prepare_decode(spec: Spec, case: DecodeCase, device: str) -> tuple[Served, _Results, _Results, _Results]:
    """A case, and its results in float64, in the inputs' dtype and in fp32."""
    call = served(spec, case, device)
    own = _reference(spec, call, TORCH_DTYPES[spec.dtype])
    return call, _reference(spec, call, torch.float64), own, _reference(spec, call, torch.float32)


def _empty(spec: Spec, call: Served, fill: float, dtype: torch.dtype) -> _Results:
    """Results full of a number: [batch, heads, seq_q, ..], or of all tokens of ragged queries [heads, total_q, ..]."""
    q = call.given["q"]
    shape = (q.shape[1], call.given["total_q"]) if spec.varlen else tuple(q.shape[:3])
    wide = dtype if dtype == torch.float64 else torch.float32
    o = torch.full((*shape, spec.head_dim_v), fill, dtype=dtype, device=q.device)
    return _Results(o, torch.full(shape, fill, dtype=wide, device=q.device))


def _reference(spec: Spec, call: Served, dtype: torch.dtype) -> _Results:
    """Every sequence by plain attention on what its keys stand for; 0 for tokens of no sequence."""
    results = _empty(spec, call, 0.0, dtype)
    q = call.given["q"]
    for index, (k, v, number_k, number_v) in enumerate(call.sequences):
        rows = call.rows[index]
        place: tuple[int | slice, slice]
        if spec.varlen:
            # A kernel's view starts every sequence at the first token.
            tokens = q.as_strided((1, q.shape[1], call.given["total_q"], q.shape[3]), (0, *q.stride()[1:]))
            own, place = tokens[:, :, rows], (slice(None), rows)
        else:
            own, place = q[index : index + 1], (index, slice(None))
        keys, values = ((each.double() * number).to(dtype)[None] for each, number in ((k, number_k), (v, number_v)))
        shaping = _of_sequence(call.modifiers, index, dtype)
        o, lse = plain_attention(own.to(dtype), keys, values, causal=spec.causal, modifiers=shaping)
        results.o[place], results.lse[place] = o[0], lse[0].to(results.lse.dtype)
    return results


def _of_sequence(modifiers: Modifiers, index: int, dtype: torch.dtype) -> Modifiers:
    slopes = modifiers.alibi_slopes
    own = modifiers if slopes is None else modifiers._replace(alibi_slopes=slopes[index : index + 1])
    return own.to(Tensor.double) if dtype == torch.float64 else own


def check_decode(
    launch: Launch, spec: Spec, device: str, cases: Sequence[DecodeCase] = DECODE_CASES
) -> Accuracy | Rejection:
    """Run a kernel on every case, twice, into NaN-filled outputs and caches as they were.

    Args:
        launch: takes flashgen.launch.arguments_of the spec, without workspace and counters, and num_splits.

    Returns:
        The tightest Accuracy, or a Rejection naming case, error and allowance.
    """
    passed: list[Accuracy] = []
    for case in cases:
        call, true, plain, fine = prepare_decode(spec, case, device)
        first, second = _run(launch, spec, case, call), _run(launch, spec, case, call)
        expected = expected_of((true.o, true.lse), plain.o, fine.lse)
        found = compared(case.name, first.results, second.results, expected, f"{spec.slug}, {case}")
        if isinstance(found, Rejection):
            return found
        for name, cache in call.after.items():
            if not _same_bits(first.caches[name], cache):
                return Rejection("check", "wrong cache", f"{case.name}: the cache of {name} is not what it must be")
        passed += found
    return max(passed, key=lambda accuracy: accuracy.max_error / accuracy.allowed)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Of tensors of one layout all memory, that between rows as well."""
    return torch.equal(_memory(first), _memory(second))


def _memory(tensor: Tensor) -> Tensor:
    """All that it is a view of, in bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True)
class _Outcome:
    results: list[Tensor]
    caches: dict[str, Tensor]


def _run(launch: Launch, spec: Spec, case: DecodeCase, call: Served) -> _Outcome:
    results = _empty(spec, call, torch.nan, TORCH_DTYPES[spec.dtype])
    lse = results.lse.float()
    o = results.o
    if spec.varlen:
        o = o[None].expand(call.given["q"].shape[0], -1, -1, -1)[:, :, : call.given["q"].shape[2]]
    caches = {name: _copy(call.given[name]) for name in ("k", "v")}
    named: dict[str, Any] = {**call.given, **caches, "o": o, "lse": lse}
    names = [name for name in arguments_of(spec) if name not in SCRATCH]
    launch(*(named[name] for name in names), num_splits=case.num_splits)
    if spec.varlen:
        # What no sequence has stays as it was.
        nobody = torch.ones(lse.shape[1], dtype=torch.bool, device=lse.device)
        for rows in call.rows:
            nobody[rows] = False
        for each in (results.o, lse):
            each[:, nobody] = each[:, nobody].nan_to_num(nan=0.0)
    return _Outcome([results.o, lse], caches)


def _copy(cache: Tensor) -> Tensor:
    """The same view of a copy of all its memory: `clone` leaves out what is poisoned between rows."""
    memory = _memory(cache).clone().untyped_storage()
    return cache.new_empty(0).set_(memory, cache.storage_offset(), cache.shape, cache.stride())
