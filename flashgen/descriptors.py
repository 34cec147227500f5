"""Launches whose kernels take TMA descriptors, and the counters from which such kernels draw their tiles."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Descriptors are remembered by address; a program that allocates without end must not grow for ever.
MAX_REMEMBERED = 4096

# The shape of a tensor and its strides.
Layout = tuple[list[int], list[int]]


class Described:
    """A tensor as Triton's launcher makes a TMA descriptor of it; smaller and faster than its own TensorDescriptor."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor, shape: list[int], strides: list[int]) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides


def describing(bound: Any, views: tuple[Tensor, ...], counts: bool) -> Callable[..., None]:
    """A launch of a kernel that takes q, k, v and o as descriptors.

    Args:
        bound: the kernel, a flashgen.launch.Bound.
        views: q, k, v and o.
        counts: whether the kernel counts tiles.
    """
    layouts = [(list(view.shape), list(view.stride())) for view in views]
    nothing_to_see = views[1].numel() == 0
    past = _past_descriptors(bound.kernel)
    if past is not None:
        launcher, make = past
        bound.run_by(launcher)
        described: Callable[..., tuple[Any, ...]] = _remembering(make, layouts)
    else:

        def described(*tensors: Tensor) -> tuple[Any, ...]:
            return tuple(Described(tensor, *layout) for tensor, layout in zip(tensors, layouts, strict=True))

    def launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, scale: float) -> None:
        if nothing_to_see:  # TMA describes no empty tensor
            o.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
            return
        bound(*described(q, k, v, o), lse, bound.counter() if counts else None, scale)

    return launch


def describing_some(bound: Callable[..., None], layouts: list[Layout | None]) -> Callable[..., None]:
    """A launch of a kernel that takes descriptors where there is a layout, and what else it takes as it is."""

    def launch(*given: Any) -> None:
        bound(
            *(each if layout is None else Described(each, *layout) for each, layout in zip(given, layouts, strict=True))
        )

    return launch


def _remembering(make: Callable[[Described, int], list[Any]], layouts: list[Layout]) -> Callable[..., tuple[Any, ...]]:
    """What the launcher takes for tensors of these layouts; made once for every address."""
    remembered: list[dict[int, list[Any]]] = [{} for _ in layouts]

    def described(*tensors: Tensor) -> tuple[Any, ...]:
        made: list[Any] = []
        for number, tensor in enumerate(tensors):
            known = remembered[number]
            found = known.get(tensor.data_ptr())
            if found is None:
                if len(known) >= MAX_REMEMBERED:
                    known.clear()
                found = known[tensor.data_ptr()] = make(Described(tensor, *layouts[number]), number)
            made += found
        return tuple(made)

    return described


def _past_descriptors(kernel: Any) -> tuple[Callable[..., None], Callable[[Described, int], list[Any]]] | None:
    """Triton 3.6's launcher below its descriptors, and what makes one of them; None in another Triton.

    There a call that makes all four anew costs 20.5 us, one that passes pointers 12.9 (H200 host).
    """
    from triton.backends.nvidia import driver

    launcher = kernel.run
    inner = inspect.getclosurevars(launcher.launch).nonlocals if inspect.isfunction(launcher.launch) else {}
    fits = hasattr(driver, "make_launcher") and {"launcher", "tensordesc_indices", "tensordesc_meta"} <= inner.keys()
    if not fits or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    raw, metas = inner["launcher"], inner["tensordesc_meta"]
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl

    def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        raw(x, y, z, stream, function, cooperative, dependent, None, None, *rest)

    return launch, lambda described, number: driver.make_tensordesc_arg(described, metas[number])


_zeros: dict[tuple[int, int], Tensor] = {}


def zero_of(device: int, stream: int) -> Tensor:
    """The 0 from which kernels of a stream, one after the other, count tiles, and which each of them restores.

    A captured graph has its own: it may be replayed on another stream, beside this one's kernels.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, stream)
    if key not in _zeros:
        _zeros[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _zeros[key]
