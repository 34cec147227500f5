"""Gradients of attention: the backward kernels on a GPU, by a cached plan as in dispatch; plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from flashgen.cpu import gradients_on_cpu
from flashgen.errors import InputError
from flashgen.tensors import (
    MAX_SCALE,
    MIN_SCALE,
    empty_gradient,
    from_tensors,
    positive_scale,
    tf32_allowed,
    turned_back,
    with_contiguous_rows,
)  # fmt: skip

if TYPE_CHECKING:
    from flashgen.select import Selection

# Plans are small and quick to make again; a service that meets ever new lengths must not grow for ever.
MAX_PLANS = 8192

Three = tuple[Tensor, Tensor, Tensor]
P = TypeVar("P")


@dataclass(frozen=True)
class Plan:
    """What one kind of backward call needs: `bound` is None when nothing depends on anything."""

    selection: Selection
    bound: Callable[..., None] | None
    workspace: int


_plans: dict[tuple[object, ...], Plan] = {}


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
    layout: str,
) -> Three:
    """dq, dk and dv of one call of attention, each in its tensor's dtype and memory order, bitwise repeatable.

    Args:
        q, k, v, causal, scale, layout: as the forward was called with; causal is a Spec's.
        o, lse: what it returned.
        do: gradient of o, any strides, stride 0 included.
        dlse: gradient of lse [batch, heads, seq_q]; None is zero.

    Raises:
        InputError: o, lse, do or dlse are not those of q, k and v.
        UnsupportedError: no kernel does this.
    """
    if not q.is_cuda:
        return gradients_on_cpu(q, k, v, o, lse, do, dlse, causal, scale, layout)[:3]
    if scale is not None and not MIN_SCALE <= scale <= MAX_SCALE:
        return _without_a_positive_scale(q, k, v, o, lse, do, dlse, causal, scale, layout)
    # The strides of q, k and v decide those of their gradients, too.
    results = (empty_gradient(q), empty_gradient(k), empty_gradient(v))
    key = (
        q.shape, k.shape, v.shape, o.shape, do.shape, lse.shape,
        q.stride(), k.stride(), v.stride(), o.stride(), do.stride(),
        q.dtype, k.dtype, v.dtype, o.dtype, do.dtype, lse.dtype,
        q.device, k.device, v.device, o.device, do.device, lse.device,
        q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15, o.data_ptr() & 15, do.data_ptr() & 15,
        None if dlse is None else (dlse.shape, dlse.device), causal, layout,
        q.dtype is torch.float32 and tf32_allowed(),
    )  # fmt: skip
    tensors = tuple(with_contiguous_rows(tensor) for tensor in (q, k, v, o, do))
    q, k, v, o, do = tensors
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    plan = _plans.get(key)
    if plan is None:
        check_results(q, v, o, lse, do, dlse, layout)
        plan = _plan(key, (*tensors, *results), causal, layout)
    if plan.bound is None:
        return results[0].zero_(), results[1].zero_(), results[2].zero_()
    workspace = torch.empty(plan.workspace, dtype=torch.float32, device=q.device)
    plan.bound(q, k, v, o, lse, do, dlse, *results, workspace, q.shape[3] ** -0.5 if scale is None else scale)
    return results


def forget() -> None:
    """Drop all plans."""
    _plans.clear()


def _plan(key: tuple[object, ...], tensors: tuple[Tensor, ...], causal: str, layout: str) -> Plan:
    # Imported here: rendering and reading YAML are for the first call of a kind, not for `import flashgen`.
    from flashgen.launch import workspace_size
    from flashgen.plans import as_bhsd, select_and_bind

    q, k, v, *_ = tensors
    spec, problem = from_tensors(q, k, v, causal=False if causal == "none" else causal, layout=layout)
    views = as_bhsd(layout, *tensors)
    selection, bound, keep = select_and_bind(
        spec.backward, problem, None, views, any(tensor.numel() == 0 for tensor in tensors)
    )
    plan = Plan(selection, bound, workspace_size(selection.variant, views[0]) if bound is not None else 0)
    if keep:
        remember(_plans, key, plan)
    return plan


def check_results(q: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, layout: str) -> None:
    """Refuse results and gradients that are not those of q and v.

    What autograd hands over fits by itself; whoever calls the operator by hand may not.
    """
    shape = (*q.shape[:3], v.shape[3])
    rows = shape[:3] if layout == "bhsd" else (shape[0], shape[2], shape[1])
    wanted = {"o": (o, shape, q.dtype), "do": (do, shape, q.dtype), "lse": (lse, rows, torch.float32)}
    if dlse is not None:
        wanted["dlse"] = (dlse, rows, torch.float32)
    for name, (tensor, sizes, dtype) in wanted.items():
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (sizes, dtype, q.device):
            raise InputError(
                f"{name} must be {dtype} {sizes} on {q.device}, as q and v ask for, but got "
                f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}."
            )


def remember(plans: dict[tuple[object, ...], P], key: tuple[object, ...], plan: P) -> None:
    """Keep a plan for the next call of its kind."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


def _without_a_positive_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float,
    layout: str,
) -> Three:
    """The kernels need a positive scale: the scores are those of another q, whose gradient is turned back."""
    other, positive = positive_scale(q, scale)
    dq, dk, dv = gradients(other, k, v, o, lse, do, dlse, causal, positive, layout)
    return turned_back(dq, scale), dk, dv
