"""A compiled kernel bound to one layout: a launch that repeats nothing of what is known before the pointers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen import descriptors
from flashgen.compile import Launch

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

Run = Callable[..., None]


class Bound:
    """One kernel bound to one layout on one device: everything that is known before the pointers are.

    Calling it with the kernel's pointers and scale launches on the current stream of its device, from whatever device
    is current.
    """

    __slots__ = ("_device", "_function", "_grid", "_kernel", "_rest", "_stream", "_taken", "launcher")

    def __init__(self, kernel: CompiledKernel, device: int, launch: Launch) -> None:
        from triton.runtime import driver

        compiled: Any = kernel
        self._kernel = kernel  # Triton unloads a module with its last reference
        self.launcher, between = descriptors.unwrapped(compiled.run)
        # Three hooks at the end.
        self._taken = (*between, compiled.packed_metadata, None, None, None)
        self._function = compiled.function
        self._stream: Callable[[int], int] = driver.active.get_current_stream
        self._device = device
        self._grid = launch.grid[0]
        self._rest = launch.sizes + tuple(value for name, value in launch.options.items() if name.isupper())

    def __call__(self, *pointers: Any) -> None:
        if torch.cuda.current_device() == self._device:
            self._launch(pointers)
        else:
            with torch.cuda.device(self._device):
                self._launch(pointers)

    def counter(self) -> Tensor:
        """Zero, for the next launch on the current stream to count with."""
        return descriptors.zero_of(self._device, self._stream(self._device))

    def _launch(self, pointers: tuple[Any, ...]) -> None:
        # CompiledKernel.run has had this signature in Triton 3.6 to 3.9: grid, stream, function, metadata, three
        # launch hooks, then every kernel argument, constexpr ones included. The JIT's own path costs 31 us a call
        # where this costs 8 (H200 host).
        self.launcher(
            self._grid, 1, 1, self._stream(self._device), self._function, *self._taken, *pointers, *self._rest
        )


def with_spare(run: Run, spare: Callable[[], Run]) -> Run:
    """A launch whose blocks must all run at once, for which a part of a GPU (MPS, green contexts) may have no room.

    There `spare` makes one in an order that needs no such promise.
    """

    def launch(*given: Any) -> None:
        try:
            run(*given)
        except RuntimeError as error:
            if "cooperative" not in str(error):
                raise
            spare()(*given)

    return launch
