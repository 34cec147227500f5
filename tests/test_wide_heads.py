"""Heads of more than 256 columns: what their kernels compute, in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreted import Interpreter, assert_right, interpreter_of
from rendered import assert_formatted_and_clean
from variants import TRITON_BWD, TRITON_FWD, backward, variant

from flashgen.cases import Case
from flashgen.compile import compile_resources
from flashgen.errors import UnsupportedError
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.problem import Problem, next_power_of_2
from flashgen.select import select
from flashgen.spec import MAX_HEAD_DIM, Causal, DType, Op, Spec
from flashgen.tiles import parts_of
from flashgen.workers import Workers

WIDTHS = [(257, 257), (320, 320), (512, 512), (576, 512), (64, 576), (576, 64), (400, 300), (192, 128)]
EVERYTHING: dict[str, Any] = {
    "softcap": True, "alibi": True, "bias": "fp32", "window": True, "mask": True, "segments": True,
}  # fmt: skip
OPS: tuple[Op, ...] = ("forward", "backward")
FEATURES: dict[str, dict[str, Any]] = {
    "softcap, window": {"softcap": True, "window": True},
    "mask": {"mask": True},
    "all": EVERYTHING,
}
EMPTY_ROWS = Case("empty rows", Problem(1, 1, 1, 21, 17))
# One head of keys for many of queries, as in multi-head latent attention; views of poisoned memory.
STRIDED = Case("gqa, strided", Problem(1, 3, 1, 3, 18), strided=True)
LARGE = Case("large logits", Problem(1, 1, 1, 17, 18), magnitude=40.0)
A100, H100, RTX4090, T4 = (Gpu.named(name) for name in ("a100", "h100", "rtx4090", "t4"))

# Taken in turns by the widths.
KINDS: list[tuple[DType, Causal]] = [("bf16", "bottom_right"), ("fp32", "none"), ("fp16", "bottom_right")]

every_width = pytest.mark.parametrize("width", WIDTHS, ids=lambda width: "x".join(map(str, width)))


def _small(spec: Spec) -> Variant:
    if spec.op == "forward":
        return variant(spec, 16, 16, 4, 2)
    return backward(spec, (16, 16, 4, 2), (16, 16, 4, 2))


@pytest.fixture(scope="module")
def forward() -> Iterator[Interpreter]:
    with interpreter_of("forward") as running:
        yield running


@pytest.fixture(scope="module")
def gradients() -> Iterator[Interpreter]:
    with interpreter_of("backward") as running:
        yield running


@every_width
def test_forward(forward: Interpreter, width: tuple[int, int]) -> None:
    spec = Spec("forward", *width, *KINDS[WIDTHS.index(width) % 3])
    launch = forward.launcher(spec, _small(spec).config)
    assert_right(launch, spec, (EMPTY_ROWS, STRIDED, LARGE))


@every_width
def test_backward(gradients: Interpreter, width: tuple[int, int]) -> None:
    spec = Spec("backward", *width, *KINDS[WIDTHS.index(width) % 3])
    launch = gradients.launcher(spec, _small(spec).config)
    assert_right(launch, spec, (EMPTY_ROWS, STRIDED))


@pytest.mark.parametrize(
    ("width", "features"), [((320, 320), "softcap, window"), ((64, 576), "mask"), ((576, 512), "all")], ids=str
)
def test_features(forward: Interpreter, gradients: Interpreter, width: tuple[int, int], features: str) -> None:
    spec = Spec("forward", *width, "fp32", "bottom_right", **FEATURES[features], sinks=features == "all")
    assert_right(forward.launcher(spec, _small(spec).config), spec, (EMPTY_ROWS, STRIDED))
    spec = spec.backward
    assert_right(gradients.launcher(spec, _small(spec).config), spec, (EMPTY_ROWS, STRIDED))


def test_text_is_formatted_and_clean(tmp_path: Path) -> None:
    made = itertools.product(WIDTHS, ({}, *FEATURES.values()))
    texts = [_small(Spec(op, *width, "bf16", "bottom_right", **given)) for width, given in made for op in OPS]
    assert_formatted_and_clean(texts, tmp_path)


def test_parts_hold_every_column_and_few_more() -> None:
    for width in range(1, MAX_HEAD_DIM + 1):
        parts = parts_of(width)
        assert 1 <= len(parts) <= (1 if width <= 256 else 2)
        assert [first for first, _ in parts] == [0, parts[0][1]][: len(parts)]
        assert all(block == next_power_of_2(block) >= 16 for _, block in parts)
        held = sum(block for _, block in parts)
        assert width <= held <= max(16, next_power_of_2(width))
        # The last tile is needed, and none of half its width would do.
        assert parts[-1][0] < width
        assert held == max(16, held) and (parts[-1][1] == 16 or held - parts[-1][1] // 2 < width)
    assert parts_of(576) == ((0, 512), (512, 64))


@pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=KNOWN_GPUS)
def test_default_obeys_the_rules_or_a_reason_says_why(gpu: Gpu) -> None:
    dtypes: tuple[DType, ...] = ("bf16", "fp32")
    features: list[dict[str, Any]] = [{}, EVERYTHING]
    for op, width, dtype, given in itertools.product(OPS, WIDTHS[:-1], dtypes, features):
        spec = Spec(op, *width, dtype, **given)
        family = TRITON_FWD if op == "forward" else TRITON_BWD
        config = family.default(spec, gpu)
        assert family.config(config) == config
        rejection = family.refuses(spec, config, gpu)
        if rejection is not None:
            # Little shared memory: fp32 tiles of the backward are twice as large, and all of them stay.
            assert gpu.sm < 80 or (op == "backward" and dtype == "fp32" and gpu.shared_per_block < 139264)
            with pytest.raises(UnsupportedError, match=gpu.arch):
                select(spec, Problem(1, 16, 1, 1024, 1024), gpu)


@pytest.mark.parametrize("gpu", [A100, H100, RTX4090], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("width", [(576, 512), (320, 320)], ids=str)
def test_there_is_something_to_tune(gpu: Gpu, width: tuple[int, int]) -> None:
    for family in (TRITON_FWD, TRITON_BWD):
        spec = Spec(family.op, *width, "bf16")
        usable = family.space(spec, gpu).usable
        assert 12 <= len(usable) <= 4000
        assert family.default(spec, gpu) in usable


@pytest.mark.parametrize("name", FAMILIES)
def test_hopper_families_refuse_wide_heads(name: str) -> None:
    family = FAMILIES[name]
    for width in WIDTHS[:-1]:
        spec = Spec(family.op, *width)
        config = family.default(spec, H100)
        assert family.tiles(spec, config) and family.shared_memory(spec, config, H100)
        rejection = family.refuses(spec, config, H100)
        if name.startswith("hopper"):
            assert rejection is not None and rejection.kind in ("inputs", "width"), rejection
            assert not family.space(spec, H100).usable
        else:
            assert rejection is None


def test_the_general_kernels_serve_multi_head_latent_attention() -> None:
    for gpu in (A100, H100, RTX4090):
        for op, family in (("forward", TRITON_FWD), ("backward", TRITON_BWD)):
            selection = select(Spec(op, 576, 512), Problem(1, 128, 1, 4096, 4096), gpu)  # type: ignore[arg-type]
            assert selection.variant.family is family and selection.method == "default"


def test_turing_has_no_room() -> None:
    rejection = TRITON_FWD.refuses(Spec(head_dim=257, head_dim_v=64, dtype="fp16"), variant(Spec()).config, T4)
    assert rejection is not None and rejection.kind == "capability"
    assert "sm_75" in rejection.reason and "256" in rejection.reason


# Bytes of stack a thread, and accesses to it in the loop. The forward's are those of Triton 3.9, where 3.6 to 3.8 have
# 176 and 4; those of dK and dV lie around their loops, where one sum gives way to the other.
MOST_SPILLS = {"kernel": (352, 32), "delta_kernel": (0, 0), "dkdv_kernel": (640, 0), "dq_kernel": (64, 0)}
COMPILED = [
    (Spec(op, *width, "bf16", "bottom_right"), gpu)
    for op, width, gpu in itertools.product(("forward", "backward"), [(576, 512), (320, 320)], (A100, H100))
]


@pytest.mark.parametrize(("spec", "gpu"), COMPILED, ids=lambda each: each.name if isinstance(each, Gpu) else each.label)
def test_default_compiles_and_spills_little(spec: Spec, gpu: Gpu, workers: Workers) -> None:
    family = TRITON_FWD if spec.op == "forward" else TRITON_BWD
    which = Variant(family, spec, family.default(spec, gpu))
    outcome = workers.outcome(workers.submit(300, compile_resources, which, gpu))
    assert isinstance(outcome, tuple), outcome
    low, high = family.shared_memory(spec, which.config, gpu)
    assert low <= max(used.shared for used in outcome) <= high <= gpu.shared_per_block
    for kernel, used in zip(family.kernels, outcome, strict=True):
        stack, accesses = MOST_SPILLS[kernel]
        assert used.stack <= stack and used.loop.get("spill", 0) <= accesses, (kernel, used)
