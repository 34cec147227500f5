"""Candidates' kernels under way in child processes."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from concurrent.futures import Future

from flashgen.compile import RAGGED, WHOLE, kernel_resources
from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.resources import Resources
from flashgen.workers import Failure, Workers

COMPILE_TIMEOUT_S = 180.0


class Compilations:
    """What several candidates share is compiled once.

    A family scheduled by hand has a second kernel for ragged lengths, and more where it packs the heads of a group.
    Whoever runs candidates, on lengths of all kinds and on `groups` of so many heads, has them compiled beside the
    first: the one process at the GPU finds them in Triton's cache.
    """

    def __init__(self, compilers: Workers, gpu: Gpu, *, to_run: bool, groups: Collection[int] = ()) -> None:
        self._compilers = compilers
        self._gpu = gpu
        self._to_run = to_run
        self._groups = sorted({1, *groups})
        self._futures: dict[tuple[object, ...], Future[Resources]] = {}

    def start(self, variant: Variant) -> list[Future[Resources]]:
        """Submit what nobody did yet; the futures of all kernels, in the family's order, ragged ones last."""
        runs = self._to_run and variant.family.by_hand
        lengths = (WHOLE, RAGGED) if runs else (WHOLE,)
        groups = self._groups if runs and variant.config.get("pack") else (1,)
        futures = []
        for group, seq_kv in itertools.product(groups, lengths):
            for kernel, choices in variant.family.kernels.items():
                key = (kernel, group, seq_kv, *(variant.config[name] for name in choices))
                if key not in self._futures:
                    self._futures[key] = self._compilers.submit(
                        COMPILE_TIMEOUT_S, kernel_resources, variant, self._gpu, kernel, seq_kv, group
                    )
                futures.append(self._futures[key])
        return futures

    def cancelled(self, variant: Variant) -> bool:
        """Give up a variant of which some kernel has not begun to compile."""
        waiting = [future for future in self.start(variant) if not future.running() and not future.done()]
        for future in waiting:
            future.cancel()
        return bool(waiting) or any(future.cancelled() for future in self.start(variant))

    def outcome(self, variant: Variant) -> tuple[Resources, ...] | Failure:
        """What all kernels compiled to, for whole blocks, or why the first that failed did not."""
        compiled = []
        for future in self.start(variant):
            result = self._compilers.outcome(future)
            if isinstance(result, Failure):
                if result.kind == "crash":
                    # Whoever shares the kernel tries again: a worker may die of what others do.
                    self._futures = {key: other for key, other in self._futures.items() if other is not future}
                return result
            compiled.append(result)
        return tuple(compiled[: len(variant.family.kernels)])
