"""How fast this GPU reads its memory, by a kernel that does nothing else. The one file with a kernel of its own."""

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl

from flashgen.graphs import Replayed

READ_BYTES = 2**32
# (numbers a program reads at a time, how often, num_warps); the best of them is what the GPU can do.
SHAPES = ((4096, 1, 8), (4096, 4, 8), (8192, 2, 8), (2048, 8, 4))


@triton.jit  # type: ignore[untyped-decorator]
def read(X, OUT, BLOCK: tl.constexpr, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the sum of the numbers that each program reads."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TIMES)
    total = tl.zeros([BLOCK], tl.int32)
    for time in range(TIMES):
        total += tl.load(X + first + time * BLOCK + tl.arange(0, BLOCK))
    tl.store(OUT + tl.program_id(0), tl.sum(total))


def read_bandwidth(size: int = READ_BYTES) -> float:
    """GB/s that a launch reads of so many bytes of random numbers, by CUDA graph."""
    x = torch.randint(-9, 9, (size // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty(size // 4 // min(block for block, _, _ in SHAPES), dtype=torch.int32, device="cuda")
    best = 0.0
    for block, times, num_warps in SHAPES:
        programs = len(x) // (block * times)

        def launch(programs: int = programs, block: int = block, times: int = times, warps: int = num_warps) -> None:
            read[(programs,)](x, out, BLOCK=block, TIMES=times, num_warps=warps)

        us = statistics.median(Replayed([launch, launch]).sample(repeat_ms=20))
        best = max(best, 4 * programs * block * times / us / 1e3)
    return best
