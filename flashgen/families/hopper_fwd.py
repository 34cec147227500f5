"""`hopper_fwd`: a FlashAttention-3 forward in Gluon, for sm_90: one warp copies, one to three warpgroups compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from flashgen.families import modified
from flashgen.families.family import Family, Tile
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.space import Config, Rule
from flashgen.spec import ELEMENT_BYTES, Spec
from flashgen.tiles import MAX_TILE_WIDTH

CHOICES = {
    # Warpgroups that compute, 64 rows each.
    "consumers": (1, 2, 3),
    "block_kv": (64, 128),
    "stages": (2, 3),
    # 0: every block of threads has one tile; 1: as many as fit stay, with tiles in a fixed order; 2: they count tiles.
    "schedule": (0, 1, 2),
    # Whether the first product of the next tile is issued with the last one of this tile.
    "ahead": (0, 1),
    # Whether consumers take turns at the tensor cores.
    "ping_pong": (0, 1),
    # Whether the output leaves through Q's place in shared memory.
    "reuse_q": (0, 1),
    # Blocks of threads that share a multiprocessor; what one computes then hides the softmax of another.
    "resident": (1, 2, 3),
    # Whether the heads that share a K/V head share tiles, where GROUPS has their number.
    "pack": (0, 1),
}
# A consumer thread's that S, P and output may take, by consumers and resident blocks: of 240, 160, 224 and 128.
REGISTERS = {(2, 1): 176, (3, 1): 128, (1, 2): 176, (1, 3): 96}
# The same of fp8 inputs, of 232 and 160: the product of one block of values stands beside the output.
FP8_REGISTERS = {2: 208, 3: 144}
# Heads that may share a tile of 64 rows a consumer.
GROUPS = (2, 4, 8, 16, 32, 64)
# Bytes of shared memory that the driver keeps for each block.
RESERVED = 1024
GLUON_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8e4nv"}


def shared_memory(spec: Spec, config: Config, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes: Q, the rings of K and V, the output's way out; then barriers and what specialising takes.

    The last came to at most 460 bytes in compiled kernels, of fp8 inputs 744. Those have two blocks of V as it came in.
    """
    rows, element = 64 * config["consumers"], spec.element_bytes
    q = (1 + config["ahead"]) * rows * spec.block_d * element
    kv = config["stages"] * config["block_kv"] * (spec.block_d + spec.block_dv) * element
    raw = 2 * config["block_kv"] * spec.block_dv if spec.dtype == "fp8" else 0
    out = 0 if config["reuse_q"] else rows * spec.block_dv * ELEMENT_BYTES[spec.out_dtype]
    low = q + kv + raw + out
    return low, low + 1024


def capability_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if gpu.backend != "cuda" or gpu.sm != 90:
        return f"{gpu.name} is {gpu.arch}; this kernel is written for sm_90"
    return None


def inputs_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if spec.dtype not in GLUON_DTYPES:
        return f"{spec.dtype} inputs are not taken; use fp16 or bf16"
    if spec.head_dim * spec.element_bytes % 16 or spec.head_dim_v * spec.element_bytes % 16:
        return f"rows of {spec.head_dim} and {spec.head_dim_v} elements are no multiples of 16 bytes, which TMA copies"
    if spec.dtype == "fp8" and spec.block_dv < 32:
        return f"head_dim_v={spec.head_dim_v} is less than the 32 columns of V that are turned around at a time"
    return None


def width_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if spec.wide:
        return f"heads of {spec.head_dim} and {spec.head_dim_v} are not taken; {MAX_TILE_WIDTH} is the widest"
    return None


def _combination_broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if config["ahead"] and not config["schedule"]:
        return "ahead=1 needs a next tile, thus schedule=1 or 2"
    if config["ping_pong"] and config["consumers"] == 1:
        return "ping_pong=1 needs another consumer to take turns with"
    if (config["consumers"] == 1) != (config["resident"] > 1):
        return f"resident={config['resident']}: one consumer needs other blocks beside it, several leave them no place"
    if spec.dtype == "fp8" and config["consumers"] == 1:
        return "consumers=1 is not built for fp8 inputs, whose V takes four warps more to turn around"
    if spec.dtype == "fp8" and config["reuse_q"]:
        return "reuse_q=1 has no room: the output is bf16, twice as wide as q"
    if config["reuse_q"] and spec.block_d != spec.block_dv:
        return f"reuse_q=1 needs an output as wide as q, but got {spec.block_dv} and {spec.block_d}"
    return None


def _registers_broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """P in the inputs' type beside S and the accumulator must leave some of a consumer thread's registers free."""
    if spec.dtype == "fp8":
        need, most = spec.block_dv + config["block_kv"] * 5 // 8, FP8_REGISTERS[config["consumers"]]
    else:
        need = spec.block_dv // 2 + config["block_kv"] * 3 // 4
        most = REGISTERS[config["consumers"], config["resident"]]
    if need > most:
        return f"keeps {need} registers of S, P and output a thread, where {most} are left"
    return None


def _shared_memory_broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    low, high = shared_memory(spec, config, gpu)
    if low > gpu.shared_per_block:
        return f"needs at least {low} bytes of shared memory, {gpu.name} allows {gpu.shared_per_block}"
    resident = config["resident"]
    if resident > 1 and resident * (high + RESERVED) > gpu.shared_per_sm:
        need = resident * (high + RESERVED)
        return f"{resident} blocks need up to {need} bytes of shared memory, a multiprocessor has {gpu.shared_per_sm}"
    return None


def _slower_than_another(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """What lost wherever it was measured (H200, head_dim 64 and 128, 512 to 8,192 keys) is not tried again.

    Nothing of fp8 inputs.
    """
    if spec.dtype == "fp8":
        return None
    if config["consumers"] == 1:
        if max(spec.block_d, spec.block_dv) > 64:
            return "consumers=1 is 9 to 12 % slower than 2, whose blocks of keys are wider, and equal at best"
        return None
    if config["block_kv"] == 64 and _fits(spec, config, gpu, block_kv=128, stages=2):
        return "block_kv=64 is 8 to 20 % slower than 128, which fits"
    if config["reuse_q"] and _fits(spec, config, gpu, reuse_q=0):
        return "reuse_q=1 is up to 10 % slower than a place of the output's own, which fits"
    return None


def _fits(spec: Spec, config: Config, gpu: Gpu, **other: int) -> bool:
    changed = Config(**{**config, **other})
    return not (_registers_broken(spec, changed, gpu) or _shared_memory_broken(spec, changed, gpu))


def tiles(spec: Spec, config: Config) -> tuple[Tile, ...]:
    """Rows stay, keys stream; the warp that copies is not counted."""
    consumers = config["consumers"]
    width, resident = spec.block_d + spec.block_dv, spec.block_d
    return (
        Tile(
            "kernel", "q", 64 * consumers, config["block_kv"], 4 * consumers, config["stages"], width, resident,
            spec.block_dv,
        ),
    )  # fmt: skip


def packed_heads(config: Config, problem: Problem) -> int:
    """How many heads share a tile."""
    group = problem.heads // max(1, problem.kv_heads)
    return group if config.get("pack") and group in GROUPS else 1


def _pointless(config: Config, problems: Sequence[Problem]) -> str | None:
    packed = Config(**{**config, "pack": 1})
    if not config["pack"] and all(packed_heads(packed, problem) == 1 for problem in problems):
        return f"pack=0 does what pack=1 does, unless {', '.join(map(str, GROUPS))} heads share a K/V head"
    return None


def default(spec: Spec, gpu: Gpu) -> Config:
    """What was best on an H200 for narrow, medium and wide heads, as far as shared memory goes."""
    causal = int(spec.causal != "none")
    width = max(spec.block_d, spec.block_dv)
    names = ("consumers", "block_kv", "stages", "schedule", "ahead", "ping_pong", "reuse_q", "resident", "pack")
    if spec.dtype == "fp8":
        numbers = (2, 128, 3, 1 + causal, 1, 1, 0, 1, 1) if width <= 128 else (2, 128, 2, 1 + causal, 0, 1, 0, 1, 1)
    elif width <= 64:
        numbers = (3, 128, 2, 2, 0, 0, 0, 1, 1)
    elif width <= 128:
        numbers = (2, 128, 2, 2, 0, 0, 0, 1, 1) if causal else (2, 128, 2, 1, 1, 0, 0, 1, 1)
    else:
        numbers = (2, 64, 2, 1 + causal, 0, causal, int(spec.block_d == spec.block_dv), 1, 1)
    return Config(**dict(zip(names, numbers, strict=True)))


def derived(spec: Spec) -> Mapping[str, object]:
    """What the template names: dtypes, and what consumers take for the descales of fp8 inputs."""
    dtypes = {"gluon_dtype": GLUON_DTYPES[spec.dtype], "gluon_out_dtype": GLUON_DTYPES[spec.out_dtype]}
    lists = modified.derived(spec)
    pointers, strides = (
        [name.split(":")[0] for name in cast("list[str]", lists[kind])] for kind in ("pointers", "strides")
    )
    descaling = ["descale_v"] if spec.descale == "tensor" else [*pointers, *strides, "group"]
    return {**dtypes, **{name: lists[name] for name in ("pointers", "strides", "described")}, "descaling": descaling}


RULES = (
    Rule("capability", capability_rule),
    Rule("features", modified.plain_rule),
    Rule("inputs", inputs_rule),
    Rule("width", width_rule),
    Rule("combination", _combination_broken),
    Rule("registers", _registers_broken),
    Rule("shared memory", _shared_memory_broken),
    Rule("dominated", _slower_than_another),
)

HOPPER_FWD = Family(
    name="hopper_fwd",
    op="forward",
    choices=CHOICES,
    rules=RULES,
    default=default,
    shared_memory=shared_memory,
    tiles=tiles,
    kernels={"kernel": tuple(CHOICES)},
    aligned=True,
    by_hand=True,
    least_pairs=256**2,
    pointless=_pointless,
    derived=derived,
)
