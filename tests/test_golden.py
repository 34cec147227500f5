"""Generated files: their text, kept in golden/, and what they compile to for GPUs that are not here.

`pytest --update-golden` writes the golden files anew; review the diff. Their text depends on no version of Triton.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rendered import FOLDER, assert_formatted_and_clean, assert_golden
from variants import (
    BACKWARD_GOLDEN,
    DECODE_GOLDEN,
    GOLDEN,
    HOPPER_BACKWARD_FUSED_GOLDEN,
    HOPPER_BACKWARD_GOLDEN,
    HOPPER_GOLDEN,
    compiled_hash,
    variant,
)

from flashgen.compile import compile_resources
from flashgen.families import Variant
from flashgen.gate import MAX_STACK
from flashgen.hardware import Gpu
from flashgen.problem import next_power_of_2
from flashgen.render import render
from flashgen.spec import Causal, DType, Spec
from flashgen.workers import Workers

GPUS = (Gpu.named("a100"), Gpu.named("h100"))
# Seconds until a compilation counts as hung.
PATIENCE = 300

every_golden = pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.slug)
every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)

WIDTHS = [(40, 40), (72, 72), (80, 80), (96, 96), (192, 192), (192, 128), (1, 1), (128, 128), (72, 40), (16, 256)]
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DTYPES: tuple[DType, ...] = ("fp16", "bf16", "fp32")
MATRIX = [
    variant(Spec(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, causal=causal))
    for (head_dim, head_dim_v), dtype, causal in itertools.product(WIDTHS, DTYPES, CAUSAL)
]


@every_golden
def test_text_is_the_golden_file(golden: Variant, request: pytest.FixtureRequest) -> None:
    assert_golden(golden, request)


def test_no_golden_file_is_left_over() -> None:
    known = (
        *GOLDEN, *BACKWARD_GOLDEN, *HOPPER_GOLDEN, *HOPPER_BACKWARD_GOLDEN, *HOPPER_BACKWARD_FUSED_GOLDEN,
        *DECODE_GOLDEN,
    )  # fmt: skip
    assert {path.stem for path in FOLDER.glob("*.py")} == {golden.slug for golden in known}


def test_every_text_is_formatted_and_clean(tmp_path: Path) -> None:
    assert_formatted_and_clean((*GOLDEN, *MATRIX), tmp_path)


@pytest.mark.parametrize("each", MATRIX, ids=lambda each: each.spec.slug)
def test_every_width_renders(each: Variant) -> None:
    text = render(each)
    ast.parse(text)
    assert not re.search(r"\{\{|\{%|\{#|[ \t]+$", text, re.MULTILINE)
    spec = each.spec
    # Tiles have the padded widths; masks and shapes told to the reader the true ones.
    assert _numbers(r"tl\.arange\(0, (\d+)\)", text) == {spec.block_d, spec.block_dv}
    assert _numbers(r"\(offs_d < (\d+)\)", text) == ({spec.head_dim} - {spec.block_d})
    assert _numbers(r"\(offs_dv < (\d+)\)", text) == ({spec.head_dim_v} - {spec.block_dv})
    assert all(width == next_power_of_2(width) for width in (spec.block_d, spec.block_dv))


def _numbers(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text)}


def test_variants_of_one_spec_differ_in_the_config_only() -> None:
    spec = Spec(causal="bottom_right")
    one = render(variant(spec, 128, 64, 8, 3)).splitlines()
    other = render(variant(spec, 64, 32, 4, 2, index_bits=64, advance=1)).splitlines()
    different = [line for line, counterpart in zip(one, other, strict=True) if line != counterpart]
    assert [line.split()[0] for line in different] == ["config:", "CONFIG"]


@every_golden
def test_text_stands_alone(golden: Variant) -> None:
    imported = {node.names[0].name for node in ast.walk(ast.parse(render(golden))) if isinstance(node, ast.Import)}
    assert imported == {"triton", "triton.language"}
    assert "import flashgen" not in render(golden)


def test_text_is_the_same_in_every_process() -> None:
    code = """
import hashlib
from variants import GOLDEN
from flashgen.render import render
print(hashlib.sha256("".join(map(render, GOLDEN)).encode()).hexdigest())
"""
    here = hashlib.sha256("".join(map(render, GOLDEN)).encode()).hexdigest()
    path = os.pathsep.join(sys.path)
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == here


@pytest.fixture(scope="module")
def compiled(workers: Workers) -> dict[tuple[str, str], object]:
    """What every golden file compiles to, by slug and architecture."""
    futures = {
        (golden.slug, gpu.arch): workers.submit(PATIENCE, compile_resources, golden, gpu)
        for golden in GOLDEN
        for gpu in GPUS
    }
    return {key: workers.outcome(future) for key, future in futures.items()}


@every_gpu
@every_golden
def test_golden_file_compiles(golden: Variant, gpu: Gpu, compiled: dict[tuple[str, str], object]) -> None:
    assert golden.family.refuses(golden.spec, golden.config, gpu) is None
    outcome = compiled[golden.slug, gpu.arch]
    assert isinstance(outcome, tuple), outcome
    (resources,) = outcome
    low, high = golden.family.shared_memory(golden.spec, golden.config, gpu)
    assert low <= resources.shared <= high
    assert 0 < resources.shared <= gpu.shared_per_block
    # Addresses of bias and mask spill.
    assert golden.spec.mask or resources.stack <= MAX_STACK["forward"]
    assert 0 < resources.registers <= 255
    # One pass of the hot loop takes BLOCK_Q x BLOCK_KV powers of two, spread over the threads; a row each besides.
    tile = golden.config["block_q"] * golden.config["block_kv"] // (32 * golden.config["num_warps"])
    # Soft capping takes one and a division more.
    least = 3 * tile if golden.spec.softcap else tile
    # Where expressions read tensors, one pass may take two blocks.
    assert (
        least <= resources.loop["exp2"] <= (2 if golden.spec.softcap else 2.5 if golden.spec.tensors else 1.5) * least
    )
    products = "fp32" if golden.spec.dtype == "fp32" else "wgmma" if gpu.sm == 90 else "mma"
    assert resources.loop[products] > 0


def test_every_option_reaches_the_compiler(workers: Workers) -> None:
    spec, gpu = Spec(head_dim=64, head_dim_v=64, dtype="fp16"), GPUS[0]
    different = (
        variant(spec, 64, 32, 4, 2),
        variant(spec, 64, 32, 2, 2),
        variant(spec, 64, 32, 4, 3),
        variant(spec, 64, 64, 4, 2),
        variant(spec, 64, 32, 4, 2, index_bits=64),
        variant(spec, 64, 32, 4, 2, advance=1),
    )
    futures = [workers.submit(PATIENCE, compiled_hash, each, gpu) for each in different]
    hashes = [workers.outcome(future) for future in futures]
    assert all(isinstance(each, str) for each in hashes), hashes
    assert len(set(hashes)) == len(different)


@pytest.mark.parametrize(
    ("each", "gpu"),
    [
        (variant(Spec(head_dim=80, head_dim_v=80, dtype="fp16", causal="bottom_right")), GPUS[1]),
        (variant(Spec(head_dim=192, head_dim_v=128, dtype="bf16")), GPUS[0]),
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else value.spec.slug,
)
def test_padded_widths_compile(each: Variant, gpu: Gpu, workers: Workers) -> None:
    outcome = workers.outcome(workers.submit(PATIENCE, compile_resources, each, gpu))
    assert isinstance(outcome, tuple), outcome
    (resources,) = outcome
    low, high = each.family.shared_memory(each.spec, each.config, gpu)
    assert low <= resources.shared <= high
