"""Generated backward files: their text, kept in golden/, and what their kernels compile to for GPUs that are not here.

`pytest --update-golden` writes the golden files anew; review the diff.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest
from rendered import assert_formatted_and_clean, assert_golden
from variants import BACKWARD_GOLDEN, backward

from flashgen.compile import compile_resources
from flashgen.families import Variant
from flashgen.gate import judge
from flashgen.hardware import Gpu
from flashgen.render import render
from flashgen.spec import Causal, DType, Spec
from flashgen.workers import Workers

GPUS = (Gpu.named("a100"), Gpu.named("h100"))
# Seconds until a compilation counts as hung.
PATIENCE = 300

every_golden = pytest.mark.parametrize("golden", BACKWARD_GOLDEN, ids=lambda golden: golden.slug)

WIDTHS = [(40, 40), (72, 72), (96, 96), (192, 128), (1, 1), (128, 128), (72, 40), (16, 256)]
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DTYPES: tuple[DType, ...] = ("fp16", "bf16", "fp32")
MATRIX = [
    backward(Spec("backward", *width, dtype, causal), (64, 128, 8, 2), (128, 64, 8, 2))
    for width, dtype, causal in itertools.product(WIDTHS, DTYPES, CAUSAL)
]


@every_golden
def test_text_is_the_golden_file(golden: Variant, request: pytest.FixtureRequest) -> None:
    assert_golden(golden, request)


def test_every_text_is_formatted_and_clean(tmp_path: Path) -> None:
    assert_formatted_and_clean((*BACKWARD_GOLDEN, *MATRIX), tmp_path)


@pytest.mark.parametrize("each", MATRIX, ids=lambda each: each.spec.slug)
def test_every_width_renders(each: Variant) -> None:
    text = render(each)
    assert not re.search(r"\{\{|\{%|\{#|[ \t]+$", text, re.MULTILINE)
    spec = each.spec
    # Tiles have the padded widths, loads and stores the true ones.
    assert _numbers(r"tl\.arange\(0, (\d+)\)", text) == {spec.block_d, spec.block_dv}
    assert _numbers(r"load_rows\(.*, inside, (\d+), ", text) == {spec.head_dim, spec.head_dim_v}
    assert _numbers(r"store_rows\(.*, (\d+)\)", text) == {spec.head_dim, spec.head_dim_v}


def _numbers(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text)}


def test_variants_of_one_spec_differ_in_the_config_only() -> None:
    spec = Spec("backward", causal="bottom_right")
    one = render(backward(spec, (64, 128, 8, 2), (128, 64, 8, 2)))
    other = render(backward(spec, (32, 64, 4, 3), (64, 32, 4, 1)))
    assert one != other
    assert _without_config(one) == _without_config(other)


def _without_config(text: str) -> str:
    header, rest = text.split("config: ", 1)
    before, after = rest.split("CONFIG = {", 1)
    return header + before.split("\nDo not edit", 1)[1] + after.split("}", 1)[1]


@every_golden
def test_text_stands_alone(golden: Variant) -> None:
    imported = {node.names[0].name for node in ast.walk(ast.parse(render(golden))) if isinstance(node, ast.Import)}
    assert imported == {"triton", "triton.language"}
    assert "import flashgen" not in render(golden)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
@every_golden
def test_golden_file_compiles(golden: Variant, gpu: Gpu, workers: Workers) -> None:
    assert golden.family.refuses(golden.spec, golden.config, gpu) is None
    outcome = workers.outcome(workers.submit(PATIENCE, compile_resources, golden, gpu))
    assert judge(golden, gpu, outcome) is None
    compiled = dict(zip(golden.family.kernels, outcome, strict=True))
    low, high = golden.family.shared_memory(golden.spec, golden.config, gpu)
    assert low <= max(resources.shared for resources in compiled.values()) <= high <= gpu.shared_per_block
    for name, resources in compiled.items():
        # Addresses may spill before and after the hot loop, where they are needed once; those of wide heads a few times
        # inside, 7 on Triton 3.9, those of bias and mask more often.
        most = 128 if golden.spec.mask else 8 if golden.spec.head_dim == 256 else 0
        assert resources.loop.get("spill", 0) <= most, name
        assert 0 < resources.registers <= 255, name
    products = "wgmma" if gpu.sm == 90 else "mma"
    for kernel in ("dkdv", "dq"):
        loop = compiled[f"{kernel}_kernel"].loop
        block_q, block_kv, warps = (golden.config[f"{kernel}_{key}"] for key in ("block_q", "block_kv", "num_warps"))
        # One pass of the hot loop takes block_q x block_kv powers of two, spread over the threads; soft capping
        # one and a division more.
        assert loop["exp2"] == (3 if golden.spec.softcap else 1) * block_q * block_kv // (32 * warps)
        assert loop[products] > 0
