"""`hopper_bwd_fused`: the backward in one Gluon kernel for sm_90, between one that prepares and one that converts.

One warp copies, two warpgroups compute, one warp adds dQ in a fixed order, so that results repeat bit by bit.
"""

from __future__ import annotations

from flashgen.families.family import Family, Tile
from flashgen.families.hopper_fwd import GLUON_DTYPES, capability_rule, inputs_rule
from flashgen.families.modified import plain_rule
from flashgen.hardware import Gpu
from flashgen.space import Config, Rule
from flashgen.spec import Spec

CHOICES = {
    # Whether S of the next block of rows is issued behind dQ of this one.
    "ahead": (0, 1),
    # Whether dV is issued before dP is waited for.
    "values_first": (0, 1),
    # Whether dS lies in shared memory as dQ's product reads it, or as it is held.
    "ds_transposed": (0, 1),
    # Whether the warpgroups meet at a barrier of the hardware's when dS is there, or at one in shared memory.
    "named_barrier": (0, 1),
    # Whether the blocks of keys of a head start at different rows, where all of them can run at once.
    "rotate": (0, 1),
}
# Keys that a block of threads keeps, 64 for each warpgroup, and how many blocks of rows are on their way.
BLOCK_KV, STAGES = 128, 2


def width(spec: Spec) -> int:
    """Of Q and K in shared memory: a warpgroup makes 64 rows of dQ, whole, or 64 columns."""
    return 64 if max(spec.block_d, spec.block_dv) <= 64 else 128


def block_q(spec: Spec) -> int:
    """As many rows as a warpgroup has registers for, with dK and dV of its keys beside."""
    return 128 if width(spec) == 64 else 64


def shared_memory(spec: Spec, config: Config, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes: K and V; rings of Q and dO with their statistics; dS twice; dQ; then barriers and the like."""
    d, dv, rows = width(spec), spec.block_dv, block_q(spec)
    low = BLOCK_KV * (d + dv) * spec.element_bytes
    low += STAGES * rows * ((d + dv) * spec.element_bytes + 8)
    low += 2 * BLOCK_KV * rows * spec.element_bytes + rows * d * 4
    return low, low + 1024


def _width_broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if max(spec.head_dim, spec.head_dim_v) > 128:
        return f"dK and dV of {spec.head_dim} and {spec.head_dim_v} columns do not fit in registers; 128 are the most"
    return None


def _combination_broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    if config["rotate"] and spec.causal != "none":
        return "rotate=1 is for rows that see all keys; causal blocks of keys start at their own diagonal"
    return None


def _slower_than_another(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """What lost where it was measured (H200, head_dim 128, no mask, 2,048 and 8,192 keys) is not tried again."""
    if not config["values_first"] and not config["ahead"]:
        return "values_first=0 with ahead=0 lets the powers wait for dP, which is 8 % slower"
    return None


def tiles(spec: Spec, config: Config) -> tuple[Tile, ...]:
    """Keys stay, rows stream; the warps that copy and write are not counted."""
    d, dv = width(spec), spec.block_dv
    return (Tile("gradients_kernel", "kv", BLOCK_KV, block_q(spec), 8, STAGES, 3 * d + 2 * dv, 2 * d + dv, d + dv),)


def default(spec: Spec, gpu: Gpu) -> Config:
    """What was best on an H200, for narrow and for wide heads."""
    whole = int(spec.causal == "none")
    numbers = (1, 0, 0, whole, whole) if width(spec) == 64 else (0, 1, 1, 0, whole)
    return Config(**dict(zip(CHOICES, numbers, strict=True)))


RULES = (
    Rule("capability", capability_rule),
    Rule("features", plain_rule),
    Rule("inputs", inputs_rule),
    Rule("width", _width_broken),
    Rule("combination", _combination_broken),
    Rule("dominated", _slower_than_another),
)

HOPPER_BWD_FUSED = Family(
    name="hopper_bwd_fused",
    op="backward",
    choices=CHOICES,
    rules=RULES,
    default=default,
    shared_memory=shared_memory,
    tiles=tiles,
    kernels={"delta_kernel": ("ahead",), "gradients_kernel": tuple(CHOICES), "convert_kernel": ()},
    aligned=True,
    by_hand=True,
    least_pairs=256**2,
    derived=lambda spec: {"gluon_dtype": GLUON_DTYPES[spec.dtype], "width": width(spec), "block_q": block_q(spec)},
)
