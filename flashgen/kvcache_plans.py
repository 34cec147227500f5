"""The slow half of a call with a cache: choose a variant and bind its kernel to the call's layout."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from flashgen.descales import FP8
from flashgen.descriptors import zeros_of
from flashgen.errors import InputError
from flashgen.families import Variant
from flashgen.features import DESCALES, SERVED_LENGTHS
from flashgen.launch import Split, arguments_of, bind, laid_out, split_for
from flashgen.modifiers import Modifiers
from flashgen.plans import select_and_bind, select_for
from flashgen.problem import Problem
from flashgen.select import Selection
from flashgen.serving import Call, descales_of, judged
from flashgen.spec import DTYPE_NAMES, Cache, Causal, Descale, Spec
from flashgen.tensors import with_features


@dataclass(frozen=True)
class Plan:
    """What one kind of call needs.

    Attributes:
        selection: the variant and why it was chosen.
        bound: the kernel bound to this layout; None when there is nothing to compute.
        pick: what the kernel takes, of everything by name.
        numbers: what of that is known.
        scratch: makes workspace and counters; None where the keys of a row are not shared among programs.
        batch: how many sequences there are.
        out_shape: as q's, with head_dim_v.
        lse_shape: [batch, heads, seq_q], or [heads, total_q].
        copies: something else than a cache has a strided last dimension, so it is copied first.
    """

    selection: Selection
    bound: Callable[..., None] | None
    pick: Callable[[dict[str, Any]], tuple[Any, ...]]
    numbers: dict[str, Any]
    scratch: Callable[[], tuple[Tensor, Tensor]] | None
    batch: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    copies: bool


def make(call: Call) -> tuple[Plan, bool]:
    """The plan for calls like this one, which is judged, and whether it holds for later ones."""
    problem, modifiers = judged(call)
    spec = _spec(call, problem, modifiers)
    copied = call.with_rows()
    out_shape = (*call.q.shape[:-1], spec.head_dim_v)
    views = _views(copied, spec, problem, modifiers, call.q.new_empty(out_shape))

    def split_and_bind(variant: Variant, *views: Tensor) -> Callable[..., None]:
        return bind(variant, *views, num_splits=split_for(variant, *views, num_splits=call.num_splits).splits)

    nothing = 0 in (call.q.numel(), problem.batch, problem.seq_q)
    selection, bound, keep = select_and_bind(spec, problem, call.family, views, nothing, split_and_bind)
    scratch = None
    if bound is not None:
        split = split_for(selection.variant, *views, num_splits=call.num_splits)
        scratch = _scratch(split, call.q.device) if split.splits > 1 else None
    known: dict[str, Any] = {"scale": spec.head_dim**-0.5, "total_q": call.q.shape[0]}
    known |= zip(_shaping(spec), modifiers.arguments(spec.causal), strict=True)
    plan = Plan(
        selection=selection,
        bound=bound,
        pick=operator.itemgetter(*arguments_of(spec)),
        numbers={name: value for name, value in known.items() if not isinstance(value, Tensor)},
        scratch=scratch,
        batch=problem.batch,
        out_shape=out_shape,
        lse_shape=call.q.shape[1::-1] if spec.varlen else (problem.batch, problem.heads, problem.seq_q),
        copies=any(one is not other for one, other in zip(copied.tensors, call.tensors, strict=True)),
    )
    return plan, keep


def _scratch(split: Split, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """As `flashgen.launch.scratch_for`, without making a torch.cuda.Stream."""
    from triton.runtime import driver

    index: int = device.index
    current_stream: Callable[[int], int] = driver.active.get_current_stream

    def scratch() -> tuple[Tensor, Tensor]:
        workspace = torch.empty(split.workspace, dtype=torch.float32, device=device)
        return workspace, zeros_of(index, current_stream(index), split.counters)

    return scratch


def selected(call: Call) -> Selection:
    """Which kernel a call would launch, and why."""
    problem, modifiers = judged(call)
    if not call.q.is_cuda:
        raise InputError(
            f"explain_kvcache is about kernels on a GPU, but q is on {call.q.device}: plain torch runs there."
        )
    views = [call.q, call.cache.k.transpose(1, 2), call.cache.v.transpose(1, 2)]
    return select_for(_spec(call, problem, modifiers), problem, call.family, views)


def _spec(call: Call, problem: Problem, modifiers: Modifiers) -> Spec:
    """What a kernel has to compute; fp32 always in true fp32, since memory is all that it waits for."""
    q, cache = call.q, call.cache
    number = descales_of(cache, problem.batch)[0]
    descale: Descale = "tensor"
    if isinstance(number, Tensor):
        descale = "head" if number.dim() == 2 else "token"
    spec = with_features(
        Spec("decode", q.shape[-1], cache.v.shape[3], DTYPE_NAMES[q.dtype], cast(Causal, call.causal)), modifiers
    )
    return replace(
        spec,
        varlen=cache.cu_seqlens_q is not None,
        paged=cache.table is not None,
        appended=cache.new_k is not None,
        cache=_CACHES[cache.k.dtype] if cache.quantised else "none",
        descale=descale,
    )


_CACHES: dict[torch.dtype, Cache] = {FP8: "fp8", torch.int8: "int8"}


def _shaping(spec: Spec) -> list[str]:
    """What kernels take for modifiers."""
    return [name for name in spec.modifiers if name not in (*DESCALES, *SERVED_LENGTHS)]


def _views(call: Call, spec: Spec, problem: Problem, modifiers: Modifiers, out: Tensor) -> list[Tensor]:
    """What the kernel is bound to: [batch, heads, tokens, width] of everything that has tokens."""
    cache = call.cache
    named: dict[str, Any] = {"k": cache.k.transpose(1, 2), "v": cache.v.transpose(1, 2), "block_table": cache.table}
    for name, tensor in (("q", call.q), ("o", out), ("k_new", cache.new_k), ("v_new", cache.new_v)):
        if tensor is not None and spec.varlen:
            shape = (problem.batch, tensor.shape[1], problem.seq_q, tensor.shape[2])
            named[name] = tensor.as_strided(shape, (0, tensor.stride(1), tensor.stride(0), 1))
        elif tensor is not None:
            named[name] = tensor.transpose(1, 2)
    named |= zip(("descale_k", "descale_v"), descales_of(cache, problem.batch), strict=True)
    named["alibi_slopes"] = modifiers.alibi_slopes
    return [named[name] for name in laid_out(spec)]
