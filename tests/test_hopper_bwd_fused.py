"""`hopper_bwd_fused`: its rules, and its text compiled for sm_90."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from rendered import assert_formatted_and_clean, assert_golden
from variants import (
    HOPPER_BACKWARD_FUSED_GOLDEN,
    HOPPER_BWD_FUSED,
    hopper_backward_fused,
    hopper_backward_fused_resources,
)

from flashgen.families import Variant
from flashgen.gate import judge
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.render import render
from flashgen.spec import Causal, DType, Spec
from flashgen.workers import Workers

H200 = Gpu.named("h200")
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DTYPES: tuple[DType, ...] = ("fp16", "bf16")
WIDTHS = [(64, 64), (128, 128), (128, 64), (72, 40), (8, 128)]
SPECS = [Spec("backward", *width, dtype, causal) for width, dtype, causal in itertools.product(WIDTHS, DTYPES, CAUSAL)]
PATIENCE = 300

every_golden = pytest.mark.parametrize("golden", HOPPER_BACKWARD_FUSED_GOLDEN, ids=lambda golden: golden.slug)


@every_golden
def test_text_is_the_golden_file(golden: Variant, request: pytest.FixtureRequest) -> None:
    assert_golden(golden, request)


def test_every_text_is_formatted_and_clean(tmp_path: Path) -> None:
    assert_formatted_and_clean(
        [Variant(HOPPER_BWD_FUSED, spec, HOPPER_BWD_FUSED.default(spec, H200)) for spec in SPECS], tmp_path
    )


def test_variants_of_one_spec_differ_in_the_config_only() -> None:
    texts = [
        render(hopper_backward_fused(Spec("backward"), *numbers)) for numbers in ((0, 1, 1, 0, 1), (1, 0, 0, 1, 0))
    ]
    one, other = (
        [line for line in text.splitlines() if not line.startswith(("config: ", "CONFIG = {"))] for text in texts
    )
    assert texts[0] != texts[1] and one == other


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_default_obeys_the_rules(spec: Spec) -> None:
    config = HOPPER_BWD_FUSED.default(spec, H200)
    assert HOPPER_BWD_FUSED.config(config) == config
    assert HOPPER_BWD_FUSED.refuses(spec, config, H200) is None
    assert HOPPER_BWD_FUSED.shared_memory(spec, config, H200)[1] <= H200.shared_per_block


@pytest.mark.parametrize(("causal", "count"), [("none", 24), ("bottom_right", 12), ("top_left", 12)])
def test_the_space_is_small(causal: Causal, count: int) -> None:
    assert len(HOPPER_BWD_FUSED.space(Spec("backward", causal=causal), H200).usable) == count


@pytest.mark.parametrize(
    ("kind", "spec", "numbers", "words"),
    [
        ("inputs", Spec("backward", dtype="fp32"), (0, 1, 1, 0, 0), ["fp32", "fp16 or bf16"]),
        ("inputs", Spec("backward", 36, 36), (0, 1, 1, 0, 0), ["36", "16 bytes"]),
        ("width", Spec("backward", 192, 128), (0, 1, 1, 0, 0), ["192", "128"]),
        ("width", Spec("backward", 64, 256), (0, 1, 1, 0, 0), ["256", "128"]),
        ("combination", Spec("backward", causal="top_left"), (0, 1, 1, 0, 1), ["rotate=1", "causal"]),
        ("dominated", Spec("backward"), (0, 0, 1, 0, 0), ["values_first=0", "ahead=0"]),
    ],
)
def test_refusals_have_reasons(kind: str, spec: Spec, numbers: tuple[int, ...], words: list[str]) -> None:
    rejection = HOPPER_BWD_FUSED.refuses(spec, hopper_backward_fused(spec, *numbers).config, H200)
    assert rejection is not None and rejection.kind == kind, rejection
    assert all(word in rejection.reason for word in words), rejection.reason


def test_other_architectures_are_refused() -> None:
    for gpu in KNOWN_GPUS.values():
        spec = Spec("backward")
        rejection = HOPPER_BWD_FUSED.refuses(spec, HOPPER_BWD_FUSED.default(spec, gpu), gpu)
        assert (rejection is None) == (gpu.sm == 90), gpu.name
        assert rejection is None or "written for sm_90" in rejection.reason


@pytest.mark.parametrize(
    "which", range(len(HOPPER_BACKWARD_FUSED_GOLDEN)), ids=lambda which: HOPPER_BACKWARD_FUSED_GOLDEN[which].slug
)
def test_golden_file_compiles(which: int, workers: Workers) -> None:
    golden = HOPPER_BACKWARD_FUSED_GOLDEN[which]
    spec, config = golden.spec, golden.config
    assert HOPPER_BWD_FUSED.refuses(spec, config, H200) is None
    outcome = workers.outcome(workers.submit(PATIENCE, hopper_backward_fused_resources, which, H200))
    assert judge(golden, H200, outcome) is None
    delta, gradients, convert = outcome
    low, high = HOPPER_BWD_FUSED.shared_memory(spec, config, H200)
    assert low <= gradients.shared <= high <= H200.shared_per_block
    assert delta.stack == convert.stack == 0
    (tile,) = HOPPER_BWD_FUSED.tiles(spec, config)
    d, dv = (tile.width - 2 * spec.block_dv) // 3, spec.block_dv
    # S, dP, dV, dK and a half of dQ: each has as many instructions as its inner dimension has sixteens.
    assert gradients.loop["wgmma"] == (d + dv + 2 * tile.step + tile.block) // 16
    assert gradients.loop["exp2"] == tile.step // 2
