"""Conformance of every forward family on a real GPU: numbers against float64 under the one tolerance rule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flashgen.cases import Case
from flashgen.check import Accuracy, check, max_error
from flashgen.compile import compile_resources
from flashgen.families import FAMILIES, Family, Variant
from flashgen.hardware import current_gpu
from flashgen.launch import launcher
from flashgen.problem import Problem
from flashgen.spec import Spec

FORWARD = [family for family in FAMILIES.values() if family.op == "forward"]
WIDTHS = [(64, 64), (128, 128), (96, 96), (256, 256), (72, 72), (40, 72), (192, 128), (1, 5), (16, 16), (160, 160)]
WIDE = [(257, 257), (320, 320), (512, 512), (576, 512), (64, 576), (576, 64), (400, 300)]
CAUSAL = ["none", "bottom_right", "top_left"]


def default_variant(family: Family, spec: Spec) -> Variant:
    gpu = current_gpu()
    config = family.default(spec, gpu)
    rejection = family.refuses(spec, config, gpu)
    if rejection is not None:
        pytest.skip(f"{family.name} refuses {spec.slug}: {rejection.reason}")
    return Variant(family, spec, config)


def assert_accurate(variant: Variant, cases: tuple[Case, ...] | None = None) -> None:
    result = check(launcher(variant), variant.spec, "cuda", *(() if cases is None else (cases,)))
    assert isinstance(result, Accuracy), result


@pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("dtype", "widths", "causal"),
    [
        (dtype, widths, causal)
        for dtype, widths, causal in itertools.product(["bf16", "fp16", "fp32"], WIDTHS, CAUSAL)
        # Every width and mask in bf16; the other dtypes share their kernels' structure.
        if dtype == "bf16"
        or widths in [(64, 64), (72, 72), (40, 72), (1, 5)]
        or (dtype == "fp16" and causal != "top_left")
    ],
    ids=str,
)
def test_every_spec_agrees_with_float64(family: Family, dtype: str, widths: tuple[int, int], causal: str) -> None:
    spec = Spec(head_dim=widths[0], head_dim_v=widths[1], dtype=dtype, causal=causal)  # type: ignore[arg-type]
    assert_accurate(default_variant(family, spec))


@pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("dtype", "widths", "causal"),
    [
        *itertools.product(["bf16"], WIDE, CAUSAL),
        *itertools.product(["fp16"], [(576, 512), (320, 320)], ["bottom_right"]),
        *itertools.product(["fp32"], [(576, 512), (320, 320)], ["bottom_right"]),
    ],
    ids=str,
)
def test_wide_heads_agree_with_float64(family: Family, dtype: str, widths: tuple[int, int], causal: str) -> None:
    spec = Spec(head_dim=widths[0], head_dim_v=widths[1], dtype=dtype, causal=causal)  # type: ignore[arg-type]
    assert_accurate(default_variant(family, spec))


@pytest.mark.parametrize("causal", CAUSAL)
def test_multi_head_latent_attention(causal: str) -> None:
    """Many query heads on one head of keys, as DeepSeek-V2's absorbed form has them; few rows and many."""
    spec = Spec(head_dim=576, head_dim_v=512, causal=causal)  # type: ignore[arg-type]
    sizes = [(1, 1000), (1000, 1000), (130, 1025)]
    cases = tuple(Case(f"{rows} rows", Problem(1, 16, 1, rows, keys), strided=rows == 130) for rows, keys in sizes)
    assert_accurate(default_variant(FAMILIES["triton_fwd"], spec), cases)
    few = (Case("128 heads", Problem(2, 128, 1, 2, 1000)),)
    assert_accurate(default_variant(FAMILIES["triton_fwd"], spec), few)


@pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
def test_tf32_is_used_only_when_asked_for(family: Family) -> None:
    spec = Spec(head_dim=64, head_dim_v=64, dtype="fp32", precision="tf32")
    assert_accurate(default_variant(family, spec))


LENGTHS = [(1, 1), (1, 20), (15, 17), (17, 15), (63, 65), (64, 64), (65, 63), (127, 129), (128, 4095), (3, 5), (5, 3)]


@pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
@pytest.mark.parametrize("causal", CAUSAL)
def test_every_length_and_group(family: Family, causal: str) -> None:
    spec = Spec(head_dim=64, head_dim_v=64, causal=causal)  # type: ignore[arg-type]
    groups = itertools.cycle([(2, 2), (9, 3), (12, 2), (28, 4), (8, 1)])
    cases = tuple(
        Case(f"{seq_q} x {seq_kv}", Problem(2, *next(groups), seq_q, seq_kv), strided=seq_q % 2 == 0)
        for seq_q, seq_kv in LENGTHS
    )
    assert_accurate(default_variant(family, spec), cases)


@pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 576])
@pytest.mark.parametrize("part", range(4))
def test_every_usable_config_of_a_corner_of_the_space(family: Family, head_dim: int, part: int) -> None:
    """Forty, spread over the space; all of a smaller one."""
    head_dim_v = min(head_dim, 512)
    spec, gpu = Spec(head_dim=head_dim, head_dim_v=head_dim_v, dtype="fp16", causal="bottom_right"), current_gpu()
    default_variant(family, spec)  # a family that refuses all is skipped
    space = family.space(spec, gpu).usable
    for config in space[:: -(-len(space) // 40)][part::4]:
        variant = Variant(family, spec, config)
        if max(used.shared for used in compile_resources(variant, gpu)) <= gpu.shared_per_block:
            assert_accurate(variant)


@pytest.mark.parametrize("magnitude", [0.5, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
def test_tolerance_does_not_depend_on_the_scale_of_the_input(family: Family, magnitude: float) -> None:
    spec = Spec(head_dim=64, head_dim_v=64, dtype="fp16", causal="bottom_right")
    assert_accurate(default_variant(family, spec), (Case("scaled", Problem(1, 4, 4, 300, 300), magnitude=magnitude),))


def run(family: Family, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: str = "none", scale: float = 1.0):
    spec = Spec(
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype={torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[q.dtype],
        causal=causal,
    )
    o = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device="cuda")
    lse = torch.full(q.shape[:3], torch.nan, device="cuda")
    launcher(default_variant(family, spec))(q, k, v, o, lse, scale)
    return o, lse


@pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
class TestClosedForms:
    def test_mean_of_visible_keys(self, family: Family) -> None:
        q = torch.zeros(1, 1, 3, 64, device="cuda", dtype=torch.float16)
        v = torch.arange(5.0, device="cuda", dtype=torch.float16)[None, None, :, None].expand(1, 1, 5, 64).contiguous()
        o, lse = run(family, q, torch.randn_like(v), v, "bottom_right")
        assert o[0, 0, :, 0].tolist() == pytest.approx([1.0, 1.5, 2.0], abs=1e-3)
        assert lse[0, 0].tolist() == pytest.approx([math.log(n) for n in (3, 4, 5)], abs=1e-6)

    def test_rows_that_see_nothing_are_zero(self, family: Family) -> None:
        q = torch.zeros(1, 1, 5, 64, device="cuda", dtype=torch.float16)
        v = torch.arange(3.0, device="cuda", dtype=torch.float16)[None, None, :, None].expand(1, 1, 3, 64).contiguous()
        o, lse = run(family, q, torch.randn_like(v), v, "bottom_right")
        assert o[0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, 0.5, 1.0], abs=1e-3)
        assert lse[0, 0].tolist()[:2] == [-math.inf, -math.inf]

    def test_ones_stay_ones(self, family: Family) -> None:
        q, k = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        o, _ = run(family, q, k, torch.ones_like(k), scale=0.125)
        assert max_error(o, torch.ones_like(o)) <= 2**-8

    def test_equal_scores_over_many_keys(self, family: Family) -> None:
        """The mean of v: whatever rescaling leaves behind when the maximum stays would compound over 16,384 keys."""
        k = torch.full((1, 1, 16384, 64), 683.0, device="cuda", dtype=torch.bfloat16)
        v = torch.linspace(-1, 1, 16384, device="cuda", dtype=torch.bfloat16)[None, None, :, None].expand(k.shape)
        o, lse = run(family, k[:, :, :16], k, v.contiguous(), scale=0.125)
        assert o.abs().max() < 5e-3
        assert lse.isfinite().all()

    def test_huge_logits(self, family: Family) -> None:
        q = torch.full((1, 1, 1, 64), 133120.0, device="cuda", dtype=torch.bfloat16)
        o, lse = run(family, q, q, q)
        assert torch.equal(o, q) and lse.isfinite().all()

    def test_scores_beyond_fp16(self, family: Family) -> None:
        q = torch.full((1, 1, 4, 128), 100.0, device="cuda", dtype=torch.float16)
        o, lse = run(family, q, q, q, scale=128**-0.5)
        assert torch.equal(o, q) and lse.isfinite().all()

    def test_all_logits_far_below_zero(self, family: Family) -> None:
        q = torch.full((1, 1, 1, 128), 100.0, device="cuda", dtype=torch.float16)
        v = torch.randn(1, 1, 16, 128, device="cuda", dtype=torch.float16)
        o, lse = run(family, q, torch.full_like(v, -7.8125), v)
        assert max_error(o, v.double().mean(2, keepdim=True)) < 2e-3
        assert lse.item() == pytest.approx(-1e5 + math.log(16), rel=1e-6)
