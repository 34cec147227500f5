"""`triton_fwd`: the FlashAttention-2 forward in portable Triton, for every GPU that Triton compiles for."""

from __future__ import annotations

from flashgen.families.family import Family, Tile
from flashgen.families.modified import derived, reads_more
from flashgen.hardware import Gpu
from flashgen.space import Config, Rule
from flashgen.spec import ELEMENT_BYTES, Spec
from flashgen.tiles import MAX_TILE_WIDTH

CHOICES = {
    "block_q": (16, 32, 64, 128, 256),
    "block_kv": (16, 32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    # How the loop addresses K and V. Which of the four ptxas schedules best differs by tile: up to 25 % on an H200,
    # where some make it serialise the matrix products.
    "index_bits": (32, 64),
    "advance": (0, 1),
}


def uses_wgmma(config: Config, gpu: Gpu) -> bool:
    """Hopper's and Blackwell's matrix instructions need 64 rows and a whole warpgroup."""
    return has_warpgroups(gpu) and config["block_q"] >= 64 and config["num_warps"] >= 4


def has_warpgroups(gpu: Gpu) -> bool:
    return gpu.backend == "cuda" and (gpu.sm == 90 or 100 <= gpu.sm < 120)


def shared_memory(spec: Spec, config: Config, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes of shared memory of the compiled kernel.

    Fitted to compiled kernels: Q, then K and V in as many buffers as the pipeliner keeps, then P where it changes
    layout between the two products. With wgmma all stages live in shared memory; with mma.sync one fewer. Turing
    and AMD have no asynchronous copies to shared memory, so the pipeliner keeps nothing beyond the tiles.
    """
    element = spec.element_bytes
    block_q, block_kv, stages = config["block_q"], config["block_kv"], config["num_stages"]
    q = block_q * spec.block_d * element
    kv = block_kv * (spec.block_d + spec.block_dv) * element
    p = block_q * block_kv * element
    # Plain products of wide heads are counted too; of narrow ones only compiling tells.
    closely = spec.wide and gpu.backend == "cuda"
    if reads_more(spec):
        # Tiles of the bias pass through shared memory too, and nothing is pipelined where blocks are skipped.
        bias = block_q * block_kv * ELEMENT_BYTES.get(spec.bias, 0)
        low = (q if closely else 0) if plain_products(spec, gpu) else q
        return low, q + stages * (kv + bias) + p + 1024
    if gpu.backend == "hip" or plain_products(spec, gpu):
        other = block_q * (block_kv + 1) * 4
        if closely:
            # Where nothing is pipelined, V takes the place of K.
            turns = block_kv * max(spec.block_d, spec.block_dv) * element
            low = q + ((stages - 1) * kv if stages > 1 else turns)
            return low, low + other
        # Without tensor cores or without cp.async only compiling tells.
        return 0, q + stages * kv + other
    if spec.dtype == "fp8":
        # V is turned around on its way, in a buffer of its own; small tiles become fp16 on machines with warpgroups.
        v = block_kv * spec.block_dv
        if uses_wgmma(config, gpu):
            # What no 16-byte copies reach is not copied ahead.
            ahead = stages if spec.head_dim % 16 == 0 else 1
            return q + ahead * (kv - v) + v, q + stages * kv + v + 1024
        return q + (stages - 1) * kv, 2 * q + stages * kv + 2 * p
    if uses_wgmma(config, gpu):
        low = q + (stages * kv if stages > 1 else kv // 2)
        # Blackwell's, with the address of tensor memory: at most 700 seen, of wide heads 1072.
        barriers = (2048 if spec.wide else 1024) if gpu.sm >= 100 else 0
        return low, low + barriers + (p if stages == 1 else 0)
    if stages > 1:
        low = q + (stages - 1) * kv
        return low, low + (p if block_q < 128 else 0)
    return q, q + kv // 2 + p


def _shared_memory_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    low, _ = shared_memory(spec, config, gpu)
    if low > gpu.shared_per_block:
        return f"needs at least {low} bytes of shared memory, {gpu.name} allows {gpu.shared_per_block}"
    return None


def capability_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if gpu.backend == "cuda" and gpu.sm < 75:
        return f"{gpu.name} has capability {gpu.arch}; Triton supports sm_75 and newer"
    if gpu.backend == "cuda" and gpu.sm < 80 and spec.dtype == "bf16":
        return f"{gpu.name} ({gpu.arch}) has no bf16 arithmetic; use fp16 or a GPU of sm_80 or newer"
    if spec.dtype == "fp8" and (gpu.backend != "cuda" or gpu.sm < 89):
        return f"{gpu.name} ({gpu.arch}) has no arithmetic of float8_e4m3fn; use bf16 or a GPU of sm_89 or newer"
    if gpu.backend == "cuda" and gpu.sm < 80 and spec.wide:
        return f"{gpu.name} ({gpu.arch}) has no room for heads of more than {MAX_TILE_WIDTH}; use sm_80 or newer"
    return None


def plain_products(spec: Spec, gpu: Gpu) -> bool:
    """Products without tensor cores: fp32, and everything on Turing, for which Triton emits plain multiply-adds."""
    return spec.dtype == "fp32" or (gpu.backend == "cuda" and gpu.sm < 80)


def _fits(spec: Spec, gpu: Gpu, block_q: int, block_kv: int, num_stages: int) -> bool:
    """Whether a tile is sure to find shared memory, so that smaller ones have nothing to offer."""
    config = Config(block_q=block_q, block_kv=block_kv, num_warps=4, num_stages=num_stages)
    return not plain_products(spec, gpu) and shared_memory(spec, config, gpu)[1] <= gpu.shared_per_block


def _stages_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    stages = config["num_stages"]
    if gpu.backend == "cuda" and gpu.sm < 80:
        if stages > 2:
            return f"{gpu.arch} has no asynchronous copies, so num_stages={stages} cannot pipeline; use 1 or 2"
    elif stages == 1 and _fits(spec, gpu, config["block_q"], config["block_kv"], 2):
        return "num_stages=1 overlaps no copy with arithmetic, and there is room for 2"
    return None


def _tile_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """Small tiles read K and V more often and fill no matrix instruction: only where nothing larger fits.

    Those of wide heads may have more room in shared memory than in registers, which only compiling tells.
    """
    if spec.dtype == "fp8" and config["block_kv"] < 32:
        return f"block_kv={config['block_kv']} is less than the 32 products of fp8 that are added up at a time"
    if spec.wide:
        return None
    if config["block_q"] < 64 and _fits(spec, gpu, 64, 32, 2):
        return f"block_q={config['block_q']} reads K and V more often than 64 rows, for which there is room"
    if config["block_kv"] < 32 and _fits(spec, gpu, config["block_q"], 32, 2):
        return f"block_kv={config['block_kv']} leaves matrix instructions half empty, and there is room for 32"
    return None


def _accumulator_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """Scores and accumulator stay in registers: 255 a thread, and what exceeds them spills to memory."""
    lanes = 32 if gpu.backend == "cuda" else 64
    # The product of one block of fp8 values stands beside the accumulator.
    kept = spec.block_dv * (2 if spec.dtype == "fp8" and has_warpgroups(gpu) else 1)
    need = config["block_q"] * (kept + config["block_kv"]) // (lanes * config["num_warps"])
    # Exactly 256 leaves no register for anything else, yet compilers may keep part of it as packed 16-bit P.
    if need > 256:
        return f"keeps {need} fp32 values a thread in registers, where 255 fit"
    return None


def _shares_rows(spec: Spec, gpu: Gpu) -> bool:
    """Whether two warpgroups may have half of the columns each of the same rows: all of them are too many for one."""
    return spec.dtype == "fp8" and spec.block_dv > 128 and has_warpgroups(gpu)


def _warps_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """tl.dot gives each warp at least 16 rows; more warps than rows repeat each other's work, but for columns of
    wide heads, which fewer warps have no registers for.
    """
    warps = config["num_warps"]
    if _shares_rows(spec, gpu) and config["block_q"] == 64:
        warps //= 2
    if warps * 16 > max(config["block_q"], 64) and not spec.wide:
        return f"num_warps={warps} exceeds the {config['block_q']} rows of block_q / 16"
    if warps < 4 and has_warpgroups(gpu) and config["block_q"] >= 64:
        return f"num_warps={warps} is less than a warpgroup, which {gpu.arch}'s matrix instructions need"
    return None


# (block_q, block_kv, num_warps, num_stages), best first: what won on an H200 for narrow and for wide heads.
_NARROW_TILES = ((128, 64, 4, 3),)
_TILES = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2))
# fp8 with warpgroups: what takes fewest instructions a score without spilling, where rows are shared and where not.
_FP8_SHARED_TILES = ((64, 64, 8, 2), (64, 32, 8, 2))
_FP8_TILES = ((128, 128, 8, 2),)
# Of wide heads, whose accumulators take the registers of eight warps: the largest of what was compiled that spills
# little, of 576 and 512 columns 4 times in the loop (26 with Triton 3.9). mma.sync has no registers for 64 rows.
_WIDE_TILES = ((64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 8, 2))
_WIDE_PLAIN_TILES = ((16, 16, 8, 2), (16, 16, 8, 1))
# Where little shared memory is left.
_SMALL_TILES = ((32, 32, 4, 2), (16, 32, 4, 2), (16, 32, 2, 1), (16, 16, 4, 2), (16, 16, 2, 1))


def _tiles(spec: Spec, gpu: Gpu) -> tuple[tuple[int, int, int, int], ...]:
    if plain_products(spec, gpu):
        # Operands live in registers too: the first of these that did not spill for sm_75 and for fp32.
        if spec.wide:
            return _WIDE_PLAIN_TILES
        width = spec.block_d + spec.block_dv
        return _SMALL_TILES[0 if width <= 128 else 1 if width <= 384 else 3 :]
    dense = spec.bias != "none" or spec.mask
    if spec.wide:
        return (*_WIDE_TILES[0 if has_warpgroups(gpu) and not dense else 1 :], *_SMALL_TILES)
    if dense:
        # Their addresses, 64 bits an element, take as many registers as scores do: larger tiles spill in the loop.
        return (*(_FP8_SHARED_TILES[1:] if _shares_rows(spec, gpu) else ()), _TILES[-1], *_SMALL_TILES)
    if _shares_rows(spec, gpu):
        return (*_FP8_SHARED_TILES, *_SMALL_TILES)
    if spec.dtype == "fp8" and has_warpgroups(gpu):
        # Rows that no 16-byte loads reach take registers for their addresses.
        whole = spec.head_dim % 16 == 0 and spec.head_dim_v % 16 == 0
        return (*(_FP8_TILES if whole else ()), *_TILES, *_SMALL_TILES)
    narrow = _NARROW_TILES if max(spec.block_d, spec.block_dv) <= 64 else ()
    return (*narrow, *_TILES, *_SMALL_TILES)


def default(spec: Spec, gpu: Gpu) -> Config:
    """The largest of a few well-known tiles that obeys the rules and is sure to fit into shared memory."""
    for tile in _tiles(spec, gpu):
        config = Config(**dict(zip(CHOICES, (*tile, 32, 0), strict=True)))
        fits = shared_memory(spec, config, gpu)[1] <= gpu.shared_per_block
        if fits and all(rule.broken(spec, config, gpu) is None for rule in RULES):
            break
    return config


def tiles(spec: Spec, config: Config) -> tuple[Tile, ...]:
    """Rows stay, keys stream."""
    return (
        Tile(
            kernel="kernel",
            stays="q",
            block=config["block_q"],
            step=config["block_kv"],
            num_warps=config["num_warps"],
            num_stages=config["num_stages"],
            width=spec.block_d + spec.block_dv,
            resident=spec.block_d,
            kept=spec.block_dv,
        ),
    )


RULES = (
    Rule("capability", capability_rule),
    Rule("stages", _stages_rule),
    Rule("warps", _warps_rule),
    Rule("small tile", _tile_rule),
    Rule("registers", _accumulator_rule),
    Rule("shared memory", _shared_memory_rule),
)

TRITON_FWD = Family(
    name="triton_fwd",
    op="forward",
    choices=CHOICES,
    rules=RULES,
    default=default,
    shared_memory=shared_memory,
    tiles=tiles,
    kernels={"kernel": tuple(CHOICES)},
    derived=derived,
)
