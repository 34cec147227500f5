"""`triton_decode`: a few rows over a cache of keys, in portable Triton: the keys split among programs, one launch.

Memory is all that such a call waits for: a block of rows is small, and what counts is how many bytes are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.families.family import Family, Tile
from flashgen.families.serving import derived
from flashgen.families.triton_fwd import capability_rule, plain_products, uses_wgmma
from flashgen.hardware import Gpu
from flashgen.problem import Problem, next_power_of_2
from flashgen.space import Config, Rule
from flashgen.spec import KV_DTYPES, Spec

CHOICES = {
    # Rows at most: a call with fewer has blocks of as many as it has, 16 at least.
    "block_q": (16, 32, 64, 128),
    "block_kv": (16, 32, 64, 128, 256),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5),
    # How many programs of a multiprocessor the keys are split for.
    "blocks_per_sm": (1, 2, 3, 4),
}


def shared_memory(spec: Spec, config: Config, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes of shared memory of the compiled kernel, for as many rows as block_q allows.

    Fitted to compiled kernels: as `triton_fwd`'s; caches of 8 bits pass through it once more in q's type. What a split
    leaves changes its layout there too, when keys and values need no more room.
    """
    element, stages = spec.element_bytes, config["num_stages"]
    block_q, block_kv = config["block_q"], config["block_kv"]
    q, p = block_q * spec.block_d * element, block_q * block_kv * element
    kv = block_kv * (spec.block_d + spec.block_dv) * KV_DTYPES[spec.kv_dtype].itemsize
    widened = 0 if spec.cache == "none" else block_kv * (spec.block_d + spec.block_dv) * element
    left = block_q * (spec.block_dv + 4) * 4 + 8192
    if gpu.backend == "hip" or plain_products(spec, gpu):
        # Where nothing is pipelined, V takes the place of K.
        turns = block_kv * max(spec.block_d, spec.block_dv) * element
        held = turns if stages == 1 else stages * kv + widened
        return 0, max(left, q + held + block_q * (block_kv + 1) * 4 + 1024)
    low = q + (stages - 1) * kv
    if uses_wgmma(config, gpu):
        if spec.cache == "none" and stages > 1:
            low += kv
        return low, max(left, low + kv + widened + p + 2048)
    return low, max(left, low + widened + p + (kv if stages == 1 else 0))


def _shared_memory_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    low, _ = shared_memory(spec, config, gpu)
    if low > gpu.shared_per_block:
        return f"needs at least {low} bytes of shared memory, {gpu.name} allows {gpu.shared_per_block}"
    return None


def _stages_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    stages = config["num_stages"]
    if gpu.backend == "cuda" and gpu.sm < 80:
        if stages > 2:
            return f"{gpu.arch} has no asynchronous copies, so num_stages={stages} cannot pipeline; use 1 or 2"
    elif stages == 1 and gpu.backend == "cuda" and not plain_products(spec, gpu):
        return "num_stages=1 has no copy under way while it computes, and copies are all that takes time"
    return None


def _accumulator_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """Scores and accumulator stay in registers: 255 a thread, and what exceeds them spills to memory."""
    need = config["block_q"] * (spec.block_dv + config["block_kv"]) // (gpu.warp_threads * config["num_warps"])
    if need > 224:
        return f"keeps {need} fp32 values a thread in registers, where 224 fit beside addresses"
    return None


def _warps_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """Of wide heads the warps share the columns of the output; plain products need their registers."""
    if spec.wide or plain_products(spec, gpu):
        return None
    if config["num_warps"] == 8 and config["block_kv"] < 64 and config["block_q"] < 128:
        return f"num_warps=8 leaves fewer than 8 of the {config['block_kv']} keys of block_kv to a warp"
    return None


def _small_tile_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """Little is on its way with few keys at a time."""
    larger = Config(**{**config, "block_kv": 32})
    if config["block_kv"] == 16 and shared_memory(spec, larger, gpu)[1] <= gpu.shared_per_block:
        return "block_kv=16 copies fewer keys at a time than there is room for"
    return None


# (block_q, block_kv, num_warps, num_stages, blocks_per_sm), best first: what is sure to fit.
_TILES = ((64, 64, 4, 4, 2), (64, 64, 4, 3, 2), (64, 32, 4, 3, 2), (32, 32, 4, 3, 2), (16, 32, 4, 3, 2))
_WIDE_TILES = ((64, 32, 8, 3, 1), (32, 32, 8, 2, 1), (16, 32, 8, 2, 1), (16, 32, 8, 1, 1))
# Of plain products operands live in registers too.
_PLAIN_TILES = ((16, 64, 4, 2, 2), (16, 32, 4, 2, 2), (16, 32, 8, 2, 1), (16, 32, 8, 1, 1))
_SMALL_TILES = ((16, 16, 4, 2, 1), (16, 16, 8, 1, 1), (16, 16, 4, 1, 1))


def _tiles(spec: Spec, gpu: Gpu) -> tuple[tuple[int, ...], ...]:
    if plain_products(spec, gpu):
        width = spec.block_d + spec.block_dv
        return (*_PLAIN_TILES[0 if width <= 128 else 1 if width <= 256 else 2 :], *_SMALL_TILES)
    return (*(_WIDE_TILES if spec.wide else _TILES), *_SMALL_TILES)


def default(spec: Spec, gpu: Gpu) -> Config:
    """The largest of a few tiles that obeys the rules and is sure to fit into shared memory."""
    for tile in _tiles(spec, gpu):
        config = Config(**dict(zip(CHOICES, tile, strict=True)))
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


def pointless(config: Config, problems: Sequence[Problem]) -> str | None:
    """Blocks never have more rows than a call: of the choices that are too many one is enough."""
    rows = max((each.seq_q * (each.heads // max(1, each.kv_heads)) for each in problems), default=1)
    enough = max(16, next_power_of_2(max(1, rows)))
    if config["block_q"] > enough and config["block_q"] != DEFAULT_BLOCK_Q:
        return f"block_q={config['block_q']} is {enough} for these problems, whose key heads have {rows} rows"
    if config["block_q"] <= enough < DEFAULT_BLOCK_Q and config["block_q"] == enough:
        return f"block_q={DEFAULT_BLOCK_Q} is {enough} for these problems, and serves larger ones too"
    return None


# What serves calls with more rows than those that were tuned for.
DEFAULT_BLOCK_Q = 64


def _cache_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if spec.cache == "fp8" and (gpu.backend != "cuda" or gpu.sm < 89):
        return f"{gpu.name} ({gpu.arch}) converts no float8_e4m3fn; use int8 caches or a GPU of sm_89 or newer"
    return None


RULES = (
    Rule("capability", capability_rule),
    Rule("cache", _cache_rule),
    Rule("stages", _stages_rule),
    Rule("warps", _warps_rule),
    Rule("small tile", _small_tile_rule),
    Rule("registers", _accumulator_rule),
    Rule("shared memory", _shared_memory_rule),
)

TRITON_DECODE = Family(
    name="triton_decode",
    op="decode",
    choices=CHOICES,
    rules=RULES,
    default=default,
    shared_memory=shared_memory,
    tiles=tiles,
    # How many programs share the keys is no part of the kernel.
    kernels={"kernel": tuple(name for name in CHOICES if name != "blocks_per_sm")},
    pointless=pointless,
    derived=derived,
)
