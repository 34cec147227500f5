"""`triton_decode`: a few rows over a cache of keys, in portable Triton: the keys split among programs, one launch.

Memory is all that such a call waits for: a block of rows is small, and what counts is how many bytes are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashgen.families.family import Family, Tile
from flashgen.families.modified import derived as of_features
from flashgen.families.triton_fwd import capability_rule, plain_products, uses_wgmma
from flashgen.hardware import Gpu
from flashgen.problem import Problem, next_power_of_2
from flashgen.space import Config, Rule
from flashgen.spec import KV_DTYPES, Spec

CHOICES = {
    # Rows at most: a call with fewer has blocks of as many as it has, 16 at least.
    "block_q": (16, 32, 64, 128),
    "block_kv": (32, 64, 128, 256),
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
        return 0, max(left, q + stages * kv + widened + block_q * (block_kv + 1) * 4 + 1024)
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
    elif stages == 1 and not plain_products(spec, gpu):
        return "num_stages=1 has no copy under way while it computes, and copies are all that takes time"
    return None


def _accumulator_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """Scores and accumulator stay in registers: 255 a thread, and what exceeds them spills to memory."""
    need = config["block_q"] * (spec.block_dv + config["block_kv"]) // (gpu.warp_threads * config["num_warps"])
    if need > 224:
        return f"keeps {need} fp32 values a thread in registers, where 224 fit beside addresses"
    return None


def _warps_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if config["num_warps"] == 8 and config["block_kv"] < 64 and config["block_q"] < 128:
        return f"num_warps=8 leaves fewer than 8 of the {config['block_kv']} keys of block_kv to a warp"
    return None


# (block_q, block_kv, num_warps, num_stages, blocks_per_sm), best first: what is sure to fit.
_TILES = ((64, 64, 4, 4, 2), (64, 64, 4, 3, 2), (64, 32, 4, 3, 2), (32, 32, 4, 3, 2), (16, 32, 4, 3, 2))
_WIDE_TILES = ((64, 32, 8, 3, 1), (32, 32, 8, 2, 1), (16, 32, 8, 2, 1))
_PLAIN_TILES = ((16, 64, 4, 2, 2), (16, 32, 4, 2, 2), (16, 32, 4, 1, 2), (16, 32, 8, 1, 1))


def default(spec: Spec, gpu: Gpu) -> Config:
    """The largest of a few tiles that obeys the rules and is sure to fit into shared memory."""
    tiles = _PLAIN_TILES if plain_products(spec, gpu) else _WIDE_TILES if spec.wide else _TILES
    for tile in tiles:
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


# Programs that may share the keys of a row.
MAX_SPLITS = 128
# What serves calls with more rows than those that were tuned for.
DEFAULT_BLOCK_Q = 64

# For the docstring of `launch`.
_DESCALES_DESCRIBED = {
    "tensor": "descale_k, descale_v: numbers that k and v are multiplied by.",
    "head": "descale_k, descale_v: fp32 [batch, kv_heads], multiply k and v; any strides.",
    "token": "descale_k, descale_v: fp32, one for each token of a head: as k without its last dimension; any strides.",
}
_PAGED = (
    "k [pages, kv_heads, page_size, {d}], v [pages, kv_heads, page_size, {dv}], block_table int32 [batch, pages of a",
    "sequence]: key j of it is key j % page_size of page block_table[.., j // page_size].",
)
_CONTIGUOUS = ("k [batch, kv_heads, capacity, {d}], v [batch, kv_heads, capacity, {dv}].",)
_LENGTHS = ("cache_seqlens int32 [batch], keys in the cache; the rows of q stand at the end of the keys.",)
_APPENDED = (
    "k_new [batch, kv_heads, new, {d}], v_new [batch, kv_heads, new, {dv}]: written behind the cache's keys, as far as",
    "there is room, and seen as such.",
)
_VARLEN = (
    "cu_seqlens_q: int32 [sequences + 1], cumulative; total_q: tokens that there are. q, o and what is new are views",
    "in which as many sequences of the longest length start at the first token; lse [heads, total_q].",
)


def planned(spec: Spec) -> tuple[str, ...]:
    """What a kernel is bound to the layout of, as `plan` takes it."""
    return ("q", "k", "v", "o", *(name for name, _ in _strided(spec)))


def _strided(spec: Spec) -> list[tuple[str, str]]:
    """What beside q, k, v and o has strides, and for which dimensions."""
    of_descales = {"tensor": "", "head": "bh", "token": "bhs"}[spec.descale]
    found = [("k_new", "bhs"), ("v_new", "bhs")] * spec.appended + [("block_table", "b")] * spec.paged
    found += [("descale_k", of_descales), ("descale_v", of_descales)] * bool(of_descales)
    return found + [("alibi_slopes", "bh")] * spec.alibi


def _stride(name: str, axis: str) -> str:
    """Its name in the kernel; of those that begin with `stride_` the compiler knows what aligned rows imply."""
    if name.endswith("_new"):
        return f"stride_{name}{axis}"
    return f"{name.removeprefix('block_').removesuffix('_slopes')}_stride_{axis}"


def derived(spec: Spec) -> Mapping[str, object]:
    """What the template names: as `flashgen.families.modified.derived`, and what has to do with the cache.

    `caching`: what the loop over keys takes for it; `finishing`: what the function that writes a row's results takes.
    `numbers`: sizes beyond the usual ones, `numbers_given` how `plan`
    finds them. `planned`: what `plan` takes; `strided_sizes`: of which of them it passes how many strides. `sized`:
    what says how large a call is, `capacity` how many keys a sequence may have.
    """
    named = of_features(spec.plain_of_cache)
    descales = ["descale_k", "descale_v"] if spec.cache != "none" else []
    table, new = ["block_table"] if spec.paged else [], ["k_new", "v_new"] if spec.appended else []
    lines = [*(_PAGED if spec.paged else _CONTIGUOUS), *_LENGTHS, *(_APPENDED if spec.appended else ())]
    described = [line.format(d=spec.head_dim, dv=spec.head_dim_v) for line in lines]
    described += [_DESCALES_DESCRIBED[spec.descale]] if descales else []
    scaling = [f"{name}: tl.float32" if spec.descale == "tensor" else name.upper() for name in descales]
    pointers = ["CACHE_SEQLENS", *(name.upper() for name in (*table, *new)), *scaling]
    new_count = spec.appended and not spec.varlen
    return {
        **named,
        "pointers": pointers + _listed(named["pointers"]) + (["CU_SEQLENS_Q", "total_q: tl.int32"] * spec.varlen),
        "strides": [f"{_stride(name, axis)}: tl.int64" for name, axes in _strided(spec) for axis in axes],
        "modifiers": ["cache_seqlens", *table, *new, *spec.modifiers],
        "described": described + _listed(named["described"]) + (list(_VARLEN) * spec.varlen),
        "caching": _caching(spec),
        "finishing": ["O_head", "stride_oh", "stride_os", "LSE", "lse_place", "group", "seq_q", "scale"]
        + ["total_q"] * spec.varlen
        + ["SINKS_head"] * spec.sinks
        + ["descale_v"] * (spec.cache != "none" and spec.descale != "token"),
        "max_splits": MAX_SPLITS,
        "numbers": ["pages: tl.int32"] * spec.paged + ["new: tl.int32"] * new_count,
        "numbers_given": ["k.shape[0]"] * spec.paged + ["k_new.shape[2]"] * new_count,
        "planned": list(planned(spec)),
        "strided_sizes": [(name, len(axes)) for name, axes in _strided(spec)],
        "sized": ["q", "k", *table],
        "capacity": "block_table.shape[1] * k.shape[2]" if spec.paged else "k.shape[2]",
    }


def _listed(names: object) -> list[str]:
    assert isinstance(names, list)
    return names


def _caching(spec: Spec) -> list[str]:
    found = ["TABLE_row", "pages", "stride_kb", "stride_vb"] if spec.paged else []
    if spec.appended:
        found += ["K_NEW_head", "stride_k_news", "V_NEW_head", "stride_v_news", "stored"]
    if spec.cache != "none" and spec.descale != "token":
        found += ["descale_k"]
    if spec.descale == "token":
        places = ("b", "s") if spec.paged else ("s",)
        for name in ("k", "v"):
            found += [f"DESCALE_{name.upper()}_head", *(f"descale_{name}_stride_{axis}" for axis in places)]
    return found


def _cache_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if spec.cache == "fp8" and (gpu.backend != "cuda" or gpu.sm < 89):
        return f"{gpu.name} ({gpu.arch}) converts no float8_e4m3fn; use int8 caches or a GPU of sm_89 or newer"
    return None


RULES = (
    Rule("capability", capability_rule),
    Rule("cache", _cache_rule),
    Rule("stages", _stages_rule),
    Rule("warps", _warps_rule),
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
