"""What `triton_bwd` says about itself: rules with reasons, and a default for every GPU."""

from __future__ import annotations

import itertools

import pytest
from variants import TRITON_BWD, backward

from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.spec import Causal, DType, Spec

HEAD_DIMS = ((1, 1), (16, 16), (64, 64), (72, 40), (96, 96), (128, 128), (192, 128), (64, 256), (256, 256))
DTYPES: tuple[DType, ...] = ("fp16", "bf16", "fp32")
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right")
SPECS = [
    Spec("backward", *width, dtype, causal) for width, dtype, causal in itertools.product(HEAD_DIMS, DTYPES, CAUSAL)
]
A100, H100, T4 = (Gpu.named(name) for name in ("a100", "h100", "t4"))
GOOD = (64, 64, 4, 2)


@pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=KNOWN_GPUS.keys())
def test_default_obeys_the_rules_or_the_gpu_cannot(gpu: Gpu) -> None:
    for spec in SPECS:
        config = TRITON_BWD.default(spec, gpu)
        assert TRITON_BWD.config(config) == config
        rejection = TRITON_BWD.refuses(spec, config, gpu)
        if (spec.dtype, spec.head_dim, spec.head_dim_v) == ("fp32", 256, 256) and gpu.shared_per_block == 65536:
            # Four fp32 tiles of the least size are all of it: only a compiler may find room.
            assert set(_numbers(config)) == {(16, 16, 4, 1)}
        elif rejection is None:
            assert TRITON_BWD.shared_memory(spec, config, gpu)[1] <= gpu.shared_per_block, spec.slug
        else:
            assert rejection.kind == "capability", (spec.slug, rejection)
            assert gpu.sm < 80 and gpu.arch in rejection.reason


@pytest.mark.parametrize(
    ("kind", "tile", "gpu", "words"),
    [
        ("stages", (64, 64, 4, 1), H100, ["num_stages=1"]),
        ("stages", (64, 64, 4, 3), T4, ["sm_75", "num_stages=3"]),
        ("warps", (64, 64, 8, 2), H100, ["num_warps=8", "64"]),
        ("small tile", (32, 32, 4, 2), H100, ["32", "64"]),
        ("small tile", (64, 16, 4, 2), H100, ["16", "32"]),
        ("registers", (128, 128, 4, 2), H100, ["512", "255"]),
        ("shared memory", (128, 64, 8, 3), Gpu.named("rtx4090"), ["131072", "101376"]),
    ],
)
def test_refusals_name_the_kernel_and_the_numbers(
    kind: str, tile: tuple[int, int, int, int], gpu: Gpu, words: list[str]
) -> None:
    spec = Spec("backward", 128, 128, "fp16")
    block, step, warps, stages = tile
    for kernel in ("dkdv", "dq") if kind != "registers" else ("dkdv",):
        dkdv = (step, block, warps, stages) if kernel == "dkdv" else GOOD
        dq = (block, step, warps, stages) if kernel == "dq" else GOOD
        rejection = TRITON_BWD.refuses(spec, backward(spec, dkdv, dq).config, gpu)
        assert rejection is not None and (rejection.stage, rejection.kind) == ("rule", kind), rejection
        assert rejection.reason.startswith(f"{kernel}_kernel: ")
        assert all(word in rejection.reason for word in words), rejection.reason


def test_shared_memory_is_that_of_the_kernel_that_needs_most() -> None:
    spec = Spec("backward", 128, 128, "bf16")
    large, small = (64, 128, 8, 3), (64, 64, 4, 2)
    both = backward(spec, large, small), backward(spec, small, (128, 64, 8, 3))
    for each in both:
        # As compiled for sm_90: two tiles of 128 that stay, three times two of 64 that stream.
        assert TRITON_BWD.shared_memory(spec, each.config, H100)[0] == 163840


def test_every_spec_has_something_to_tune() -> None:
    for spec in (Spec("backward", 64, 64), Spec("backward", 128, 128), Spec("backward", 256, 256)):
        for gpu in (A100, H100):
            usable = TRITON_BWD.space(spec, gpu).usable
            assert 4 <= len(usable) <= 2000, (spec.slug, gpu.name, len(usable))
            assert TRITON_BWD.default(spec, gpu) in usable


def test_slugs_tell_configs_apart() -> None:
    spec = Spec("backward", 128, 128)
    space = TRITON_BWD.space(spec, A100)
    configs = [*space.usable, *(config for config, _ in space.rejected)]
    slugs = {backward(spec, *_numbers(config)).slug for config in configs}
    assert len(slugs) == len(configs)


def _numbers(config: object) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    assert hasattr(config, "values")
    values = tuple(config.values())
    return values[:4], values[4:]
