"""Candidates' kernels under way in child processes."""

from __future__ import annotations

from concurrent.futures import Future

from flashgen.compile import RAGGED, WHOLE, kernel_resources
from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.resources import Resources
from flashgen.workers import Failure, Workers

COMPILE_TIMEOUT_S = 180.0


class Compilations:
    """What several candidates share is compiled once.

    A family scheduled by hand has a second kernel for ragged lengths. Whoever runs candidates, on lengths of all kinds,
    has it compiled beside the first: the one process at the GPU finds it in Triton's cache.
    """

    def __init__(self, compilers: Workers, gpu: Gpu, *, to_run: bool) -> None:
        self._compilers = compilers
        self._gpu = gpu
        self._to_run = to_run
        self._futures: dict[tuple[object, ...], Future[Resources]] = {}

    def start(self, variant: Variant) -> list[Future[Resources]]:
        """Submit what nobody did yet; the futures of all kernels, in the family's order, ragged ones last."""
        lengths = (WHOLE, RAGGED) if self._to_run and variant.family.by_hand else (WHOLE,)
        futures = []
        for seq_kv in lengths:
            for kernel, choices in variant.family.kernels.items():
                key = (kernel, seq_kv, *(variant.config[name] for name in choices))
                if key not in self._futures:
                    self._futures[key] = self._compilers.submit(
                        COMPILE_TIMEOUT_S, kernel_resources, variant, self._gpu, kernel, seq_kv
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
