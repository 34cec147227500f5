"""Launches whose kernels take TMA descriptors, and the counters from which such kernels draw their tiles."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Descriptors are remembered by address; a program that allocates without end must not grow for ever.
MAX_REMEMBERED = 512

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


def describing(bound: Any, layouts: list[Layout | None]) -> Callable[..., None]:
    """A launch of a kernel that takes some arguments as descriptors.

    Args:
        bound: the kernel, a flashgen.bound.Bound.
        layouts: of the first arguments those that are descriptors' layouts; None for what the kernel takes as it is.
    """
    make = _past_descriptors(bound)
    described: Callable[..., list[Any]]
    if make is not None:
        described = _remembering(make, layouts)
    else:

        def described(*tensors: Any) -> list[Any]:
            return [
                each if layout is None else Described(each, *layout)
                for each, layout in zip(tensors, layouts, strict=True)
            ]

    last = len(layouts)

    def launch(*given: Any) -> None:
        bound(*described(*given[:last]), *given[last:])

    return launch


def forward(bound: Any, views: tuple[Tensor, ...], counts: bool) -> Callable[..., None]:
    """A launch of a forward kernel that takes q, k, v and o as descriptors.

    Args:
        bound: the kernel, a flashgen.bound.Bound.
        views: q, k, v and o, and what else the kernel is bound to.
        counts: whether the kernel counts tiles.
    """
    run = describing(bound, [(list(view.shape), list(view.stride())) for view in views[:4]])
    nothing_to_see = views[1].numel() == 0

    def launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, *rest: Tensor | float) -> None:
        if nothing_to_see:  # TMA describes no empty tensor
            o.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
            return
        run(q, k, v, o, lse, bound.counter() if counts else None, *rest)

    return launch


def _remembering(make: Callable[[Described, int], list[Any]], layouts: list[Layout | None]) -> Callable[..., list[Any]]:
    """What the launcher takes for tensors of these layouts; made once for every address."""
    described = [index for index, layout in enumerate(layouts) if layout is not None]
    places: list[tuple[int, Layout | None, dict[int, list[Any]]]] = [
        (described.index(index) if layout is not None else 0, layout, {}) for index, layout in enumerate(layouts)
    ]

    def arguments(*given: Any) -> list[Any]:
        made: list[Any] = []
        for (number, layout, known), each in zip(places, given, strict=True):
            if layout is None:
                made.append(each)
                continue
            found = known.get(each.data_ptr())
            if found is None:
                if len(known) >= MAX_REMEMBERED:
                    known.clear()
                found = known[each.data_ptr()] = make(Described(each, *layout), number)
            made += found
        return made

    return arguments


def unwrapped(run: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """A kernel's launcher, and what it takes between function and metadata.

    Triton 3.6 wraps a C function in one that allocates scratch: where none is needed, the C function will do.
    """
    driver = _past_driver()
    if (
        driver is None
        or not isinstance(run, driver.CudaLauncher)
        or run.global_scratch_size
        or run.profile_scratch_size
    ):
        return run, ()
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


def _past_driver() -> Any:
    """The driver of Triton 3.6; None in another Triton."""
    try:
        from triton.backends.nvidia import driver
    except ImportError:  # built for another vendor
        return None
    return driver if hasattr(driver, "make_launcher") else None


def _past_descriptors(bound: Any) -> Callable[[Described, int], list[Any]] | None:
    """Have a kernel launched below Triton 3.6's descriptors, and return what makes one of them; None elsewhere.

    There a call that makes all four anew costs 20.5 us, one that passes pointers 12.9 (H200 host).
    """
    driver, launcher = _past_driver(), bound.launcher
    inner = inspect.getclosurevars(launcher).nonlocals if inspect.isfunction(launcher) else {}
    if driver is None or not {"launcher", "tensordesc_indices", "tensordesc_meta"} <= inner.keys():
        return None
    metas = inner["tensordesc_meta"]
    bound.launcher = inner["launcher"]
    return lambda described, number: driver.make_tensordesc_arg(described, metas[number])


_zeros: dict[tuple[int, int], Tensor] = {}
# Zeros for captured graphs, by device: what is left of the last of them; and all zeros that were made, which stay.
RESERVE = 2**18
_left: dict[int, Tensor] = {}
_reserves: list[Tensor] = []
_reserving = threading.Lock()


def zero_of(device: int, stream: int) -> Tensor:
    """The 0 from which kernels of a stream, one after the other, count tiles, and which each of them restores."""
    return zeros_of(device, stream, 1)


def zeros_of(device: int, stream: int, count: int) -> Tensor:
    """At least as many zeros, which kernels of a stream, one after the other, count with and restore.

    A captured graph has its own: it may be replayed on another stream, beside this one's kernels. They come from a
    reserve that was filled before, since filling them would be one more kernel in every replay.
    """
    if torch.cuda.is_current_stream_capturing():
        with _reserving:
            left = _left.get(device)
            if left is None or len(left) < count:
                return torch.zeros(count, dtype=torch.int32, device=device)
            _left[device] = left[count:]
            return left[:count]
    if len(_left.get(device, ())) < RESERVE // 2:
        with _reserving:
            _left[device] = torch.zeros(RESERVE, dtype=torch.int32, device=device)
            _reserves.append(_left[device])
    known = _zeros.get((device, stream))
    if known is None or len(known) < count:
        # Twice as many each time, and kept: a graph may have been captured with those that an eager call was given.
        known = _zeros[device, stream] = torch.zeros(1 << (count - 1).bit_length(), dtype=torch.int32, device=device)
        _reserves.append(known)
    return known
