"""What the families say about themselves: rules with reasons, shared memory, and a default for every GPU."""

from __future__ import annotations

import inspect
import itertools
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from variants import TRITON_FWD, variant

from flashgen.combinations import VALUES
from flashgen.compile import compile_resources
from flashgen.errors import InputError, UnknownNameError
from flashgen.families import FAMILIES, Family, Variant, families_of, family_named
from flashgen.features import FEATURES
from flashgen.gate import judge
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.paths import data_dir
from flashgen.spec import Causal, DType, Spec
from flashgen.workers import Workers

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
every_gpu = pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=KNOWN_GPUS.keys())

HEAD_DIMS = (1, 16, 64, 72, 96, 128, 192, 256)
DTYPES: tuple[DType, ...] = ("fp16", "bf16", "fp32")
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
SPECS = [
    Spec(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, causal=causal)
    for (head_dim, head_dim_v), dtype, causal in itertools.product(
        [*zip(HEAD_DIMS, HEAD_DIMS, strict=True), (192, 128), (64, 256)], DTYPES, CAUSAL
    )
]
A100, H100, T4, RTX4090 = (Gpu.named(name) for name in ("a100", "h100", "t4", "rtx4090"))


def _refusal(which: Variant, gpu: Gpu) -> tuple[str, str]:
    rejection = which.family.refuses(which.spec, which.config, gpu)
    assert rejection is not None
    assert rejection.stage == "rule"
    return rejection.kind, rejection.reason


@every_family
def test_one_kernel_one_stem(family: Family) -> None:
    assert FAMILIES[family.name] is family_named(family.name) is family
    assert (data_dir("templates") / f"{family.name}.py.jinja").is_file()
    assert Path(inspect.getfile(family.default)).stem == family.name


def test_unknown_families_are_named() -> None:
    with pytest.raises(UnknownNameError, match=r"'triton_fw'.*Did you mean 'triton_fwd'") as error:
        family_named("triton_fw")
    assert isinstance(error.value, KeyError)


@every_family
def test_a_variant_travels_to_other_processes(family: Family) -> None:
    which = Variant(family, Spec(), family.default(Spec(), A100))
    assert pickle.loads(pickle.dumps(which)) == which
    assert pickle.loads(pickle.dumps(which)).family is family


@every_family
def test_slugs_tell_configs_apart(family: Family) -> None:
    space = family.space(Spec(), H100)
    configs = [*space.usable, *(config for config, _ in space.rejected)]
    slugs = {Variant(family, Spec(), config).slug for config in configs}
    assert len(slugs) == len(configs)


def test_slug() -> None:
    which = variant(Spec(causal="bottom_right"), 128, 64, 8, 3, index_bits=64, advance=1)
    assert which.slug == "triton_fwd_d128_bf16_causal_q128_kv64_w8_s3_i64_a1"


@every_gpu
@pytest.mark.parametrize("family", families_of("forward"), ids=lambda family: family.name)
def test_default_obeys_the_rules_or_the_gpu_cannot(family: Family, gpu: Gpu) -> None:
    for spec in SPECS:
        config = family.default(spec, gpu)
        assert family.config(config) == config
        space = family.space(spec, gpu)
        rejection = family.refuses(spec, config, gpu)
        if rejection is None:
            assert config in space.usable
            assert family.shared_memory(spec, config, gpu)[1] <= gpu.shared_per_block, spec.slug
        else:
            # No other config would do either: it is the GPU, or the family, that cannot.
            assert {rejected.kind for _, rejected in space.rejected} == {rejection.kind}, spec.slug
            assert not space.usable
            assert gpu.arch in rejection.reason if rejection.kind == "capability" else rejection.kind == "inputs"


@every_family
def test_which_gpus_compute_fp16(family: Family) -> None:
    serves = {gpu.name for gpu in KNOWN_GPUS.values() if family.space(Spec(dtype="fp16"), gpu).usable}
    assert serves == ({"h100", "h100-pcie", "h200"} if family.by_hand else KNOWN_GPUS.keys() - {"v100"})


@every_family
def test_shared_memory_bounds_are_ordered_and_grow(family: Family) -> None:
    for spec, gpu in itertools.product((Spec(), Spec(head_dim=64, head_dim_v=40, dtype="fp32")), (T4, A100, H100)):
        for values in itertools.product(*family.choices.values()):
            config = family.config(dict(zip(family.choices, values, strict=True)))
            low, high = family.shared_memory(spec, config, gpu)
            assert 0 <= low <= high


@pytest.mark.parametrize("name", ["t4", "v100"])
def test_old_gpus_have_no_bf16(name: str) -> None:
    kind, reason = _refusal(variant(Spec(dtype="bf16"), num_stages=1), Gpu.named(name))
    assert kind == "capability"
    assert Gpu.named(name).arch in reason


def test_volta_is_refused_whatever_the_dtype() -> None:
    for dtype in DTYPES:
        kind, reason = _refusal(variant(Spec(dtype=dtype)), Gpu.named("v100"))
        assert kind == "capability"
        assert "sm_70" in reason and "sm_75" in reason


@pytest.mark.parametrize("num_stages", [3, 4])
def test_turing_cannot_pipeline(num_stages: int) -> None:
    spec = Spec(head_dim=64, head_dim_v=64, dtype="fp16")
    kind, reason = _refusal(variant(spec, num_stages=num_stages), T4)
    assert kind == "stages"
    assert f"num_stages={num_stages}" in reason and "sm_75" in reason
    assert TRITON_FWD.refuses(spec, variant(spec, 64, 32, 4, num_stages).config, A100) is None


def test_a_tile_of_131072_bytes_needs_more_than_an_rtx4090() -> None:
    big = variant(Spec(dtype="fp16"), 128, 64, 8, 4)
    assert TRITON_FWD.shared_memory(big.spec, big.config, RTX4090) == (131072, 131072)
    kind, reason = _refusal(big, RTX4090)
    assert kind == "shared memory"
    assert "131072" in reason and "101376" in reason
    assert TRITON_FWD.refuses(big.spec, big.config, A100) is None


# What the compiler allocates, bytes: arch, head_dim, tile, warps, stages.
COMPILED = [
    ("a100", 64, (64, 64), 4, 2, 24576),
    ("a100", 64, (128, 64), 8, 3, 49152),
    ("a100", 64, (128, 128), 8, 4, 114688),
    ("a100", 128, (64, 64), 4, 2, 57344),
    ("a100", 128, (128, 64), 8, 3, 98304),
    ("a100", 128, (128, 128), 8, 4, 229376),
    ("h100", 64, (64, 64), 4, 2, 40960),
    ("h100", 64, (128, 64), 8, 3, 65536),
    ("h100", 128, (64, 64), 4, 3, 114688),
    ("h100", 128, (128, 64), 8, 3, 131072),
    ("h100", 128, (128, 128), 8, 2, 163840),
    ("h100", 128, (128, 128), 8, 4, 294912),
]


@pytest.mark.parametrize(("gpu", "head_dim", "tile", "num_warps", "num_stages", "shared"), COMPILED)
def test_shared_memory_of_compiled_kernels(
    gpu: str, head_dim: int, tile: tuple[int, int], num_warps: int, num_stages: int, shared: int
) -> None:
    which = variant(Spec(head_dim=head_dim, head_dim_v=head_dim, dtype="fp16"), *tile, num_warps, num_stages)
    low, high = TRITON_FWD.shared_memory(which.spec, which.config, Gpu.named(gpu))
    assert low <= shared <= high
    # P may change its layout on the way through shared memory, with fewer than 128 rows to a tile.
    assert high - low <= tile[0] * tile[1] * 2


@pytest.mark.parametrize(("gpu", "limit"), [("a100", 166912), ("h100", 232448)])
def test_tiles_beyond_the_limit_are_refused(gpu: str, limit: int) -> None:
    kind, reason = _refusal(variant(Spec(dtype="fp16"), 128, 128, 8, 4), Gpu.named(gpu))
    assert kind == "shared memory"
    assert str(limit) in reason


def test_accumulators_must_fit_into_registers() -> None:
    kind, reason = _refusal(variant(Spec(), 128, 128, 2, 2), A100)
    assert kind == "registers"
    assert "512" in reason


def test_configs_from_outside_are_checked() -> None:
    with pytest.raises(InputError, match="block_q=48"):
        TRITON_FWD.config({**variant(Spec()).config, "block_q": 48})


ONE_GPU_PER_ARCH = {gpu.arch: gpu for gpu in KNOWN_GPUS.values() if gpu.sm != 70}


@pytest.mark.parametrize("arch", ONE_GPU_PER_ARCH)
@every_family
def test_default_compiles_and_is_worth_running(family: Family, arch: str, workers: Workers) -> None:
    gpu = ONE_GPU_PER_ARCH[arch]
    specs = (Spec(family.op, dtype="fp16", causal="bottom_right"), Spec(family.op, 64, 64, "fp32"))
    which = [Variant(family, spec, family.default(spec, gpu)) for spec in specs]
    which = [each for each in which if family.refuses(each.spec, each.config, gpu) is None]
    assert which or gpu.sm != 90
    assert len(which) == 2 or family.by_hand
    futures = [workers.submit(300, compile_resources, each, gpu) for each in which]
    for each, future in zip(which, futures, strict=True):
        outcome = workers.outcome(future)
        assert judge(each, gpu, outcome) is None, (each.slug, outcome)
        low, high = family.shared_memory(each.spec, each.config, gpu)
        assert low <= max(used.shared for used in outcome) <= high, each.slug


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("hopper")])
def test_hopper_families_refuse_what_they_do_not_compute(name: str) -> None:
    family = FAMILIES[name]
    plain = Spec(family.op)
    config = family.default(plain, H100)
    assert family.refuses(plain, config, H100) is None
    general = "triton_fwd" if family.op == "forward" else "triton_bwd"
    for feature in FEATURES:
        if (family.op, feature) != ("backward", "sinks"):
            spec = replace(plain, **{feature: VALUES.get(feature, True)})
            assert _refusal(Variant(family, spec, config), H100) == (
                "features",
                f"computes no {feature}: {general} does",
            )
            assert not family.space(spec, H100).usable
    both = Variant(family, replace(plain, softcap=True, window=True), config)
    assert _refusal(both, H100)[1] == f"computes no softcap, window: {general} does"


@pytest.mark.parametrize("feature", FEATURES)
def test_triton_families_take_every_feature(feature: str) -> None:
    for op, name in (("forward", "triton_fwd"), ("backward", "triton_bwd")):
        if (op, feature) != ("backward", "sinks"):
            family, spec = FAMILIES[name], replace(Spec(op), **{feature: VALUES.get(feature, True)})
            for gpu in (A100, H100, RTX4090):
                config = family.default(spec, gpu)
                assert family.refuses(spec, config, gpu) is None
                assert family.shared_memory(spec, config, gpu)[1] <= gpu.shared_per_block
