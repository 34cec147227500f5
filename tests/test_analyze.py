"""The counts of `analyze` against brute force, hand arithmetic and the published figures of known GPUs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flashgen.analyze import Analysis, analyze
from flashgen.budget import BudgetRow, budget
from flashgen.errors import InputError
from flashgen.families.triton_fwd import CHOICES, TRITON_FWD
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.space import Config
from flashgen.spec import Spec

A100 = Gpu.named("a100")
BLOCKS = Config(block_q=128, block_kv=64)
CAUSAL = ("none", "bottom_right", "top_left")
MIB = 2**20


def bytes_of(traffic: object) -> dict[str, int]:
    return {transfer.name: transfer.bytes for transfer in traffic}


def visible(problem: Problem, causal: str) -> list[set[int]]:
    """The keys that each row of one head sees, straight from the definition of the masks."""
    last = {
        "none": lambda i: problem.seq_kv - 1,
        "bottom_right": lambda i: i + problem.seq_kv - problem.seq_q,
        "top_left": lambda i: i,
    }[causal]
    return [{j for j in range(problem.seq_kv) if j <= last(i)} for i in range(problem.seq_q)]


SIZES = [*itertools.product(range(8), range(8)), (1, 37), (37, 1), (33, 70), (70, 33), (64, 64)]


@pytest.mark.parametrize("causal", CAUSAL)
def test_pairs_and_flops_are_those_of_the_mask(causal):
    spec = Spec(head_dim=24, head_dim_v=40, causal=causal)
    for seq_q, seq_kv in SIZES:
        problem = Problem(2, 6, 3, seq_q, seq_kv)
        pairs = 2 * 6 * sum(len(keys) for keys in visible(problem, causal))
        result = analyze(problem, spec, A100, BLOCKS)
        assert result.visible_pairs == pairs, (seq_q, seq_kv)
        assert result.flash.flops == 2 * (24 + 40) * pairs
        assert result.standard.flops == 2 * (24 + 40) * 2 * 6 * seq_q * seq_kv
        assert result.standard.exps == 2 * 6 * seq_q * seq_kv


@pytest.mark.parametrize("causal", CAUSAL)
def test_flash_exps_add_one_rescale_for_each_row_and_block_it_sees(causal):
    for block_kv, (seq_q, seq_kv) in itertools.product((1, 3, 4, 16), SIZES):
        problem = Problem(1, 1, 1, seq_q, seq_kv)
        rows = visible(problem, causal)
        blocks = sum(len({j // block_kv for j in keys}) for keys in rows)
        result = analyze(problem, Spec(causal=causal), A100, Config(block_q=16, block_kv=block_kv))
        assert result.flash.exps == sum(map(len, rows)) + blocks, (block_kv, seq_q, seq_kv)


@pytest.mark.parametrize("causal", CAUSAL)
def test_l2_bytes_are_what_a_walk_over_the_tiles_loads(causal):
    """The walk loads whole blocks of keys up to the last one that the block's last row may see, ends cut at seq_kv."""
    spec = Spec(head_dim=24, head_dim_v=40, dtype="bf16", causal=causal)
    for block_q, block_kv, (seq_q, seq_kv) in itertools.product((4, 6, 16), (4, 10, 16), SIZES):
        keys = 0
        for first_row in range(0, seq_q, block_q):
            last_row = first_row + block_q - 1
            stop = {"none": seq_kv, "bottom_right": last_row + seq_kv - seq_q + 1, "top_left": last_row + 1}[causal]
            for first_key in range(0, min(stop, seq_kv), block_kv):
                keys += min(block_kv, seq_kv - first_key)
        expected = 3 * (keys * (24 + 40) * 2 + seq_q * ((24 + 40) * 2 + 4))
        result = analyze(Problem(1, 3, 1, seq_q, seq_kv), spec, A100, Config(block_q=block_q, block_kv=block_kv))
        assert result.l2_bytes == expected, (block_q, block_kv, seq_q, seq_kv)


@pytest.mark.parametrize("causal", CAUSAL)
def test_compulsory_bytes_leave_out_keys_that_no_row_sees(causal):
    spec = Spec(head_dim=24, head_dim_v=40, dtype="fp16", causal=causal)
    for seq_q, seq_kv in SIZES:
        problem = Problem(2, 6, 3, seq_q, seq_kv)
        keys = len(set().union(*visible(problem, causal)))
        result = analyze(problem, spec, A100, Config(block_q=4, block_kv=4))
        assert bytes_of(result.flash.traffic) == {
            "read q": 2 * 6 * seq_q * 24 * 2,
            "read k": 2 * 3 * keys * 24 * 2,
            "read v": 2 * 3 * keys * 40 * 2,
            "write o": 2 * 6 * seq_q * 40 * 2,
            "write lse": 2 * 6 * seq_q * 4,
        }
        assert result.flash.hbm_bytes <= result.l2_bytes


def test_bytes_of_one_problem_by_hand():
    """Batch 2, 8 heads, N = 4096, D = 128 in fp16: a tensor is 16 MiB, a matrix 512 MiB, K and V are read 32 times."""
    problem = Problem(2, 8, 8, 4096, 4096)
    result = analyze(problem, Spec(dtype="fp16"), A100, Config(block_q=128, block_kv=128))
    tensor, matrix = 16 * MIB, 512 * MIB
    assert bytes_of(result.standard.traffic) == {
        "read q": tensor,
        "read k": tensor,
        "write scores": matrix,
        "read scores": matrix,
        "write probabilities": matrix,
        "read probabilities": matrix,
        "read v": tensor,
        "write o": tensor,
    }
    assert result.standard.hbm_bytes == 2112 * MIB
    assert result.flash.hbm_bytes == 64 * MIB + 256 * 1024
    assert result.l2_bytes == 32 * 32 * MIB + 32 * MIB + 256 * 1024
    assert result.flash.flops == result.flops_convention == 4 * 16 * 4096**2 * 128
    assert result.flash.hbm_intensity == 137438953472 / 67371008
    assert result.l2_intensity == 137438953472 / 1107558400


def test_standard_bytes_with_unequal_widths_and_shared_key_heads():
    spec = Spec(head_dim=24, head_dim_v=40, dtype="fp16", causal="top_left")
    moved = bytes_of(analyze(Problem(2, 6, 3, 10, 50), spec, A100, BLOCKS).standard.traffic)
    assert (moved["read q"], moved["write o"]) == (2 * 6 * 10 * 24 * 2, 2 * 6 * 10 * 40 * 2)
    assert (moved["read k"], moved["read v"]) == (2 * 3 * 50 * 24 * 2, 2 * 3 * 50 * 40 * 2)
    assert moved["write scores"] == moved["read probabilities"] == 2 * 6 * 10 * 50 * 2


def test_extra_memory_is_scores_and_probabilities_for_standard_and_nothing_for_flash():
    result = analyze(Problem(2, 8, 8, 8192, 8192), Spec(dtype="fp32"), A100, BLOCKS)
    assert bytes_of(result.standard.traffic)["write scores"] == 4 * 2**30
    assert result.standard.extra_bytes == 8 * 2**30
    assert result.flash.extra_bytes == 0


def test_smaller_query_blocks_read_keys_more_often_from_l2_and_not_from_hbm():
    problem, spec = Problem(2, 8, 8, 4096, 4096), Spec()
    wide, narrow = (analyze(problem, spec, A100, Config(block_q=block_q, block_kv=64)) for block_q in (128, 64))
    once = 32 * MIB + 256 * 1024
    assert narrow.l2_bytes - once == 2 * (wide.l2_bytes - once)
    assert narrow.flash.hbm_bytes == wide.flash.hbm_bytes
    assert narrow.l2_intensity < wide.l2_intensity


def test_shared_key_heads_save_hbm_bytes_and_not_l2_bytes():
    full, grouped = (analyze(Problem(1, 32, kv, 1024, 1024), Spec(), A100, BLOCKS) for kv in (32, 8))
    key_bytes = 32 * 1024 * 128 * 2
    assert full.flash.hbm_bytes - grouped.flash.hbm_bytes == 2 * key_bytes * 3 // 4
    assert full.l2_bytes == grouped.l2_bytes


def test_causal_halves_the_convention_but_counts_exactly():
    problem = Problem(1, 1, 1, 1024, 1024)
    none, causal = (analyze(problem, Spec(causal=causal), A100, BLOCKS) for causal in ("none", "bottom_right"))
    assert causal.flops_convention * 2 == none.flops_convention == none.flash.flops
    assert causal.flash.flops == 4 * 128 * (1024 * 1025 // 2)
    assert causal.l2_bytes < none.l2_bytes
    assert causal.standard == none.standard


def test_a_long_problem_takes_closed_forms():
    """2^30 rows: any loop over rows would not return; the triangle's area says what must."""
    seq = 2**30
    result = analyze(Problem(1, 1, 1, seq, seq), Spec(causal="top_left"), A100, Config(block_q=16, block_kv=16))
    assert result.visible_pairs == seq * (seq + 1) // 2
    blocks = seq // 16
    assert result.l2_bytes == 16 * (blocks * (blocks + 1) // 2) * 256 * 2 + seq * (256 * 2 + 4)


def limit(result: Analysis, name: str) -> float:
    return next(one.us for one in result.flash.limits if one.name == name)


def test_a100_prefill_by_hand():
    """312 TFLOP/s; 108 SMs x 16 exp2 x 1.41 GHz; 2039 GB/s."""
    result = analyze(Problem(1, 32, 8, 4096, 4096), Spec(), A100, BLOCKS)
    pairs = 32 * 4096**2
    assert result.ridge == pytest.approx(153.02, abs=0.01)
    assert limit(result, "tensor cores") == pytest.approx(4 * pairs * 128 / 312e12 * 1e6)
    assert limit(result, "exp unit") == pytest.approx(pairs * (1 + 1 / 64) / (108 * 16 * 1.41e9) * 1e6)
    assert limit(result, "HBM") == pytest.approx(result.flash.hbm_bytes / 2039e9 * 1e6)
    assert result.flash.binding.name == "tensor cores"
    assert result.flash.hbm_intensity > result.ridge
    assert result.standard.binding.name == "HBM"
    assert result.standard.hbm_intensity < result.ridge


def test_decoding_is_bound_by_hbm():
    result = analyze(Problem(8, 32, 8, 1, 4096), Spec(causal="bottom_right"), A100, BLOCKS)
    assert result.flash.binding.name == "HBM"
    # Four query heads share every key: 4 * D FLOP a pair, 4 * D bytes a key and value of two bytes.
    assert result.flash.hbm_intensity == pytest.approx(4.0, rel=2e-3)


def test_narrow_heads_on_b200_are_bound_by_the_exp_unit():
    problem, b200 = Problem(4, 16, 16, 8192, 8192), Gpu.named("b200")
    assert analyze(problem, Spec(head_dim=64, head_dim_v=64), b200, BLOCKS).flash.binding.name == "exp unit"
    assert analyze(problem, Spec(head_dim=256, head_dim_v=256), b200, BLOCKS).flash.binding.name == "tensor cores"
    ultra = replace(b200, name="sm103", capability=(10, 3))
    slow, fast = (limit(analyze(problem, Spec(), gpu, BLOCKS), "exp unit") for gpu in (b200, ultra))
    assert slow == 2 * fast


@pytest.mark.parametrize(
    ("gpu", "dtype", "precision", "units", "tflops"),
    [
        ("a100", "fp16", "ieee", "tensor cores", 312),
        ("a100", "fp32", "tf32", "tensor cores", 156),
        ("a100", "fp32", "ieee", "fp32 units", 19.5),
        ("t4", "fp16", "ieee", "tensor cores", 65),
        ("t4", "fp32", "tf32", "fp32 units", 8.1),
        ("mi300x", "bf16", "ieee", "tensor cores", 1307),
    ],
)
def test_products_run_on_the_units_that_the_dtype_allows(gpu, dtype, precision, units, tflops):
    known = Gpu.named(gpu)
    result = analyze(Problem(1, 1, 1, 512, 512), Spec(dtype=dtype, precision=precision), known, BLOCKS)
    assert limit(result, units) == pytest.approx(4 * 512 * 512 * 128 / (tflops * 1e12) * 1e6)
    assert result.ridge == pytest.approx(tflops * 1e3 / known.dram_gbs)


@pytest.mark.parametrize("sizes", [(0, 8, 8, 64, 64), (2, 0, 8, 64, 64), (2, 8, 8, 0, 64)])
def test_an_empty_problem_costs_nothing(sizes):
    result = analyze(Problem(*sizes), Spec(causal="bottom_right"), A100, BLOCKS)
    for method in (result.flash, result.standard):
        assert (method.flops, method.exps, method.hbm_bytes, method.hbm_intensity) == (0, 0, 0, 0.0)
        assert method.binding.us == 0.0
    assert (result.l2_bytes, result.l2_intensity) == (0, 0.0)


@pytest.mark.parametrize("config", [Config(), Config(block_q=64), Config(block_q=64, block_kv=0)])
def test_a_config_without_blocks_is_refused(config):
    with pytest.raises(InputError, match=r"block_\w+ >= 1 must hold, but got Config\("):
        analyze(Problem(1, 1, 1, 1, 1), Spec(), A100, config)


def test_results_are_values():
    first, second = (analyze(Problem(1, 2, 1, 64, 64), Spec(), A100, BLOCKS) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def by_blocks(rows: list[BudgetRow]) -> dict[tuple[int, int], BudgetRow]:
    return {(row.config["block_q"], row.config["block_kv"]): row for row in rows}


def test_budget_of_a100_by_hand():
    """D = 128 in bf16: Q is 32 KiB at block_q 128, one stage of K and V 64 KiB at block_kv 128, nothing for scores."""
    rows = by_blocks(budget(Spec(), A100))
    assert set(rows) == set(itertools.product(CHOICES["block_q"], CHOICES["block_kv"]))
    widest = rows[128, 128]
    assert (widest.shared_low, widest.shared_high) == (98304, 98304)
    assert widest.shared_share == 98304 / 166912
    assert widest.registers == 128 * (128 + 128) // 256 == 128
    # Below block_q 128 the probabilities may pass through shared memory: 8 KiB at 64 x 64.
    square = rows[64, 64]
    assert (square.shared_low, square.shared_high) == (49152, 57344)
    assert square.shared_share == 57344 / 166912
    assert {blocks for blocks, row in rows.items() if row.refused is None} == set(
        itertools.product((64, 128, 256), (32, 64, 128))
    )
    assert {row.config["num_warps"] for row in rows.values() if row.config["block_q"] < 128} == {4}
    assert {row.config["num_warps"] for row in rows.values() if row.config["block_q"] == 128} == {8}
    assert {row.config["num_stages"] for row in rows.values()} == {2}


def test_budget_matches_compiled_kernels():
    """Bytes that Triton reports for the 128 x 64 tile in three stages at D = 128."""
    assert by_blocks(budget(Spec(), A100, num_stages=3))[128, 64].shared_low == 98304
    assert by_blocks(budget(Spec(), Gpu.named("h100"), num_stages=3))[128, 64].shared_low == 131072


def test_budget_says_why_a_config_is_refused():
    rows = by_blocks(budget(Spec(head_dim=256, head_dim_v=256), A100))
    refused = rows[128, 128].refused
    assert refused is not None
    assert refused.kind == "shared memory"
    assert "196608" in refused.reason
    assert rows[128, 128].shared_share > 1
    assert rows[128, 64].refused is None

    four_warps = by_blocks(budget(Spec(head_dim=256, head_dim_v=256), A100, num_warps=4))[128, 64]
    assert four_warps.registers == 320
    assert four_warps.refused is not None
    assert four_warps.refused.kind == "registers"


def test_tiles_of_256_end_at_the_registers_and_not_at_shared_memory():
    spec = Spec(head_dim=64, head_dim_v=64, dtype="fp16")
    row = BudgetRow.of(TRITON_FWD, spec, Config(block_q=256, block_kv=256, num_warps=8, num_stages=2), A100)
    assert row.shared_share < 1
    assert row.registers == 256 * (256 + 64) // 256 > 255
    assert row.refused is not None
    assert row.refused.kind == "registers"


def test_budget_spreads_registers_over_the_lanes_of_the_gpu():
    a100, mi300x = (by_blocks(budget(Spec(), Gpu.named(name), num_stages=1)) for name in ("a100", "mi300x"))
    assert a100[128, 64].registers == 2 * mi300x[128, 64].registers


@pytest.mark.parametrize("option", [{"num_warps": 3}, {"num_stages": 9}])
def test_budget_refuses_values_outside_the_choices(option):
    with pytest.raises(InputError, match="is not among the choices"):
        budget(Spec(), A100, **option)
