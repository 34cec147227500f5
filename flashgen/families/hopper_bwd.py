"""`hopper_bwd`: the backward in Gluon, for sm_90: delta, then dK and dV by keys, then dQ by rows; no atomics, no locks.

In both large kernels one warp copies and two warpgroups compute.
"""

from __future__ import annotations

from flashgen.families.family import Family, Tile
from flashgen.families.hopper_fwd import GLUON_DTYPES, capability_rule, inputs_rule, width_rule
from flashgen.families.modified import plain_rule
from flashgen.families.triton_bwd import passes
from flashgen.hardware import Gpu
from flashgen.space import Config, Rule
from flashgen.spec import Spec

CHOICES = {
    "dkdv_block_q": (64, 128),
    "dkdv_q_stages": (2, 3),
    "dkdv_do_stages": (1, 2, 3),
    "dq_block_kv": (64, 128),
    "dq_k_stages": (2, 3),
    "dq_v_stages": (1, 2, 3),
}
# Keys of dkdv and rows of dq that a block of threads keeps: 64 for each warpgroup.
BLOCK = 128


def _dkdv_shared_memory(spec: Spec, config: Config) -> int:
    """K and V, which the gradients leave through; rings of Q and dO, with their log-sum-exps and deltas."""
    resident = BLOCK * (spec.block_d + spec.block_dv) * spec.element_bytes
    q = config["dkdv_q_stages"] * config["dkdv_block_q"] * (spec.block_d * spec.element_bytes + 4)
    do = config["dkdv_do_stages"] * config["dkdv_block_q"] * (spec.block_dv * spec.element_bytes + 4)
    return resident + q + do


def _dq_shared_memory(spec: Spec, config: Config) -> int:
    """Q, which dQ leaves through, and dO; rings of K and V."""
    resident = BLOCK * (spec.block_d + spec.block_dv)
    streams = config["dq_k_stages"] * spec.block_d + config["dq_v_stages"] * spec.block_dv
    return (resident + config["dq_block_kv"] * streams) * spec.element_bytes


def shared_memory(spec: Spec, config: Config, gpu: Gpu) -> tuple[int, int]:
    """(low, high) bytes of the kernel that needs most: what is copied; then barriers and what specialising takes."""
    low = max(_dkdv_shared_memory(spec, config), _dq_shared_memory(spec, config))
    return low, low + 1024


def _registers_broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """A thread that computes has 240; P and dS in 16 bits and addresses take what is left."""
    for tile in tiles(spec, config):
        need = tile.kept // 2 + tile.step
        if need > MOST_REGISTERS:
            return f"{tile.kernel}: keeps {need} fp32 values a thread in registers, where {MOST_REGISTERS} fit"
    return None


# Of sums, S and dP.
MOST_REGISTERS = 208


def _shared_memory_broken(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    needs = {"dkdv_kernel": _dkdv_shared_memory(spec, config), "dq_kernel": _dq_shared_memory(spec, config)}
    for kernel, low in needs.items():
        if low > gpu.shared_per_block:
            return f"{kernel}: needs at least {low} bytes of shared memory, {gpu.name} allows {gpu.shared_per_block}"
    return None


def tiles(spec: Spec, config: Config) -> tuple[Tile, ...]:
    """Keys stay in dkdv and rows in dq; the warp that copies is not counted."""
    d, dv = spec.block_d, spec.block_dv
    block_q, q_stages = config["dkdv_block_q"], config["dkdv_q_stages"]
    block_kv, k_stages = config["dq_block_kv"], config["dq_k_stages"]

    def dkdv(width: int, resident: int, kept: int) -> Tile:
        return Tile("dkdv_kernel", "kv", BLOCK, block_q, 8, q_stages, width, resident, kept)

    wide = dkdv(2 * d + dv, d + dv, d), dkdv(d + dv, d, dv)
    both = (dkdv(2 * d + 2 * dv, d + dv, d + dv),)
    dq = Tile("dq_kernel", "q", BLOCK, block_kv, 8, k_stages, 2 * d + dv, d + dv, d)
    return (*(both if len(passes(spec)) == 1 else wide), dq)


def default(spec: Spec, gpu: Gpu) -> Config:
    """The largest blocks that registers and shared memory have room for, then the most stages up to two."""
    found: dict[str, int] = {}
    for block, ring, other in (
        ("dkdv_block_q", "dkdv_q_stages", "dkdv_do_stages"),
        ("dq_block_kv", "dq_k_stages", "dq_v_stages"),
    ):
        least = {"dkdv_block_q": 64, "dkdv_q_stages": 2, "dkdv_do_stages": 1}
        least |= {"dq_block_kv": 64, "dq_k_stages": 2, "dq_v_stages": 1}
        for numbers in ((128, 2, 2), (64, 2, 2), (64, 2, 1)):
            found |= dict(zip((block, ring, other), numbers, strict=True))
            config = Config(**{**least, **found})
            if not (_registers_broken(spec, config, gpu) or _shared_memory_broken(spec, config, gpu)):
                break
    return Config(**found)


RULES = (
    Rule("capability", capability_rule),
    Rule("features", plain_rule),
    Rule("inputs", inputs_rule),
    Rule("width", width_rule),
    Rule("registers", _registers_broken),
    Rule("shared memory", _shared_memory_broken),
)

HOPPER_BWD = Family(
    name="hopper_bwd",
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
    aligned=True,
    by_hand=True,
    least_pairs=256**2,
    # Wide heads: dK first, which needs most.
    derived=lambda spec: {"gluon_dtype": GLUON_DTYPES[spec.dtype], "passes": passes(spec)[::-1]},
)
