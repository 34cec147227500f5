"""What each block size needs of shared memory and registers, and which the rules refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashgen.families import Family
from flashgen.families.triton_fwd import TRITON_FWD
from flashgen.hardware import Gpu
from flashgen.space import Config, Rejection
from flashgen.spec import Spec


@dataclass(frozen=True)
class BudgetRow:
    """What one config needs of a multiprocessor's memories.

    Attributes:
        config: block sizes, warps and stages.
        shared_low, shared_high: bytes of shared memory that the compiled kernel will need, by the family's model; low
            is certain. Scores and accumulator are not in it: they live in registers.
        shared_share: shared_high over what the GPU allows one block; up to 1 is sure to fit.
        registers: 32-bit registers a thread for fp32 scores and accumulator, block_q * (block_kv + block_dv) over the
            threads of the block. CUDA has 255, and operands, statistics and addresses need some of them.
        refused: the first of the family's rules that the config breaks, or None.
    """

    config: Config
    shared_low: int
    shared_high: int
    shared_share: float
    registers: int
    refused: Rejection | None

    @staticmethod
    def of(family: Family, spec: Spec, config: Config, gpu: Gpu) -> BudgetRow:
        """The row of any config, also one outside the family's choices."""
        low, high = family.shared_memory(spec, config, gpu)
        threads = config["num_warps"] * (64 if gpu.backend == "hip" else 32)
        registers = math.ceil(config["block_q"] * (config["block_kv"] + spec.block_dv) / threads)
        refused = family.refuses(spec, config, gpu)
        return BudgetRow(config, low, high, high / gpu.shared_per_block, registers, refused)


def budget(
    spec: Spec, gpu: Gpu, *, family: Family = TRITON_FWD, num_warps: int | None = None, num_stages: int = 2
) -> list[BudgetRow]:
    """Say for every block_q x block_kv of a family what it needs and whether the rules refuse it.

    Args:
        spec: what is computed.
        gpu: the machine.
        family: whose choices, rules and shared-memory model hold.
        num_warps: warps of a block; None takes 8 from block_q 128 on and 4 below.
        num_stages: buffers of the pipeline over the keys.

    Raises:
        InputError: num_warps or num_stages is not among the family's choices.
    """
    rows = []
    for block_q in family.choices["block_q"]:
        warps = num_warps if num_warps is not None else 8 if block_q >= 128 else 4
        for block_kv in family.choices["block_kv"]:
            tile = {"block_q": block_q, "block_kv": block_kv, "num_warps": warps, "num_stages": num_stages}
            config = family.config({**family.default(spec, gpu), **tile})
            rows.append(BudgetRow.of(family, spec, config, gpu))
    return rows
