"""`hopper_fwd`: its rules, and its text compiled for sm_90."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from gluon_simulator import load_text
from rendered import assert_formatted_and_clean, assert_golden
from variants import HOPPER_FWD, HOPPER_GOLDEN, hopper, hopper_resources, variant

from flashgen import store
from flashgen.compile import kernel_resources, launches, load_module
from flashgen.export import write
from flashgen.families import Variant
from flashgen.families.hopper_fwd import packed_heads
from flashgen.gate import judge
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.model import predict_us
from flashgen.problem import Problem
from flashgen.render import render
from flashgen.resources import Resources
from flashgen.spec import TORCH_DTYPES, Causal, Descale, DType, Spec
from flashgen.workers import Workers

H200 = Gpu.named("h200")
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DTYPES: tuple[DType, ...] = ("fp16", "bf16")
DESCALES: tuple[Descale, ...] = ("tensor", "head", "block")
WIDTHS = [(64, 64), (128, 128), (192, 128), (256, 256), (72, 40), (8, 256)]
SPECS = [Spec("forward", *width, dtype, causal) for width, dtype, causal in itertools.product(WIDTHS, DTYPES, CAUSAL)]
# V's columns and their product stay in registers beside the output.
FP8_WIDTHS = [(16, 32), (64, 64), (128, 128), (192, 128), (256, 128), (80, 48)]
SPECS += [
    Spec("forward", *width, "fp8", causal, descale=descale)
    for width, causal, descale in itertools.product(FP8_WIDTHS, CAUSAL, DESCALES)
]
PATIENCE = 300
SHIPPED = Path(__file__).parents[1] / "tuned"

every_golden = pytest.mark.parametrize("golden", HOPPER_GOLDEN, ids=lambda golden: golden.slug)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_model_knows_what_was_measured(width: int, workers: Workers) -> None:
    """The winners on an H200, which the constants were read off: a few percent from them, 12 at most."""
    entries = [
        entry
        for entry in store.read(SHIPPED / "h200.yaml", "h200").entries
        if (entry.family, entry.spec.head_dim, entry.spec.dtype) == ("hopper_fwd", width, "bf16")
    ]
    assert len(entries) == 12
    # They share a loop; what else differs is in the config.
    for spec in {entry.spec for entry in entries}:
        typical = Variant(HOPPER_FWD, spec, HOPPER_FWD.default(spec, H200))
        used = workers.outcome(workers.submit(PATIENCE, kernel_resources, typical, H200, "kernel"))
        for entry in (entry for entry in entries if entry.spec == spec):
            if entry.config["consumers"] == typical.config["consumers"]:
                estimate = predict_us(Variant(HOPPER_FWD, spec, entry.config), (used,), entry.problem, H200)
                assert estimate == pytest.approx(entry.time.median_us, rel=0.15), (spec.slug, entry.bucket)


@every_golden
def test_text_is_the_golden_file(golden: Variant, request: pytest.FixtureRequest) -> None:
    assert_golden(golden, request)


def test_every_text_is_formatted_and_clean(tmp_path: Path) -> None:
    assert_formatted_and_clean([Variant(HOPPER_FWD, spec, HOPPER_FWD.default(spec, H200)) for spec in SPECS], tmp_path)


def test_variants_of_one_spec_differ_in_the_config_only() -> None:
    texts = [render(hopper(Spec(), *numbers)) for numbers in ((2, 128, 2, 1, 1, 0, 0), (2, 64, 3, 0, 0, 1, 0))]
    rest = [re.sub(r"^(config: .*|CONFIG = {.*?^})$", "", text, flags=re.MULTILINE | re.DOTALL) for text in texts]
    assert "\nCONFIG = {" in texts[0] and texts[0] != texts[1] and rest[0] == rest[1]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_default_obeys_the_rules(spec: Spec) -> None:
    config = HOPPER_FWD.default(spec, H200)
    assert HOPPER_FWD.refuses(spec, config, H200) is None
    assert HOPPER_FWD.shared_memory(spec, config, H200)[1] <= H200.shared_per_block


@pytest.mark.parametrize(
    ("kind", "spec", "numbers", "words"),
    [
        ("inputs", Spec(dtype="fp32"), (2, 128, 2, 1, 1, 0, 0), ["fp32", "fp16 or bf16"]),
        ("inputs", Spec(head_dim=36, head_dim_v=36), (2, 128, 2, 1, 1, 0, 0), ["36", "16 bytes"]),
        ("combination", Spec(), (2, 128, 2, 0, 1, 0, 0), ["ahead=1", "schedule=1"]),
        ("combination", Spec(head_dim=192, head_dim_v=128), (2, 64, 2, 0, 0, 0, 1), ["reuse_q=1", "128", "256"]),
        ("combination", Spec(), (1, 64, 2, 1, 1, 1, 0, 2), ["ping_pong=1", "another consumer"]),
        ("combination", Spec(), (1, 64, 2, 1, 1, 0, 0, 1), ["resident=1", "one consumer"]),
        ("combination", Spec(), (2, 128, 2, 1, 1, 0, 0, 2), ["resident=2", "one consumer"]),
        ("registers", Spec(), (1, 64, 2, 1, 1, 0, 0, 3), ["112", "96"]),
        ("shared memory", Spec(), (1, 128, 2, 1, 0, 0, 0, 2), ["331776", "233472"]),
        ("registers", Spec(head_dim=256, head_dim_v=256), (2, 128, 2, 1, 0, 0, 1), ["224", "176"]),
        ("shared memory", Spec(), (2, 128, 3, 1, 1, 0, 0), ["294912", "232448"]),
        ("inputs", Spec(head_dim=32, head_dim_v=16, dtype="fp8"), (2, 128, 2, 1, 0, 0, 0), ["16", "32 columns"]),
        ("combination", Spec(dtype="fp8"), (1, 64, 2, 1, 0, 0, 0, 2), ["consumers=1", "turn around"]),
        ("combination", Spec(dtype="fp8"), (2, 128, 2, 1, 0, 0, 1), ["reuse_q=1", "bf16"]),
        ("registers", Spec(dtype="fp8", head_dim_v=160), (2, 64, 2, 1, 0, 0, 0), ["296", "208"]),
        ("registers", Spec(dtype="fp8"), (3, 64, 2, 1, 0, 0, 0), ["168", "144"]),
        ("shared memory", Spec(dtype="fp8", head_dim=256), (2, 128, 3, 1, 0, 0, 0), ["245760", "232448"]),
        ("dominated", Spec(), (2, 64, 3, 1, 0, 0, 0), ["block_kv=64", "128"]),
        ("dominated", Spec(), (2, 128, 2, 1, 0, 0, 1), ["reuse_q=1"]),
    ],
)
def test_refusals_have_reasons(kind: str, spec: Spec, numbers: tuple[int, ...], words: list[str]) -> None:
    resident = numbers[7] if len(numbers) > 7 else 1
    rejection = HOPPER_FWD.refuses(spec, hopper(spec, *numbers[:7], resident=resident).config, H200)
    assert rejection is not None and rejection.kind == kind, rejection
    assert all(word in rejection.reason for word in words), rejection.reason


def test_other_architectures_are_refused() -> None:
    spec = Spec()
    for gpu in KNOWN_GPUS.values():
        rejection = HOPPER_FWD.refuses(spec, HOPPER_FWD.default(spec, gpu), gpu)
        assert (rejection is None) == (gpu.sm == 90), gpu.name
        assert rejection is None or "written for sm_90" in rejection.reason


# Three heads fit no tile of 64 rows evenly.
@pytest.mark.parametrize(("group", "packed"), [(1, 1), (2, 2), (3, 1), (4, 4), (64, 64), (128, 1)])
def test_heads_share_tiles_where_their_number_fits(group: int, packed: int) -> None:
    q, k = torch.empty(2, 3 * group, 100, 128, device="meta"), torch.empty(2, 3, 500, 128, device="meta")
    problem = Problem(2, 3 * group, 3, 100, 500)
    for numbers, resident in (((1, 64, 2, 0, 0, 0, 0), 2), ((2, 128, 2, 0, 0, 1, 0), 1)):
        variant = hopper(Spec(), *numbers, resident=resident, pack=1)
        (each,) = launches(variant, q, k, k, q)
        assert each.options["PACKED"] == packed_heads(variant.config, problem) == packed
        assert each.options.get("maxnreg") == (128 if resident == 2 else None)
        assert each.grid[0] == 2 * 3 * (group // packed) * -(-100 // (64 * numbers[0] // packed))
        (unpacked,) = launches(hopper(Spec(), *numbers, resident=resident), q, k, k, q)
        assert unpacked.options["PACKED"] == 1 and each.grid[0] <= unpacked.grid[0]


@pytest.mark.parametrize(("consumers", "resident", "schedule"), [(2, 1, 2), (1, 2, 1), (1, 3, 2), (1, 2, 0)])
def test_blocks_stay_as_many_as_a_multiprocessor_holds(consumers: int, resident: int, schedule: int) -> None:
    variant = hopper(Spec(head_dim=64, head_dim_v=64), consumers, 64, 2, schedule, 0, 0, 0, resident=resident)
    q = SimpleNamespace(shape=(8, 16, 2048, 64), is_cuda=True, device=0)
    (programs, _, _), _, _ = load_text(render(variant), 132).plan(q, q, q, q)
    assert programs == (132 * resident if schedule else 8 * 16 * 2048 // (64 * consumers))


def test_not_packing_is_pointless_without_groups() -> None:
    problems = [Problem(1, 16, 16, 512, 512), Problem(1, 24, 8, 512, 512)]
    some = HOPPER_FWD.worth_trying(problems).space(Spec(), H200)
    assert 2 * len(some.usable) == len(HOPPER_FWD.space(Spec(), H200).usable)
    assert all(config["pack"] for config in some.usable) and HOPPER_FWD.default(Spec(), H200) in some.usable
    assert any(refused.kind == "pointless" and "pack=0" in refused.reason for _, refused in some.rejected)
    grouped = HOPPER_FWD.worth_trying([*problems, Problem(1, 32, 8, 512, 512)])
    assert grouped.space(Spec(), H200) == HOPPER_FWD.space(Spec(), H200)


@pytest.mark.parametrize("which", range(len(HOPPER_GOLDEN)), ids=lambda which: HOPPER_GOLDEN[which].slug)
def test_golden_file_compiles(which: int, workers: Workers) -> None:
    golden = HOPPER_GOLDEN[which]
    assert HOPPER_FWD.refuses(golden.spec, golden.config, H200) is None
    used = workers.outcome(workers.submit(PATIENCE, hopper_resources, which, H200))
    low, high = HOPPER_FWD.shared_memory(golden.spec, golden.config, H200)
    assert low <= used.shared <= high <= H200.shared_per_block
    resident, threads = golden.config["resident"], 128 * (golden.config["consumers"] + 1)
    assert resident * (used.shared + 1024) <= H200.shared_per_sm
    assert resident * used.registers * threads <= H200.registers_per_sm
    # Between tiles some values wait in memory: of three consumers, which have 160 registers; 24 bytes with Triton 3.9,
    # of fp8 with each, and 8 more with both.
    newest = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
    fp8 = golden.spec.dtype == "fp8"
    assert used.stack <= (128 if golden.config["consumers"] == 3 else 24 * (newest or fp8) + 8 * (newest and fp8))
    # What was measured to lose: spills, products that ptxas serialises, P that LLVM carries as single values.
    loop = used.loop
    assert loop["wgmma"] == (golden.spec.block_d + golden.config["block_kv"]) // (32 if fp8 else 16)
    scores = 64 * golden.config["block_kv"] // 128
    assert loop["exp2"] == scores + 2 and loop.get("spill", 0) == loop.get("permute", 0) == 0
    assert loop["warpgroup"] <= 5


EXPORTED = [golden for golden in HOPPER_GOLDEN if golden.spec.dtype != "fp8"]


@pytest.mark.parametrize("golden", EXPORTED, ids=lambda golden: golden.slug)
def test_an_exported_file_copies_what_tma_does_not_take(golden: Variant, tmp_path: Path) -> None:
    path = tmp_path / "my_attention.py"
    write(golden, path)
    command = [sys.executable, "-m", "ruff", "format", "--check", "--isolated", "--line-length", "120", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = load_module(path)
    width, dtype = golden.spec.head_dim, TORCH_DTYPES[golden.spec.dtype]
    good = torch.randn(2, 3, 40, width).to(dtype)
    taken: list[torch.Tensor] = []
    written.launch = lambda q, k, v, o, lse, scale: taken.extend((q, k, v))
    bad = {
        "rows of odd lengths apart": torch.randn(2, 3, 40, width + 1).to(dtype)[..., :width],
        "off a boundary": torch.randn(2 * 3 * 40 * width + 1).to(dtype)[1:].view(2, 3, 40, width),
        "expanded": good[:, :1].expand(2, 3, 40, width),
        "transposed": torch.randn(2, 3, width, 40).to(dtype).transpose(2, 3),
    }
    assert written.suits_tma(good) and written.suits_tma(good[:, :, 3:])
    for why, tensor in bad.items():
        assert not written.suits_tma(tensor), why
        v = torch.randn(2, 3, 40, golden.spec.head_dim_v).to(dtype)
        with patch.object(torch.cuda, "device", lambda _: nullcontext()):
            written.attention(tensor, good, v)
        assert taken[0] is not tensor and torch.equal(taken[0], tensor) and written.suits_tma(taken[0]), why
        assert taken[1] is good and taken[2] is v
        taken.clear()


def test_loops_that_the_compiler_undid_are_refused() -> None:
    """What predicted losses; a family whose loops the compiler orders may have all of it."""
    good = {"wgmma": 16, "convert": 32, "warpgroup": 4}
    golden, portable = HOPPER_GOLDEN[0], variant(Spec(dtype="bf16"), 128, 64, 8, 3)
    assert judge(golden, H200, (Resources(1024, 168, 0, good),)) is None
    for change, words in (
        ({"spill": 1}, "1 accesses to spilled registers"),
        ({"warpgroup": 6}, "6 WARPGROUP instructions"),
        ({"permute": 33}, "33 PRMT instructions"),
    ):
        used = Resources(1024, 168, 0, {**good, **change})
        refused = judge(golden, H200, (used,))
        assert refused is not None and (refused.stage, refused.kind) == ("resources", "undone by the compiler")
        assert words in refused.reason
        assert judge(portable, H200, (used,)) is None
