"""Candidates' kernels under way in child processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from flashgen.compile import RAGGED, WHOLE, kernel_resources, module_of
from flashgen.decode_cases import DECODE_CASES
from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.resources import Resources
from flashgen.workers import Failure, Workers

COMPILE_TIMEOUT_S = 180.0


def _group(problem: Problem) -> int:
    """Query heads that share a K/V head."""
    return problem.heads // max(1, problem.kv_heads)


class Compilations:
    """What several candidates share is compiled once.

    A family scheduled by hand has a second kernel for ragged lengths, and more where it packs the heads of a group.
    Whoever runs candidates, on lengths of all kinds and on groups of as many heads as the problems have, has them
    compiled beside the first: the one process at the GPU finds them in Triton's cache. So it is with a decode, whose
    kernel is another one for fewer rows and for pages of another size: the first is that for the problems.
    """

    def __init__(self, compilers: Workers, gpu: Gpu, *, to_run: bool, problems: Sequence[Problem] = ()) -> None:
        self._compilers = compilers
        self._gpu = gpu
        self._to_run = to_run
        self._problems = problems
        self._groups = sorted({1, *map(_group, problems)})
        self._futures: dict[tuple[object, ...], Future[Resources]] = {}

    def start(self, variant: Variant) -> list[Future[Resources]]:
        """Submit what nobody did yet; the futures of all kernels, in the family's order, ragged ones last."""
        futures = []
        for sizes in self._sizes(variant):
            for kernel, choices in variant.family.kernels.items():
                key = (kernel, sizes, *(variant.config[name] for name in choices))
                if key not in self._futures:
                    self._futures[key] = self._compilers.submit(
                        COMPILE_TIMEOUT_S, kernel_resources, variant, self._gpu, kernel, *sizes
                    )
                futures.append(self._futures[key])
        return futures

    def _sizes(self, variant: Variant) -> list[tuple[int, ...]]:
        """What a variant's kernels are compiled for, as `kernel_resources` takes it."""
        if variant.spec.op == "decode":
            return self._served(variant)
        runs = self._to_run and variant.family.by_hand
        lengths = (WHOLE, RAGGED) if runs else (WHOLE,)
        groups = self._groups if runs and variant.config.get("pack") else (1,)
        return [(seq_kv, group) for group, seq_kv in itertools.product(groups, lengths)]

    def _served(self, variant: Variant) -> list[tuple[int, ...]]:
        asked = [(each, each.page_size) for each in self._problems]
        asked += [(each.problem, each.page_size) for each in DECODE_CASES] if self._to_run else []
        found = []
        for problem, page_size in asked:
            rows = torch.empty(1, problem.seq_q * _group(problem), 1, 1, device="meta")
            block, _ = module_of(variant).block_rows(rows, rows[:, :1])
            found.append((page_size if variant.spec.paged else WHOLE, 1, block))
        return list(dict.fromkeys(found)) or [(WHOLE, 1)]

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
