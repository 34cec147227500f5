"""`triton_bwd`: the FlashAttention-2 backward in portable Triton: delta, then dK and dV by keys, then dQ by rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from flashgen.families.family import Family, Tile
from flashgen.families.modified import derived, reads_more
from flashgen.families.triton_fwd import capability_rule, has_warpgroups, plain_products
from flashgen.hardware import Gpu
from flashgen.space import Config, Rule
from flashgen.spec import ELEMENT_BYTES, Spec
from flashgen.tiles import MAX_TILE_WIDTH

CHOICES = {
    "dkdv_block_q": (16, 32, 64, 128),
    "dkdv_block_kv": (16, 32, 64, 128),
    "dkdv_num_warps": (4, 8),
    "dkdv_num_stages": (1, 2, 3),
    "dq_block_q": (16, 32, 64, 128),
    "dq_block_kv": (16, 32, 64, 128),
    "dq_num_warps": (4, 8),
    "dq_num_stages": (1, 2, 3),
}


def passes(spec: Spec) -> tuple[tuple[str, ...], ...]:
    """Which sums dkdv collects at once.

    Those of wide heads one after the other: that is eight products instead of seven, but the accumulators of both
    spill in every tile: on an H200 20,876 us at head_dim 256 where as much work at 128 took 3,552.
    """
    return (("dk", "dv"),) if spec.block_d + spec.block_dv <= 256 else (("dv",), ("dk",))


def _tiles(kernel: str, spec: Spec, block: int, step: int, num_warps: int, num_stages: int) -> tuple[Tile, ...]:
    """The loops of one kernel: "dkdv", whose keys stay while rows stream, or "dq", the other way round."""
    d, dv = spec.block_d, spec.block_dv

    def tile(width: int, resident: int, kept: int) -> Tile:
        stays: Literal["q", "kv"] = "q" if kernel == "dq" else "kv"
        return Tile(f"{kernel}_kernel", stays, block, step, num_warps, num_stages, width, resident, kept)

    if kernel == "dq":
        return (tile(2 * d + dv, d + dv, d),)
    if len(passes(spec)) == 1:
        return (tile(2 * d + 2 * dv, d + dv, d + dv),)
    return tile(d + dv, d, dv), tile(2 * d + dv, d + dv, d)


def tiles(spec: Spec, config: Config) -> tuple[Tile, ...]:
    """Every loop of the two kernels; that of delta multiplies no matrices."""

    def of(kernel: str, block: str, step: str) -> tuple[Tile, ...]:
        numbers = (config[f"{kernel}_{key}"] for key in (block, step, "num_warps", "num_stages"))
        return _tiles(kernel, spec, *numbers)

    return of("dkdv", "block_kv", "block_q") + of("dq", "block_q", "block_kv")


def _shared_memory(tile: Tile, spec: Spec, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes of one kernel.

    Fitted to compiled kernels as the forward's: what stays, then what streams in as many buffers as the pipeliner
    keeps: all stages with wgmma, one fewer with mma.sync.
    """
    width = (spec.block_d + spec.block_dv) * spec.element_bytes
    block, step, stages = tile.block * width, tile.step * width, tile.num_stages
    # P and dS change layout between products, what is not pipelined as well; log-sum-exp and delta stream along.
    scores = 2 * tile.block * tile.step * spec.element_bytes + 8 * stages * tile.step
    scores += step // 2 if stages == 1 else 0
    closely = spec.wide and gpu.backend == "cuda"
    if reads_more(spec):
        # Tiles of the bias pass through shared memory too, and nothing is pipelined where blocks are skipped.
        bias = tile.block * tile.step * ELEMENT_BYTES.get(spec.bias, 0)
        low = (block + step if closely else 0) if plain_products(spec, gpu) else block
        return low, block + stages * (step + bias) + scores + 1024
    if closely and plain_products(spec, gpu):
        low = block + max(tile.num_stages - 1, 1) * step
        return low, low + scores
    if gpu.backend == "hip" or plain_products(spec, gpu):
        # Products without tensor cores and machines without cp.async: only compiling tells.
        return 0, block + stages * step + scores
    if has_warpgroups(gpu) and tile.block >= 64:
        if gpu.sm == 90 and stages > 1:
            # P and dS stay in registers; at most 256 bytes of padding were seen.
            return block + stages * step, block + stages * step + 8 * stages * tile.step + 1024
        barriers = 1024 if gpu.sm >= 100 else 0  # Blackwell's, as in the forward
        return block + (stages * step if stages > 1 else step // 2), block + stages * step + scores + barriers
    return block + (stages - 1) * step, block + max(stages - 1, 1) * step + scores


def shared_memory(spec: Spec, config: Config, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes of shared memory of the kernel that needs most."""
    lows, highs = zip(*(_shared_memory(tile, spec, gpu) for tile in tiles(spec, config)), strict=True)
    return max(lows), max(highs)


def _fits(tile: Tile, spec: Spec, gpu: Gpu) -> bool:
    """Whether a tile is sure to find shared memory, so that smaller ones have nothing to offer."""
    return not plain_products(spec, gpu) and _shared_memory(tile, spec, gpu)[1] <= gpu.shared_per_block


def _stages_broken(tile: Tile, spec: Spec, gpu: Gpu) -> str | None:
    if gpu.backend == "cuda" and gpu.sm < 80:
        if tile.num_stages > 2:
            return f"{gpu.arch} has no asynchronous copies, so num_stages={tile.num_stages} cannot pipeline; use 1 or 2"
    elif tile.num_stages == 1 and _fits(replace(tile, num_stages=2), spec, gpu):
        return "num_stages=1 overlaps no copy with arithmetic, and there is room for 2"
    return None


def _warps_broken(tile: Tile, spec: Spec, gpu: Gpu) -> str | None:
    """Compilers give each warp at least 16 rows of products that feed others; more warps repeat each other's work.

    Of wide heads they repeat the scores alone, and share the columns of the sums, which fewer have no registers for.
    """
    if tile.num_warps * 16 > max(tile.block, 64) and not spec.wide:
        return f"num_warps={tile.num_warps} exceeds the block's {tile.block} rows / 16"
    return None


def _tile_broken(tile: Tile, spec: Spec, gpu: Gpu) -> str | None:
    """Small tiles read the other tensors more often and fill no matrix instruction: only where nothing larger fits.

    Those of wide heads may have more room in shared memory than in registers, which only compiling tells.
    """
    if spec.wide:
        return None
    if tile.block < 64 and _fits(replace(tile, block=64, step=32, num_stages=2), spec, gpu):
        return f"a block of {tile.block} reads what streams more often than one of 64, for which there is room"
    if tile.step < 32 and _fits(replace(tile, step=32, num_stages=2), spec, gpu):
        return f"steps of {tile.step} leave matrix instructions half empty, and there is room for 32"
    return None


def _registers(tile: Tile, gpu: Gpu) -> int:
    """fp32 values a thread keeps: P, dP and the accumulators, whose columns warps share where heads are wide."""
    lanes = 32 if gpu.backend == "cuda" else 64
    rows = max(tile.block // tile.num_warps, 16)
    if tile.kept > MAX_TILE_WIDTH:
        return (tile.block * tile.kept // tile.num_warps + rows * 2 * tile.step) // lanes
    return rows * (tile.kept + 2 * tile.step) // lanes


def _registers_broken(tile: Tile, spec: Spec, gpu: Gpu) -> str | None:
    """A thread has 255 registers, and what exceeds them spills to memory; the widest heads spill in every tile."""
    if spec.wide and tile.block >= 64 and 100 <= gpu.sm < 120:
        return f"tensor memory has no room for scores beside sums of {tile.kept} columns; use blocks of 16 or 32"
    need = _registers(tile, gpu)
    if need > max(255, _registers(replace(tile, block=64, step=32, num_warps=4), gpu)):
        return f"keeps {need} fp32 values a thread in registers, where 255 fit"
    return None


def _shared_memory_broken(tile: Tile, spec: Spec, gpu: Gpu) -> str | None:
    low, _ = _shared_memory(tile, spec, gpu)
    if low > gpu.shared_per_block:
        return f"needs at least {low} bytes of shared memory, {gpu.name} allows {gpu.shared_per_block}"
    return None


_TILE_RULES: dict[str, Callable[[Tile, Spec, Gpu], str | None]] = {
    "stages": _stages_broken,
    "warps": _warps_broken,
    "small tile": _tile_broken,
    "registers": _registers_broken,
    "shared memory": _shared_memory_broken,
}


def _rule(kind: str) -> Rule:
    """One constraint on each of the two kernels; the reason names the kernel."""

    def broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
        reasons = ((tile.kernel, _TILE_RULES[kind](tile, spec, gpu)) for tile in tiles(spec, config))
        return next((f"{kernel}: {reason}" for kernel, reason in reasons if reason is not None), None)

    return Rule(kind, broken)


# (block, step, num_warps, num_stages), best first. The last, for fp32 and little shared memory, fits anywhere.
_DEFAULTS = (
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 32, 8, 3),
    (128, 32, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (32, 32, 4, 2),
    (16, 32, 4, 2),
    (16, 16, 4, 2),
    (16, 16, 4, 1),
)
# Of wide heads, whose sums take the registers of eight warps: what spills in no loop of what was compiled for sm_80,
# sm_89 and sm_90. The first, with warpgroup instructions, for dQ alone; the last two for fp32 and little shared memory.
_WIDE_DEFAULTS = ((64, 32, 8, 2), (32, 32, 8, 2), (16, 16, 8, 2), (16, 16, 8, 1))
# Registers that a default may need: addresses and 16-bit P and dS take the others. Warpgroup instructions read their
# operands from shared memory: with them the best tile of head_dim 128 on an H200 needs 192.
_DEFAULT_REGISTERS, _DEFAULT_WARPGROUP_REGISTERS = 160, 192


def _default_numbers(kernel: str, spec: Spec, gpu: Gpu) -> tuple[int, int, int, int]:
    most = _DEFAULT_WARPGROUP_REGISTERS if has_warpgroups(gpu) else _DEFAULT_REGISTERS
    # Without tensor cores operands live in registers too: the first of these that spill little for sm_75 and for fp32.
    small = 8 if spec.block_d + spec.block_dv <= 128 else 9
    # Addresses of bias and mask, 64 bits an element, take as many registers as scores do.
    large = 6 if spec.bias != "none" or spec.mask else 0
    candidates = _DEFAULTS[small if plain_products(spec, gpu) else large :]
    if spec.wide:
        candidates = _WIDE_DEFAULTS[2 if plain_products(spec, gpu) else 0 if kernel == "dq" and gpu.sm == 90 else 1 :]
    for numbers in candidates:
        loops = _tiles(kernel, spec, *numbers)
        fit = all(_shared_memory(tile, spec, gpu)[1] <= gpu.shared_per_block for tile in loops)
        least = 64 if spec.wide else 128
        lean = all(tile.block < least or _registers(tile, gpu) <= most for tile in loops)
        if fit and lean and not any(broken(tile, spec, gpu) for broken in _TILE_RULES.values() for tile in loops):
            break
    return numbers


def default(spec: Spec, gpu: Gpu) -> Config:
    """For each kernel the largest of a few tiles that obeys the rules and is sure to fit into shared memory."""
    dkdv_block, dkdv_step, *dkdv = _default_numbers("dkdv", spec, gpu)
    dq_block, dq_step, *dq = _default_numbers("dq", spec, gpu)
    return Config(**dict(zip(CHOICES, (dkdv_step, dkdv_block, *dkdv, dq_block, dq_step, *dq), strict=True)))


RULES = (Rule("capability", capability_rule), *map(_rule, _TILE_RULES))

TRITON_BWD = Family(
    name="triton_bwd",
    op="backward",
    choices=CHOICES,
    rules=RULES,
    default=default,
    shared_memory=shared_memory,
    tiles=tiles,
    kernels={
        "delta_kernel": (),
        "dkdv_kernel": tuple(name for name in CHOICES if name.startswith("dkdv_")),
        "dq_kernel": tuple(name for name in CHOICES if name.startswith("dq_")),
    },
    derived=lambda spec: {"passes": passes(spec), **derived(spec)},
)
