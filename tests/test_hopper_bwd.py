"""`hopper_bwd`: its rules, and its text compiled for sm_90."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import triton
from rendered import assert_formatted_and_clean, assert_golden
from variants import HOPPER_BACKWARD_GOLDEN, HOPPER_BWD, TRITON_BWD, hopper_backward, hopper_backward_resources

from flashgen.families import Variant
from flashgen.gate import judge
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.render import render
from flashgen.spec import Causal, DType, Spec
from flashgen.workers import Workers

H200 = Gpu.named("h200")
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DTYPES: tuple[DType, ...] = ("fp16", "bf16")
WIDTHS = [(64, 64), (128, 128), (192, 128), (256, 256), (72, 40), (8, 256)]
SPECS = [Spec("backward", *width, dtype, causal) for width, dtype, causal in itertools.product(WIDTHS, DTYPES, CAUSAL)]
NARROW, WIDE = Spec("backward"), Spec("backward", 256, 256)
PATIENCE = 300

every_golden = pytest.mark.parametrize("golden", HOPPER_BACKWARD_GOLDEN, ids=lambda golden: golden.slug)


@every_golden
def test_text_is_the_golden_file(golden: Variant, request: pytest.FixtureRequest) -> None:
    assert_golden(golden, request)


def test_every_text_is_formatted_and_clean(tmp_path: Path) -> None:
    assert_formatted_and_clean([Variant(HOPPER_BWD, spec, HOPPER_BWD.default(spec, H200)) for spec in SPECS], tmp_path)


def test_variants_of_one_spec_differ_in_the_config_only() -> None:
    texts = [render(hopper_backward(NARROW, *numbers)) for numbers in ((64, 2, 2, 128, 2, 2), (64, 3, 1, 64, 3, 1))]
    one, other = ([line for line in text.splitlines() if not _of_config(line)] for text in texts)
    assert texts[0] != texts[1] and one == other


def _of_config(line: str) -> bool:
    return line.startswith(("config: ", "CONFIG = {", '    "DKDV_', '    "DQ_'))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_delta_is_that_of_triton_bwd(spec: Spec) -> None:
    """Which is checked by Triton's interpreter; both templates hold it, as a shared piece would be a new template."""
    ours = render(Variant(HOPPER_BWD, spec, HOPPER_BWD.default(spec, H200)))
    theirs = render(Variant(TRITON_BWD, spec, TRITON_BWD.default(spec, H200)))
    for name in ("load_rows", "statistics_of", "delta_kernel"):
        assert _function(ours, name) == _function(theirs, name)


def _function(text: str, name: str) -> str:
    return text.split(f"@triton.jit\ndef {name}(", 1)[1].split("\n\n\n", 1)[0]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_default_obeys_the_rules(spec: Spec) -> None:
    config = HOPPER_BWD.default(spec, H200)
    assert HOPPER_BWD.config(config) == config
    assert HOPPER_BWD.refuses(spec, config, H200) is None
    assert HOPPER_BWD.shared_memory(spec, config, H200)[1] <= H200.shared_per_block


@pytest.mark.parametrize(
    ("kind", "spec", "numbers", "words"),
    [
        ("inputs", Spec("backward", dtype="fp32"), (64, 2, 2, 64, 2, 2), ["fp32", "fp16 or bf16"]),
        ("inputs", Spec("backward", 36, 36), (64, 2, 2, 64, 2, 2), ["36", "16 bytes"]),
        ("registers", NARROW, (128, 2, 2, 64, 2, 2), ["dkdv_kernel", "256", "208"]),
        ("registers", WIDE, (64, 2, 1, 128, 2, 1), ["dq_kernel", "256", "208"]),
        ("shared memory", WIDE, (64, 2, 2, 64, 2, 1), ["dkdv_kernel", "263168", "232448"]),
        ("shared memory", WIDE, (64, 2, 1, 64, 2, 2), ["dq_kernel", "262144", "232448"]),
    ],
)
def test_refusals_have_reasons(kind: str, spec: Spec, numbers: tuple[int, ...], words: list[str]) -> None:
    rejection = HOPPER_BWD.refuses(spec, hopper_backward(spec, *numbers).config, H200)
    assert rejection is not None and rejection.kind == kind, rejection
    assert all(word in rejection.reason for word in words), rejection.reason


def test_other_architectures_are_refused() -> None:
    for gpu in KNOWN_GPUS.values():
        rejection = HOPPER_BWD.refuses(NARROW, HOPPER_BWD.default(NARROW, gpu), gpu)
        assert (rejection is None) == (gpu.sm == 90), gpu.name
        assert rejection is None or "written for sm_90" in rejection.reason


@pytest.mark.parametrize(
    "which", range(len(HOPPER_BACKWARD_GOLDEN)), ids=lambda which: HOPPER_BACKWARD_GOLDEN[which].slug
)
def test_golden_file_compiles(which: int, workers: Workers) -> None:
    golden = HOPPER_BACKWARD_GOLDEN[which]
    spec, config = golden.spec, golden.config
    assert HOPPER_BWD.refuses(spec, config, H200) is None
    outcome = workers.outcome(workers.submit(PATIENCE, hopper_backward_resources, which, H200))
    rejection = judge(golden, H200, outcome)
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) and spec.dtype == "bf16":
        # The causal ones of these widths; a tuner refuses them there.
        assert rejection is not None and "spilled registers in the loop" in rejection.reason
        return
    assert rejection is None
    delta, dkdv, dq = outcome
    low, high = HOPPER_BWD.shared_memory(spec, config, H200)
    assert low <= max(used.shared for used in outcome) <= high <= H200.shared_per_block
    assert delta.stack == 0
    for used in (dkdv, dq):
        assert used.loop.get("spill", 0) == 0
        assert used.loop.get("permute", 0) <= 2
    wide = spec.block_d + spec.block_dv > 256
    block_q, block_kv = config["dkdv_block_q"], config["dq_block_kv"]
    # Each product has as many instructions as its inner dimension has sixteens.
    of_dkdv = (spec.block_d + spec.block_dv) // 16 + block_q // 16 * (1 if wide else 2)
    assert (dkdv.loop["wgmma"], dkdv.loop["exp2"]) == (of_dkdv, block_q // 2)
    of_dq = (spec.block_d + spec.block_dv + block_kv) // 16
    assert (dq.loop["wgmma"], dq.loop["exp2"]) == (of_dq, block_kv // 2)
