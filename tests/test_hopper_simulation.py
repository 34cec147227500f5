"""`hopper_fwd` in tests/gluon_simulator.py: right numbers, no hang and no race in many sizes and interleavings."""

from __future__ import annotations

import itertools
import random
from typing import Any

import gluon_simulator
import numpy as np
import pytest
import torch
from gluon_simulator import Fault, simulate
from variants import hopper

from flashgen.cases import CASES
from flashgen.check import Accuracy, check
from flashgen.descales import BLOCK, FP8, dequantised
from flashgen.families import Variant
from flashgen.families.hopper_fwd import _combination_broken
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.render import render
from flashgen.space import Config
from flashgen.spec import Causal, Descale, Spec

H200 = Gpu.named("h200")
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DESCALES: tuple[Descale, ...] = ("tensor", "head", "block")
LAUNCHES = 5
# Launches in which a seeded bug must show.
BUG_LAUNCHES = 40


def _variant(causal: Causal, *numbers: int, pack: int = 0) -> Variant:
    """Narrow heads, which are fast to multiply, and padded ones where the config takes them."""
    spec = Spec("forward", 16, 16 if numbers[-1] else 8, "bf16", causal)
    return hopper(spec, *numbers, resident=2 if numbers[0] == 1 else 1, pack=pack)


# Every legal combination of all but block_kv.
NUMBERS = [
    numbers
    for numbers in itertools.product((1, 2, 3), (64,), (2, 3), (0, 1, 2), (0, 1), (0, 1), (0, 1))
    if _combination_broken(Spec(head_dim=16, head_dim_v=16), _variant("none", *numbers).config, H200) is None
]


FP8_NUMBERS = [numbers for numbers in NUMBERS if numbers[0] > 1 and not numbers[-1]]


def _fp8(causal: Causal, descale: Descale, *numbers: int, pack: int = 0) -> Variant:
    return hopper(Spec("forward", 32, 32, "fp8", causal, descale=descale), *numbers, pack=pack)


def _length(chance: random.Random, block: int) -> int:
    """Of a sequence: often beside the edge of a block, at most four blocks."""
    if chance.random() < 0.3:
        return chance.choice((1, block - 1, block, block + 1, 65))
    return chance.randint(1, chance.choice((1, 2, 4)) * block)


def _sizes(config: Config, chance: random.Random) -> Problem:
    """Random ones, a few tiles."""
    group = chance.choice((1, 2, 4, 8, 3)) if config["pack"] else chance.randint(1, 3)
    rows = 64 * config["consumers"] // (group if config["pack"] else 1)
    seq_q, seq_kv = _length(chance, rows), _length(chance, config["block_kv"])
    batch, kv_heads = chance.randint(1, 2), chance.randint(1, 3)
    return Problem(batch, kv_heads * group, kv_heads, seq_q, seq_kv)


def _wrong(variant: Variant, text: str, chance: random.Random, sizes: Problem | None = None) -> str | None:
    """What is wrong with one launch, on random sizes unless given, in a random interleaving, or None."""
    spec = variant.spec
    sizes = sizes or _sizes(variant.config, chance)
    normal = np.random.default_rng(chance.randrange(2**31)).standard_normal
    q = normal((sizes.batch, sizes.heads, sizes.seq_q, spec.head_dim), np.float32)
    k = normal((sizes.batch, sizes.kv_heads, sizes.seq_kv, spec.head_dim), np.float32)
    v = normal((sizes.batch, sizes.kv_heads, sizes.seq_kv, spec.head_dim_v), np.float32)
    descales = _descales(spec, sizes, chance) if spec.dtype == "fp8" else []
    where = f"q {q.shape}, kv {v.shape}"
    try:
        got = simulate(text, (q, k, v), 0.3, chance.choice((1, 2, 3, 5, 132)), chance, spec.causal != "none", descales)
    except Fault as fault:
        return f"{where}: {fault}"
    wide = [torch.from_numpy(operand).double() for operand in (q, k, v)]
    if descales:
        numbers = [each if isinstance(each, float) else torch.from_numpy(each) for each in descales]
        wide = [dequantised(*each, torch.float64) for each in zip(wide, numbers, strict=True)]
    for name, found, expected in zip(
        ("o", "lse"), got, plain_attention(*wide, causal=spec.causal, scale=0.3), strict=True
    ):
        if not np.allclose(found, expected.numpy(), rtol=1e-5, atol=1e-4):
            return f"{where}: wrong {name}"
    return None


def _descales(spec: Spec, sizes: Problem, chance: random.Random) -> list[float | np.ndarray]:
    """Around 1; some of values are 0."""
    if spec.descale == "tensor":
        return [0.7, 1.3, 3.0]
    uniform = np.random.default_rng(chance.randrange(2**31)).uniform
    drawn: list[float | np.ndarray] = []
    for heads, length in ((sizes.heads, sizes.seq_q), (sizes.kv_heads, sizes.seq_kv), (sizes.kv_heads, sizes.seq_kv)):
        shape = (sizes.batch, heads, -(-length // BLOCK))[: 2 if spec.descale == "head" else 3]
        drawn.append(uniform(0.5, 2.0, shape).astype(np.float32))
    values = drawn[2]
    assert isinstance(values, np.ndarray)
    values[uniform(size=values.shape) < 0.2] = 0.0
    return drawn


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("numbers", NUMBERS, ids=lambda numbers: "-".join(map(str, numbers)))
def test_every_interleaving_gives_the_right_numbers(causal: Causal, numbers: tuple[int, ...]) -> None:
    variant = _variant(causal, *numbers)
    text = render(variant)
    chance = random.Random(variant.slug)
    assert [_wrong(variant, text, chance) for _ in range(LAUNCHES)] == [None] * LAUNCHES


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("numbers", NUMBERS[::3], ids=lambda numbers: "-".join(map(str, numbers)))
def test_groups_of_heads_share_tiles(causal: Causal, numbers: tuple[int, ...]) -> None:
    variant = _variant(causal, *numbers, pack=1)
    text = render(variant)
    chance = random.Random(variant.slug)
    assert [_wrong(variant, text, chance) for _ in range(LAUNCHES)] == [None] * LAUNCHES


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("group", [2, 4, 8, 64])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_packed_short_sequences(consumers: int, group: int, causal: Causal) -> None:
    """Fewer rows than a tile, whole tiles, ragged ones, rows that see nothing: seq_q > seq_kv."""
    variant = _variant(causal, consumers, 64, 2, 2, 0, 0, 0, pack=1)
    text = render(variant)
    chance = random.Random(variant.slug)
    for seq_q, seq_kv in itertools.product((1, 5, 64, 100) if group < 64 else (1, 5), (70, 128)):
        assert _wrong(variant, text, chance, Problem(1, 2 * group, 2, seq_q, seq_kv)) is None


@pytest.mark.parametrize("causal", CAUSAL)
def test_long_blocks_of_keys(causal: Causal) -> None:
    for variant in (_variant(causal, 2, 128, 2, 1, 1, 1, 0), _variant(causal, 1, 128, 2, 2, 0, 0, 0, pack=1)):
        chance = random.Random(variant.slug)
        assert _wrong(variant, render(variant), chance) is None


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("numbers", FP8_NUMBERS, ids=lambda numbers: "-".join(map(str, numbers)))
def test_fp8_in_every_interleaving(causal: Causal, numbers: tuple[int, ...]) -> None:
    for descale in DESCALES:
        variant = _fp8(causal, descale, *numbers, pack=len(descale) % 2)
        text = render(variant)
        chance = random.Random(variant.slug)
        assert [_wrong(variant, text, chance) for _ in range(2)] == [None] * 2


@pytest.mark.parametrize("descale", DESCALES)
def test_long_blocks_of_keys_in_fp8(descale: Descale) -> None:
    variant = _fp8("bottom_right", descale, 2, 128, 3, 2, 1, 1, 0)
    text = render(variant)
    chance = random.Random(variant.slug)
    for seq_q, seq_kv in ((1, 129), (200, 77), (130, 1100)):
        assert _wrong(variant, text, chance, Problem(2, 6, 2, seq_q, seq_kv)) is None


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("descale", DESCALES)
def test_p_is_rounded_within_the_accept_rule(descale: Descale, causal: Causal, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = _fp8(causal, descale, 2, 128, 2, 1, 0, 1, 0, pack=1)
    text, packed = render(variant), gluon_simulator._packed
    largest = [0.0]

    def rounded(values: list[Any]) -> Any:
        largest.append(max(float(each.max()) for each in values))
        return packed([torch.from_numpy(np.asarray(each)).to(FP8).float().numpy() for each in values])

    def launch(*given: Any) -> None:
        q, k, v, o, lse, *descales, scale = given
        operands = [each.float().numpy() for each in (q, k, v)]
        numbers = [each if isinstance(each, float) else each.contiguous().numpy() for each in descales]
        found = simulate(text, operands, scale, 132, random.Random(0), causal != "none", numbers)
        for result, values in zip((o, lse), found, strict=True):
            result.copy_(torch.from_numpy(values))

    monkeypatch.setattr(gluon_simulator, "_packed", rounded)
    assert isinstance(check(launch, variant.spec, "cpu", CASES[:5]), Accuracy)
    # It uses e4m3's range, which ends at 448.
    assert 64 < max(largest) <= 256


AHEAD, ALONE, REUSING = (2, 64, 2, 1, 1, 0, 0), (2, 64, 2, 1, 0, 0, 0), (2, 64, 2, 1, 0, 0, 1)
# The producer can be two tiles ahead where a third stage lets it.
FAR_AHEAD = (2, 64, 3, 2, 1, 0, 0)
DRAWING, THREE_TURNS = (2, 64, 2, 2, 0, 0, 0), (3, 128, 2, 2, 0, 1, 0)
PING_PONG, THREE = (2, 64, 2, 1, 0, 1, 0), (3, 64, 2, 1, 1, 0, 0)
SINGLE = (1, 64, 2, 2, 1, 0, 0)


@pytest.mark.parametrize(
    ("numbers", "right", "wrong"),
    [
        pytest.param(ALONE, "phase = step // STAGES & 1 ^ 1", "phase = step // STAGES & 1", id="phase of k_empty"),
        pytest.param(ALONE, "mbarrier.wait(k_empty.index(slot), phase)", "pass", id="no wait for k_empty"),
        pytest.param(THREE, "mbarrier.wait(v_empty.index(slot), phase)", "pass", id="no wait for v_empty"),
        pytest.param(
            ALONE, "mbarrier.wait(q_empty.index(q_slot), turn // Q_STAGES & 1 ^ 1)", "pass", id="no wait for q_empty"
        ),
        pytest.param(
            AHEAD, "q_full.index(q_next), turn // Q_STAGES & 1", "q_full.index(q_next), turn & 1", id="phase of q_full"
        ),
        pytest.param(
            ALONE, "mbarrier.wait(v_full.index(last), (step - 1) // STAGES & 1)", "pass", id="no wait for v_full"
        ),
        pytest.param(
            ALONE,
            "    acc = warpgroup_mma_wait(0, [acc])\n    mbarrier.arrive(v_empty.index(last), count=1)",
            "    mbarrier.arrive(v_empty.index(last), count=1)\n    acc = warpgroup_mma_wait(0, [acc])",
            id="v released early",
        ),
        pytest.param(
            THREE, "k_empty = barriers(STAGES, CONSUMERS)", "k_empty = barriers(STAGES, 1)", id="count of k_empty"
        ),
        pytest.param(
            ALONE, "v_empty = barriers(STAGES, CONSUMERS)", "v_empty = barriers(STAGES, 3)", id="count of v_empty"
        ),
        pytest.param(
            AHEAD, "turn // Q_STAGES & 1, pred=more)", "turn // Q_STAGES & 1)", id="wait for a tile that is not there"
        ),
        pytest.param(
            ALONE,
            "            # The tile before has left shared memory.\n            tma.store_wait(0)",
            "            pass",
            id="output overwritten",
        ),
        pytest.param(
            REUSING,
            "            tma.store_wait(0)\n            mbarrier.arrive(q_empty",
            "            mbarrier.arrive(q_empty",
            id="q loaded over the output",
        ),
        pytest.param(REUSING, "fence_async_shared()\n        copy_out", "copy_out", id="no fence"),
        pytest.param(ALONE, "    tma.store_wait(0)\n\n\n", "\n\n", id="left before the output"),
        pytest.param(
            PING_PONG,
            "    if PING_PONG and CONSUMER == 0:\n        turn_taken(CONSUMER)\n",
            "",
            id="unbalanced at the end",
        ),
        pytest.param(
            PING_PONG,
            "    if PING_PONG and CONSUMER == CONSUMERS - 1:\n        turn_over(CONSUMER)\n",
            "",
            id="nobody begins",
        ),
        pytest.param(AHEAD, "triton.cdiv(tiles, 2)", "tiles", id="more programs than pairs of tiles"),
        pytest.param(
            ALONE, "row + diagonal + 1, seq_kv), 0)", "row + diagonal + 64, seq_kv), 0)", id="diagonal not hidden"
        ),
        pytest.param(ALONE, "seq_kv), 1), BLOCK_KV)", "seq_kv), 0), BLOCK_KV)", id="tiles without keys"),
        pytest.param(ALONE, "head // group, key", "head % group, key", id="heads of k and v"),
        pytest.param(ALONE, "gl.where(row_sum == 0.0, 1.0, row_sum)", "row_sum", id="rows without keys"),
        pytest.param(ALONE, "ROWS).to(gl.int64) * seq_q", "ROWS).to(gl.int64) * (seq_q + 1)", id="place of lse"),
        pytest.param(
            ALONE, "warpgroup_mma_wait(1 if AHEAD else 0, [acc])", "warpgroup_mma_wait(1, [acc])", id="awaited product"
        ),
        pytest.param(
            FAR_AHEAD, "mbarrier.wait(told_empty.index(slot), turn // 2 & 1 ^ 1)", "pass", id="tile overwritten"
        ),
        pytest.param(DRAWING, "mbarrier.wait(told_full.index(slot), turn // 2 & 1)", "pass", id="tile not there yet"),
        pytest.param(DRAWING, "count == tiles - 1", "count == tiles", id="counter left over"),
        pytest.param(DRAWING, "count + gl.num_programs(0)", "count + gl.num_programs(0) - 1", id="a tile twice"),
        pytest.param(DRAWING, "turn, 0, 0, -1)", "turn + 1, 0, 0, -1)", id="the end in another place"),
        pytest.param(
            THREE_TURNS,
            "        turn_taken(CONSUMER)\n        turn_over(CONSUMER)\n    return step",
            "    return step",
            id="turns of who skips",
        ),
        pytest.param(
            DRAWING,
            "        mbarrier.arrive(v_empty.index(slot), count=1)\n        # The other",
            "        # The other",
            id="skipped v kept",
        ),
        pytest.param(
            DRAWING, "gl.where(seen < steps, 1, 0)", "gl.where(seen <= steps, 1, 0)", id="skipped what is seen"
        ),
        pytest.param(DRAWING, "(seq_kv - seq_q) % rows == 0 and", "", id="a diagonal across two blocks"),
        pytest.param(SINGLE, "mbarrier.wait(k_empty.index(slot), phase)", "pass", id="one consumer, k overwritten"),
        pytest.param(
            SINGLE, "v_empty = barriers(STAGES, CONSUMERS)", "v_empty = barriers(STAGES, 2)", id="count of one"
        ),
        pytest.param(AHEAD, "q_next = turn % Q_STAGES", "q_next = (turn + 1) % Q_STAGES", id="place of the next q"),
    ],
)
def test_seeded_bugs_are_caught(numbers: tuple[int, ...], right: str, wrong: str) -> None:
    _assert_caught(_variant("bottom_right", *numbers), right, wrong)


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("layout=gl.SliceLayout(1, SCORES)) % ROWS", "layout=gl.SliceLayout(1, SCORES))", id="diagonal"),
        pytest.param("row + places % ROWS", "row + places", id="rows of lse"),
        pytest.param("head + places // ROWS", "head", id="heads of lse"),
        pytest.param("% (heads // PACKED) * PACKED", "% (heads // PACKED)", id="first head"),
        pytest.param("head_index // (heads // PACKED)", "head_index // heads", id="batch element"),
        pytest.param("all_heads = batch * (heads // PACKED)", "all_heads = batch * heads", id="too many tiles"),
        pytest.param("row + ROWS + diagonal", "row + diagonal", id="keys of a consumer"),
        pytest.param(
            "first_row + CONSUMERS * ROWS + diagonal", "first_row + ROWS // 2 + diagonal", id="keys of a tile"
        ),
        pytest.param("block * (CONSUMERS * ROWS)", "block * (CONSUMERS * 64)", id="first row"),
        pytest.param("(seq_kv - seq_q) % rows == 0 and", "", id="a diagonal across two blocks"),
    ],
)
def test_bugs_of_packed_tiles_are_caught(consumers: int, right: str, wrong: str) -> None:
    _assert_caught(_variant("bottom_right", consumers, 64, 2, 1, 0, 0, 0, pack=1), right, wrong)


TURNING = (2, 64, 3, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("descale", "numbers", "right", "wrong"),
    [
        pytest.param(
            "tensor", TURNING, "mbarrier.wait(raw_full.index(step % 2), step // 2 & 1)", "pass", id="v not there"
        ),
        pytest.param(
            "tensor", (2, 64, 2, 1, 0, 0, 0), "mbarrier.wait(v_empty.index(slot), step // STAGES & 1 ^ 1)", "pass",
            id="v overwritten",
        ),
        pytest.param("tensor", TURNING, "fence_async_shared()\n    mbarrier.arrive", "mbarrier.arrive", id="no fence"),
        pytest.param("tensor", TURNING, "(0, 2, 1, 3, 4)", "(0, 1, 2, 3, 4)", id="order of keys"),
        pytest.param("tensor", TURNING, "value_1, value_3 = gl", "value_3, value_1 = gl", id="order of p"),
        pytest.param(
            "tensor", TURNING, "            if passed > 0:\n                turn_values", "            turn_values",
            id="turned twice",
        ),
        pytest.param("tensor", TURNING, "acc * alpha + product", "acc + product * alpha", id="one alpha too late"),
        pytest.param("tensor", TURNING, "(gl.log2(row_sum) - 7.0)", "gl.log2(row_sum)", id="lse of p scaled"),
        pytest.param("tensor", TURNING, "scale *= descale_q * descale_k", "scale *= descale_q", id="descale of k"),
        pytest.param("tensor", TURNING, "inverse = descale_v /", "inverse = 1.0 /", id="descale of v"),
        pytest.param("head", TURNING, "(head + places // ROWS) *", "head *", id="descales of heads that share"),
        pytest.param("head", TURNING, "kv_head = head // group", "kv_head = head % group", id="head of descales"),
        pytest.param("head", TURNING, "DESCALE_V + batch *", "DESCALE_V + 0 *", id="batch element of descales"),
        pytest.param("block", TURNING, "(row, seq_q - 1) // 128", "(row, seq_q - 1) // 64", id="rows"),
        pytest.param("block", TURNING, "return acc, packed(p_wide), next_alpha, new_max, row_sum, next_descale_v",
                     "return acc, packed(p_wide), next_alpha, new_max, row_sum, descale_v", id="descale of last v"),
        pytest.param("block", TURNING, "(steps - 1) * BLOCK_KV // 128", "steps * BLOCK_KV // 128", id="first block"),
        pytest.param("block", TURNING, "    s = s * descale_k\n    # One", "    # One", id="descale of a block of k"),
    ],
)  # fmt: skip
def test_bugs_of_fp8_are_caught(descale: Descale, numbers: tuple[int, ...], right: str, wrong: str) -> None:
    _assert_caught(_fp8("bottom_right", descale, *numbers, pack=1), right, wrong)


def _assert_caught(variant: Variant, right: str, wrong: str) -> None:
    text = render(variant)
    assert right in text
    chance = random.Random(variant.slug)
    assert any(_wrong(variant, text.replace(right, wrong), chance) for _ in range(BUG_LAUNCHES))
