"""Compiled kernel + tensor layout -> a bound launch that repeats none of that work."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.compile import compile_kernel, module_of
from flashgen.errors import UnsupportedError
from flashgen.families import Variant
from flashgen.hardware import gpu_of

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

MAX_GRID = 2**31 - 1

_compiling = threading.Lock()


class Bound:
    """One kernel bound to one layout on one device: everything that is known before the pointers are.

    Calling it launches on the current stream of its device, from whatever device is current.
    """

    __slots__ = ("_constants", "_device", "_function", "_grid", "_kernel", "_metadata", "_run", "_sizes", "_stream")

    def __init__(
        self, kernel: CompiledKernel, device: int, grid: int, sizes: tuple[int, ...], constants: tuple[object, ...]
    ) -> None:
        from triton.runtime import driver

        compiled: Any = kernel
        self._kernel = kernel  # Triton unloads a module with its last reference
        self._run = compiled.run
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._stream: Callable[[int], int] = driver.active.get_current_stream
        self._device = device
        self._grid = grid
        self._sizes = sizes
        self._constants = constants

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, scale: float) -> None:
        if torch.cuda.current_device() == self._device:
            self._launch(q, k, v, o, lse, scale)
        else:
            with torch.cuda.device(self._device):
                self._launch(q, k, v, o, lse, scale)

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, scale: float) -> None:
        # CompiledKernel.run has had this signature in Triton 3.6 to 3.9: grid, stream, function, metadata, three
        # launch hooks, then every kernel argument, constexpr ones included. The JIT's own path costs 31 us a call
        # where this costs 8 (H200 host).
        self._run(
            self._grid, 1, 1, self._stream(self._device), self._function, self._metadata, None, None, None,
            q, k, v, o, lse, scale, *self._sizes, *self._constants,
        )  # fmt: skip


def bind(variant: Variant, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Bound:
    """Compile (once) and load a variant for tensors of these shapes, strides, alignment and device.

    Args:
        variant: what to run; its spec must be that of the tensors.
        q, k, v, o: [batch, heads, seq, head_dim] with the last dimension contiguous.

    Raises:
        UnsupportedError: the call needs more blocks than one launch can have.
        whatever Triton raises when the variant does not compile or fit.
    """
    grid, sizes, options = module_of(variant).plan(q, k, v, o)
    if grid[0] > MAX_GRID:
        raise UnsupportedError(
            f"the call needs {grid[0]} blocks of {variant.config['block_q']} rows, one launch has at most {MAX_GRID}. "
            "Split the batch."
        )
    device = q.device.index
    kernel = loaded(variant, device, tuple(sorted(options.items())), is_aligned(q, k, v, o))
    constants = tuple(value for name, value in options.items() if name.isupper())
    return Bound(kernel, device, grid[0], sizes, constants)


def is_aligned(*tensors: Tensor) -> bool:
    """Every row of every tensor starts on a 16-byte boundary."""
    return all(
        tensor.data_ptr() % 16 == 0 and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:3])
        for tensor in tensors
    )


def loaded(variant: Variant, device: int, options: tuple[tuple[str, int], ...], aligned: bool) -> CompiledKernel:
    """The compiled kernel, loaded on a device; one per variant and kind of layout, never one per length."""
    with _compiling:
        return _loaded(variant, device, options, aligned)


@functools.cache
def _loaded(variant: Variant, device: int, options: tuple[tuple[str, int], ...], aligned: bool) -> CompiledKernel:
    chosen: Mapping[str, int] = dict(options)
    with torch.cuda.device(device):
        kernel = compile_kernel(variant, gpu_of(device), options=chosen, aligned=aligned)
        kernel.run  # noqa: B018 (the first access loads the binary)
        return kernel


def launcher(variant: Variant) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float], None]:
    """A function that binds on every call; for checking and timing one variant on many layouts."""

    def launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, scale: float) -> None:
        bind(variant, q, k, v, o)(q, k, v, o, lse, scale)

    return launch
