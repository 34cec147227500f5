"""`triton_bwd`: the FlashAttention-2 backward in portable Triton: delta, then dK and dV by keys, then dQ by rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashgen.families.family import Family
from flashgen.families.triton_fwd import capability_rule, has_warpgroups
from flashgen.hardware import Gpu
from flashgen.space import Config, Rule
from flashgen.spec import Spec

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


@dataclass(frozen=True)
class _Tile:
    """What one of the two kernels holds: a block stays, blocks along the other length stream past it.

    Attributes:
        name: "dkdv", whose keys stay while rows stream, or "dq", the other way round.
        block: length of what stays: two tiles, and the accumulators.
        step: length of what streams: two tiles again.
        num_warps, num_stages: its launch options.
    """

    name: str
    block: int
    step: int
    num_warps: int
    num_stages: int


def _tiles(config: Config) -> tuple[_Tile, _Tile]:
    def tile(name: str, block: str, step: str) -> _Tile:
        return _Tile(name, *(config[f"{name}_{key}"] for key in (block, step, "num_warps", "num_stages")))

    return tile("dkdv", "block_kv", "block_q"), tile("dq", "block_q", "block_kv")


def _shared_memory(tile: _Tile, spec: Spec, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes of one kernel.

    Fitted to compiled kernels as the forward's: what stays, then what streams in as many buffers as the pipeliner
    keeps: all stages with wgmma, one fewer with mma.sync.
    """
    width = (spec.block_d + spec.block_dv) * spec.element_bytes
    block, step, stages = tile.block * width, tile.step * width, tile.num_stages
    # P and dS change layout between products, what is not pipelined as well; log-sum-exp and delta stream along.
    scores = 2 * tile.block * tile.step * spec.element_bytes + 8 * stages * tile.step
    scores += step // 2 if stages == 1 else 0
    if spec.dtype == "fp32" or gpu.backend == "hip" or gpu.sm < 80:
        # Products without tensor cores and machines without cp.async: only compiling tells.
        return 0, block + stages * step + scores
    if has_warpgroups(gpu) and tile.block >= 64:
        return block + (stages * step if stages > 1 else step // 2), block + stages * step + scores
    return block + (stages - 1) * step, block + max(stages - 1, 1) * step + scores


def shared_memory(spec: Spec, config: Config, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes of shared memory of the kernel that needs most."""
    lows, highs = zip(*(_shared_memory(tile, spec, gpu) for tile in _tiles(config)), strict=True)
    return max(lows), max(highs)


def _fits(tile: _Tile, spec: Spec, gpu: Gpu) -> bool:
    """Whether a tile is sure to find shared memory, so that smaller ones have nothing to offer."""
    return spec.dtype != "fp32" and _shared_memory(tile, spec, gpu)[1] <= gpu.shared_per_block


def _stages_broken(tile: _Tile, spec: Spec, gpu: Gpu) -> str | None:
    if gpu.backend == "cuda" and gpu.sm < 80:
        if tile.num_stages > 2:
            return f"{gpu.arch} has no asynchronous copies, so num_stages={tile.num_stages} cannot pipeline; use 1 or 2"
    elif tile.num_stages == 1 and _fits(replace(tile, num_stages=2), spec, gpu):
        return "num_stages=1 overlaps no copy with arithmetic, and there is room for 2"
    return None


def _warps_broken(tile: _Tile, spec: Spec, gpu: Gpu) -> str | None:
    """Compilers give each warp at least 16 rows of products that feed others; more warps repeat each other's work."""
    if tile.num_warps * 16 > max(tile.block, 64):
        return f"num_warps={tile.num_warps} exceeds the block's {tile.block} rows / 16"
    return None


def _tile_broken(tile: _Tile, spec: Spec, gpu: Gpu) -> str | None:
    """Small tiles read the other tensors more often and fill no matrix instruction: only where nothing larger fits."""
    if tile.block < 64 and _fits(replace(tile, block=64, step=32, num_stages=2), spec, gpu):
        return f"a block of {tile.block} reads what streams more often than one of 64, for which there is room"
    if tile.step < 32 and _fits(replace(tile, step=32, num_stages=2), spec, gpu):
        return f"steps of {tile.step} leave matrix instructions half empty, and there is room for 32"
    return None


def _registers(tile: _Tile, spec: Spec, gpu: Gpu) -> int:
    """fp32 values a thread keeps: P, dP and the accumulators."""
    accumulators = spec.block_d + (spec.block_dv if tile.name == "dkdv" else 0)
    lanes = 32 if gpu.backend == "cuda" else 64
    return max(tile.block // tile.num_warps, 16) * (accumulators + 2 * tile.step) // lanes


def _registers_broken(tile: _Tile, spec: Spec, gpu: Gpu) -> str | None:
    """A thread has 255 registers, and what exceeds them spills to memory; the widest heads spill in every tile."""
    need = _registers(tile, spec, gpu)
    if need > max(255, _registers(replace(tile, block=64, step=32, num_warps=4), spec, gpu)):
        return f"keeps {need} fp32 values a thread in registers, where 255 fit"
    return None


def _shared_memory_broken(tile: _Tile, spec: Spec, gpu: Gpu) -> str | None:
    low, _ = _shared_memory(tile, spec, gpu)
    if low > gpu.shared_per_block:
        return f"needs at least {low} bytes of shared memory, {gpu.name} allows {gpu.shared_per_block}"
    return None


_TILE_RULES: dict[str, Callable[[_Tile, Spec, Gpu], str | None]] = {
    "stages": _stages_broken,
    "warps": _warps_broken,
    "small tile": _tile_broken,
    "registers": _registers_broken,
    "shared memory": _shared_memory_broken,
}


def _rule(kind: str) -> Rule:
    """One constraint on each of the two kernels; the reason names the kernel."""

    def broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
        reasons = ((tile.name, _TILE_RULES[kind](tile, spec, gpu)) for tile in _tiles(config))
        return next((f"{name}: {reason}" for name, reason in reasons if reason is not None), None)

    return Rule(kind, broken)


# (block, step, num_warps, num_stages), best first. The last, for fp32 and little shared memory, fits anywhere.
_DEFAULTS = (
    (128, 64, 8, 2),
    (128, 32, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (32, 32, 4, 2),
    (16, 32, 4, 2),
    (16, 16, 4, 2),
    (16, 16, 4, 1),
)
# Registers that a default may need: addresses and 16-bit P and dS take the others.
_DEFAULT_REGISTERS = 160


def _default_tile(name: str, spec: Spec, gpu: Gpu) -> _Tile:
    for numbers in _DEFAULTS[4:] if spec.dtype == "fp32" else _DEFAULTS:
        tile = _Tile(name, *numbers)
        fits = _shared_memory(tile, spec, gpu)[1] <= gpu.shared_per_block
        lean = tile.block < 128 or _registers(tile, spec, gpu) <= _DEFAULT_REGISTERS
        if fits and lean and all(broken(tile, spec, gpu) is None for broken in _TILE_RULES.values()):
            break
    return tile


def default(spec: Spec, gpu: Gpu) -> Config:
    """For each kernel the largest of a few tiles that obeys the rules and is sure to fit into shared memory."""
    dkdv, dq = _default_tile("dkdv", spec, gpu), _default_tile("dq", spec, gpu)
    return Config(
        dkdv_block_q=dkdv.step,
        dkdv_block_kv=dkdv.block,
        dkdv_num_warps=dkdv.num_warps,
        dkdv_num_stages=dkdv.num_stages,
        dq_block_q=dq.block,
        dq_block_kv=dq.step,
        dq_num_warps=dq.num_warps,
        dq_num_stages=dq.num_stages,
    )


RULES = (Rule("capability", capability_rule), *map(_rule, _TILE_RULES))

TRITON_BWD = Family(
    name="triton_bwd",
    op="backward",
    choices=CHOICES,
    rules=RULES,
    default=default,
    shared_memory=shared_memory,
)
