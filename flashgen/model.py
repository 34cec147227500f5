"""How long a compiled kernel should take on a GPU that is not here. A ranking aid: always called `estimated`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.decode_inputs import as_split
from flashgen.families import Variant
from flashgen.families.family import Tile
from flashgen.families.hopper_fwd import packed_heads
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.queueing import round_trip
from flashgen.resources import Resources
from flashgen.spec import Spec

# Clocks are those of the datasheet's peaks. Fitted, all at once, by least squares on the logarithm of the times of the
# 583 kernels of triton_fwd at 6 sizes each on an H200 (tests/data), faster kernels weighing more:
EXP2_SLOTS = 3.2  # issue slots for one exp2 beside its own; its unit needs 8 clocks, part of which overlaps
SPILL_SLOTS = 11.0  # likewise for one access to spilled registers inside the loop
STACK_SLOTS = 24.0  # likewise, per tile, for one byte of stack: spills outside the hot loop
SERIAL_WAIT = 16.0  # clocks waited for each WARPGROUP instruction that ptxas adds when it serialises the products
TILE_WAIT = 6500.0  # clocks from a block's start to its first product and from its last to its end
LOAD_WAIT = 500.0  # clocks until a copy has landed
DRAM_SHARE = 0.5  # part of the compulsory memory traffic that nothing hides
# Of families whose loop is scheduled by hand, read off hopper_fwd's times at 512 to 8,192 keys on an H200:
HAND_CLOCK = 1.14  # the clock falls below the datasheet's where tensor cores are this busy
HAND_TILE, HAND_WIDTH = 900.0, 16.0  # clocks of a tile beside its passes, and for each column of its output
HAND_START = 5600.0  # more of them for a program with one tile
BLEND = 1.7  # exponent of the norm that joins the times which queues, shared memory and copies allow

# Set by the instruction set, or by nothing that the measurements could tell apart:
SCHEDULERS = 4
SHARED_BYTES = 128.0  # shared memory, a clock and multiprocessor
ARRIVALS = 3  # WARPGROUP instructions of a pass that is not serialised
WIDE_SLOTS = 1.0  # IMAD.WIDE makes an address of a 32-bit index; taken to cost what the two additions for 64 bits do
LOOKAHEAD = 1.5  # a copy is issued num_stages minus this many passes before its data is needed
MASKED_PASSES = 0.5  # what masking adds to a pass
MMA_SYNC_RATE = 0.6  # of the tensor peak, on GPUs whose peak needs warpgroup instructions


@dataclass(frozen=True)
class _Pass:
    """What one block needs for one pass through the loop over keys, in clocks of one multiprocessor.

    Attributes:
        tensor: of the tensor cores, all four busy.
        issue: of the scheduler of one warp.
        shared: of shared memory.
        load: until a copy has landed, shared by the passes that it is ahead.
        wait: latency that only other warps can fill.
        tile_issue: likewise of the scheduler, once per tile.
    """

    tensor: float
    issue: float
    shared: float
    load: float
    wait: float
    tile_issue: float


def predict_us(variant: Variant, resources: Sequence[Resources], problem: Problem, gpu: Gpu) -> float:
    """Estimated time in microseconds of all launches of a variant.

    Every multiprocessor works on as many blocks as fit. Their warps queue for its tensor cores and schedulers; shared
    memory, copies in flight and DRAM are bounds beside that. On an H200 the estimate misses by 7 % (standard
    deviation of the logarithm), and the candidate it ranks first is 2 % slower than the best, 9 % at worst, also for
    head dims and masks that had no part in the fit, as no other GPU and no backward had. Families scheduled by hand
    have constants of their own.

    Args:
        resources: what each of the family's kernels compiled to, in their order.
    """
    compiled = dict(zip(variant.family.kernels, resources, strict=True))
    loops = variant.family.tiles(variant.spec, variant.config)
    problem = as_split(variant, problem, gpu) if variant.spec.op == "decode" else problem
    narrow = variant.config.get("index_bits") == 32
    dram_us = _dram_us(variant.spec, problem, gpu)
    if variant.family.by_hand:
        times = [max(_hand_us(variant, each, compiled[each.kernel], problem, gpu), dram_us) for each in loops]
    else:
        alone = [_loop_us(tile, variant.spec, compiled[tile.kernel], problem, gpu, narrow) for tile in loops]
        times = [max(us + DRAM_SHARE * dram_us, dram_us) for us in alone]
    # Kernels without a tile multiply no matrices: memory is all that they wait for.
    others = len(variant.family.kernels) - len({tile.kernel for tile in loops})
    return sum(times) + others * dram_us


def _dram_us(spec: Spec, problem: Problem, gpu: Gpu) -> float:
    """Time to read q, k and v and to write o, or as much again."""
    width = (spec.head_dim + spec.head_dim_v) * spec.element_bytes * problem.batch
    return width * (problem.heads * problem.seq_q + problem.kv_heads * problem.seq_kv) / (gpu.dram_gbs * 1e3)


def _loop_us(tile: Tile, spec: Spec, resources: Resources, problem: Problem, gpu: Gpu, narrow: bool) -> float:
    work = _pass(tile, spec, resources, gpu, narrow)
    resident = blocks_per_sm(tile, resources, gpu)
    mean, longest = _passes(tile, spec, problem)
    per_sm = _blocks(tile, problem) / gpu.num_sms

    def tile_clocks(blocks: int, passes: float) -> float:
        return passes * _clocks(work, tile, blocks, passes)

    if spec.causal == "none":
        rounds, rest = divmod(math.ceil(per_sm), resident)
        clocks = rounds * tile_clocks(resident, mean) + (tile_clocks(rest, mean) if rest else 0.0)
    else:
        # Long tiles start first and short ones fill up, so that the multiprocessors end together.
        together = min(resident, math.ceil(per_sm))
        clocks = max(per_sm / together * tile_clocks(together, mean), tile_clocks(together, longest))
    return clocks / (gpu.clock_ghz * 1e3)


def _blocks(tile: Tile, problem: Problem, packed: int = 1) -> int:
    """How many blocks a call has, at least one; `packed` heads share them."""
    length, heads = (problem.seq_q, problem.heads) if tile.stays == "q" else (problem.seq_kv, problem.kv_heads)
    return max(1, math.ceil(length * packed / tile.block) * problem.batch * (heads // max(1, packed)))


def _hand_us(variant: Variant, tile: Tile, resources: Resources, problem: Problem, gpu: Gpu) -> float:
    """`resident` blocks fill a multiprocessor; their warps overlap products, softmax and copies, tile after tile."""
    work = _pass(tile, variant.spec, resources, gpu, narrow=False)
    mean, longest = _passes(tile, variant.spec, problem)
    issue, resident = work.issue * tile.num_warps / SCHEDULERS, variant.config.get("resident", 1)
    clocks = resident * HAND_CLOCK * max((work.tensor**BLEND + issue**BLEND) ** (1 / BLEND), work.shared)
    own = HAND_TILE + HAND_WIDTH * tile.kept + (0.0 if variant.config.get("schedule") else HAND_START)
    per_sm = _blocks(tile, problem, packed_heads(variant.config, problem)) / gpu.num_sms / resident
    # Without a mask all tiles take as long: the last round is a whole one.
    rounds = math.ceil(per_sm) if variant.spec.causal == "none" else per_sm
    return float(max(rounds * (mean * clocks + own), longest * clocks + own) / (gpu.clock_ghz * 1e3))


def blocks_per_sm(tile: Tile, resources: Resources, gpu: Gpu) -> int:
    """How many blocks one multiprocessor holds at once, at least 1."""
    threads = tile.num_warps * gpu.warp_threads
    # AMD's compiler does not tell its registers: scores and accumulator are the most of them.
    registers = resources.registers or tile.block * (tile.kept + tile.step) // threads + 32
    reserved = 1024 if gpu.backend == "cuda" and gpu.sm >= 80 else 0
    return max(
        1,
        min(
            gpu.shared_per_sm // max(1, resources.shared + reserved),
            gpu.registers_per_sm // (math.ceil(registers / 8) * 8 * threads),
            gpu.threads_per_sm // threads,
        ),
    )


def _passes(tile: Tile, spec: Spec, problem: Problem) -> tuple[float, float]:
    """Passes through the loop of the mean and of the longest tile; masked ones count for more."""
    length, other = (problem.seq_q, problem.seq_kv) if tile.stays == "q" else (problem.seq_kv, problem.seq_q)
    # A block of keys meets the rows of every query head of its group.
    group = 1 if tile.stays == "q" else problem.heads // max(1, problem.kv_heads)
    if spec.causal == "none":
        passes = group * (math.ceil(other / tile.step) + MASKED_PASSES * (other % tile.step > 0))
        return max(1.0, passes), max(1.0, passes)
    masked = MASKED_PASSES * math.ceil(tile.block / tile.step)
    lines = max(1, problem.batch * problem.heads * length)
    # A tile sees what its last row sees, rounded up to the step.
    extra = (tile.block - 1) / 2 + (tile.step - math.gcd(tile.block, tile.step)) / 2
    most = min(problem.seq_q, problem.seq_kv)
    if (tile.stays, spec.causal) in (("q", "bottom_right"), ("kv", "top_left")):
        most = other
    longest = math.ceil(most / tile.step)
    mean = min((problem.visible_pairs(spec.causal) / lines + extra) / tile.step, longest)
    return max(1.0, group * (mean + masked)), max(1.0, group * (longest + masked))


def _pass(tile: Tile, spec: Spec, resources: Resources, gpu: Gpu, narrow: bool) -> _Pass:
    """Add up the instructions and bytes of one pass; `narrow` addresses are 32 bits wide."""
    element = spec.element_bytes
    loop = _one_pass(tile, spec, resources, gpu)
    warpgroups = loop.get("wgmma", 0) + loop.get("tcgen05", 0) > 0
    copied = tile.step * (spec.block_d + spec.block_dv) * element

    tensor = 0.0
    if _products(loop):
        rate = gpu.tensor_tflops * 1e3 / (2 * gpu.num_sms * gpu.clock_ghz) * {"fp32": 0.5, "fp8": 2}.get(spec.dtype, 1)
        if not warpgroups and gpu.backend == "cuda" and 90 <= gpu.sm < 120:
            rate *= MMA_SYNC_RATE
        tensor = tile.block * tile.step * tile.width / rate

    # Warpgroup instructions read their operands for 64 rows at a time; other warps load what they multiply.
    if warpgroups:
        read = tile.block / 64 * element * (64 * tile.resident + tile.step * tile.width)
    else:
        read = tile.num_warps * (512 * loop.get("ldmatrix", 0) + 256 * loop.get("shared", 0))

    fp32_lanes = gpu.fp32_tflops * 1e3 / (2 * gpu.num_sms * gpu.clock_ghz)
    fp32_slots = max(1.0, gpu.warp_threads * SCHEDULERS / fp32_lanes)
    issue = (
        loop["total"]
        + (fp32_slots - 1) * loop.get("fp32", 0)
        + (2 * fp32_slots - 1) * loop.get("fp32x2", 0)
        + EXP2_SLOTS * loop.get("exp2", 0)
        + SPILL_SLOTS * loop.get("spill", 0)
    )
    if narrow:
        issue += WIDE_SLOTS * (loop.get("cp_async", 0) + loop.get("global", 0))
    wait = SERIAL_WAIT * max(0.0, loop.get("warpgroup", 0) - ARRIVALS)
    if tile.num_stages == 1:
        wait += 2 * LOAD_WAIT
    return _Pass(
        tensor=tensor,
        issue=issue,
        shared=(read + copied) / SHARED_BYTES,
        load=LOAD_WAIT / (tile.num_stages - LOOKAHEAD) if tile.num_stages > 1 else 0.0,
        wait=wait,
        tile_issue=STACK_SLOTS * resources.stack,
    )


def _one_pass(tile: Tile, spec: Spec, resources: Resources, gpu: Gpu) -> dict[str, float]:
    """Instructions of one warp for one pass; without a disassembly, what other kernels have on average."""
    lanes = tile.num_warps * gpu.warp_threads
    scores = tile.block * tile.step / lanes
    loop = resources.loop
    if not loop:
        output = tile.block * tile.kept / lanes
        products = scores * tile.width if spec.dtype == "fp32" and spec.precision == "ieee" else 0.0
        fp32 = 3.5 * scores + output + products
        read = tile.step * (spec.block_d + spec.block_dv) * spec.element_bytes / 512
        mma = 0.0 if products else 1.0
        return {"total": 100 + fp32 + 1.5 * scores + read, "fp32": fp32, "exp2": scores, "ldmatrix": read, "mma": mma}
    # More exponentials than one pass has: the loop that was counted holds several.
    passes = max(1, int(loop.get("exp2", 0) / scores)) if _products(loop) else 1
    return {kind: count / passes for kind, count in loop.items()}


def _products(loop: Mapping[str, float]) -> bool:
    """Whether tensor cores do the products."""
    return any(loop.get(kind, 0) for kind in ("wgmma", "tcgen05", "mma"))


def _clocks(work: _Pass, tile: Tile, blocks: int, passes: float) -> float:
    """Clocks in which `blocks` blocks of one multiprocessor do one pass each, of tiles of so many passes."""
    warps = tile.num_warps / SCHEDULERS
    share = min(1.0, warps)
    issue = work.issue + work.tile_issue / passes
    # Fewer than four warps leave schedulers and tensor cores to other blocks. The warpgroups of a larger block meet at
    # barriers: they overlap less than as many blocks, here as the square root of their number.
    wait = work.wait + TILE_WAIT / passes + (1 - share) * (issue + work.tensor / share)
    together = math.sqrt(max(1.0, warps))
    queued = round_trip(blocks * together, work.tensor / together, issue * share * together, wait)
    bounds = (queued, blocks * work.shared, work.load)
    return float(sum(bound**BLEND for bound in bounds) ** (1 / BLEND))
