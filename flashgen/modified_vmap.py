"""vmap over calls with modified scores: what is mapped becomes part of the batch, where options allow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.autograd import folded, looped
from flashgen.flat import BACKWARD_OPTIONS, FLAT, FORWARD_OPTIONS, OWN, RANKS


def _fold_option(tensor: Tensor, dim: int | None, rank: int, size: int, batch: int) -> Tensor:
    """An option of up to `rank` dimensions, broadcast to the whole batch, of which its mapped one becomes a part."""
    whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    whole = whole.reshape(size, *(1,) * (rank + 1 - whole.dim()), *whole.shape[1:])
    return whole.expand(size, batch, *whole.shape[2:]).flatten(0, 1)


def _fold(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...], first: int) -> list[Any]:
    """All inputs, without a mapped dimension: q and its like come first, options from `first` on."""
    batch = inputs[0].shape[0 if in_dims[0] != 0 else 1]
    mains = 7 if first == BACKWARD_OPTIONS else 3
    results = [*folded(info.batch_size, in_dims[:mains], inputs[:mains]), *inputs[mains:]]
    for place, name in enumerate(FLAT[: len(inputs) - first], first):
        given = inputs[place]
        if name in RANKS and given is not None:
            results[place] = _fold_option(given, in_dims[place], RANKS[name], info.batch_size, batch)
    return results


def map_forward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
    # What depends on a call's own batch, or is shared by all of it, goes call by call, with seeds that vmap has drawn.
    own = any(inputs[FORWARD_OPTIONS + place] is not None for place in OWN)
    if own or in_dims[FORWARD_OPTIONS + FLAT.index("sinks")] is not None:
        return looped(info.batch_size, in_dims, inputs, torch.ops.flashgen.forward_modified)
    o, lse = torch.ops.flashgen.forward_modified(*_fold(info, in_dims, inputs, FORWARD_OPTIONS))
    with_lse = inputs[6]
    return (
        (o.unflatten(0, (info.batch_size, -1)), lse.unflatten(0, (info.batch_size, -1)) if with_lse else lse),
        (0, 0 if with_lse else None),
    )


def map_backward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
    if any(inputs[BACKWARD_OPTIONS + place] is not None for place in OWN) or inputs[-1]:
        return looped(info.batch_size, in_dims, inputs, torch.ops.flashgen.backward_modified)
    *main, dbias, dslopes = torch.ops.flashgen.backward_modified(*_fold(info, in_dims, inputs, BACKWARD_OPTIONS))
    results = [result.unflatten(0, (info.batch_size, -1)) for result in main]
    place = BACKWARD_OPTIONS + FLAT.index("bias")
    if inputs[place] is None or not inputs[-2]:
        return (*results, dbias, dslopes), (0, 0, 0, None, None)
    # Back from the whole batch to one gradient of the caller's shape for each mapped call.
    shape = [size for dim, size in enumerate(inputs[place].shape) if dim != in_dims[place]]
    each = dbias.unflatten(0, (info.batch_size, -1))
    padded = (info.batch_size, *(1,) * (4 - len(shape)), *shape)
    each = each.sum_to_size(padded).reshape(info.batch_size, *shape)
    return (*results, each, dslopes), (0, 0, 0, 0, None)
