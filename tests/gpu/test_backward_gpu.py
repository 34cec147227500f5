"""The backward on a real GPU: every kernel against float64, and gradients of `attention` for every kind of call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.cases import strided_like
from flashgen.check import Accuracy, max_error
from flashgen.compile import compile_resources
from flashgen.evaluate import checked
from flashgen.families import FAMILIES, Family, Variant
from flashgen.hardware import current_gpu
from flashgen.launch import launcher, workspace_size
from flashgen.reference import plain_attention
from flashgen.spec import Spec

BACKWARD = [family for family in FAMILIES.values() if family.op == "backward"]
WIDTHS = [(64, 64), (128, 128), (96, 96), (72, 40), (40, 72), (192, 128), (256, 256), (1, 1)]
WIDE = [(257, 257), (320, 320), (512, 512), (576, 512), (64, 576), (576, 64), (400, 300)]
CAUSAL = ["none", "bottom_right", "top_left"]
MASKS: dict[bool | str, str] = {False: "none", True: "bottom_right", "top_left": "top_left"}

every_family = pytest.mark.parametrize("family", BACKWARD, ids=lambda family: family.name)
every_mask = pytest.mark.parametrize("causal", MASKS)


def default_variant(family: Family, spec: Spec) -> Variant:
    gpu = current_gpu()
    config = family.default(spec, gpu)
    rejection = family.refuses(spec, config, gpu)
    if rejection is not None:
        pytest.skip(f"{family.name} refuses {spec.slug}: {rejection.reason}")
    return Variant(family, spec, config)


def assert_accurate(variant: Variant) -> None:
    result = checked(variant)
    assert isinstance(result, Accuracy), (variant.slug, result)


@every_family
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(
    ("dtype", "widths"),
    [*itertools.product(["bf16", "fp16"], WIDTHS), *itertools.product(["fp32"], [(64, 64), (40, 72), (1, 1)])],
    ids=str,
)
def test_every_spec_agrees_with_float64(family: Family, dtype: str, widths: tuple[int, int], causal: str) -> None:
    assert_accurate(default_variant(family, Spec("backward", *widths, dtype, causal)))  # type: ignore[arg-type]


@every_family
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize(
    ("dtype", "widths"), [*itertools.product(["bf16"], WIDE), ("fp16", (576, 512)), ("fp32", (320, 320))], ids=str
)
def test_wide_heads_agree_with_float64(family: Family, dtype: str, widths: tuple[int, int], causal: str) -> None:
    assert_accurate(default_variant(family, Spec("backward", *widths, dtype, causal)))  # type: ignore[arg-type]


@every_family
def test_tf32_is_used_only_when_asked_for(family: Family) -> None:
    assert_accurate(default_variant(family, Spec("backward", 64, 64, "fp32", precision="tf32")))


@every_family
@pytest.mark.parametrize("head_dim", [64, 256, 576])
@pytest.mark.parametrize("part", range(4))
def test_every_usable_config_of_a_corner_of_the_space(family: Family, head_dim: int, part: int) -> None:
    """Two dozen, spread over the space; all of a smaller one."""
    spec, gpu = Spec("backward", head_dim, min(head_dim, 512), "fp16", "bottom_right"), current_gpu()
    default_variant(family, spec)  # a family that refuses all is skipped; another one has at least its default
    space = family.space(spec, gpu).usable
    variants = [Variant(family, spec, config) for config in space[:: -(-len(space) // 24)][part::4]]
    if len(space) <= part:
        pytest.skip(f"{family.name} has {len(space)} configs here, which other parts run")
    assert variants
    for variant in variants:
        if max(used.shared for used in compile_resources(variant, gpu)) <= gpu.shared_per_block:
            assert_accurate(variant)


@every_family
@pytest.mark.parametrize("far", [0, 1, 2])
def test_offsets_beyond_32_bits(family: Family, far: int) -> None:
    """Batch elements, heads or rows of all eight tensors lie 2**30 elements apart: the third beyond 2**31."""
    variant = default_variant(family, Spec("backward", 64, 64, "bf16", "bottom_right"))
    q, k, v, do = (draw(3, 3, 3, 64, dtype=torch.bfloat16) for _ in range(4))
    wide_o, wide_lse = plain_attention(q.double(), k.double(), v.double(), causal="bottom_right")
    dense = [q, k, v, wide_o.bfloat16(), do, *(torch.full_like(q, torch.nan) for _ in range(3))]
    strides = [192, 64]
    strides.insert(far, 2**30)
    buffer = torch.empty(2**31 + 2**20, device="cuda", dtype=torch.bfloat16)
    spread = [buffer.as_strided((3, 3, 3, 64), (*strides, 1), 2**16 * place) for place in range(8)]
    for view, values in zip(spread, dense, strict=True):
        view.copy_(values)
    for q, k, v, o, do, *results in (dense, spread):
        workspace = torch.full((workspace_size(variant, q),), torch.nan, device="cuda")
        launcher(variant)(q, k, v, o, wide_lse.float(), do, None, *results, workspace, 0.125)
    assert all(map(torch.equal, spread[5:], dense[5:]))
    assert all(result.isfinite().all() and result.any() for result in dense[5:])


def draw(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def gradients_of(
    function: Callable[..., Any], inputs: Sequence[Tensor], do: Tensor | None, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Gradients of the inputs, by autograd, given those of a function's (o, lse); None where one is not used."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    pairs = [pair for pair in zip(function(*leaves), (do, dlse), strict=True) if pair[1] is not None]
    results, upstream = zip(*pairs, strict=True)
    return torch.autograd.grad(results, leaves, upstream, materialize_grads=True)


def flash(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: flashgen.attention(q, k, v, return_lse=True, **options)


def plain(causal: bool | str = False, scale: float | None = None) -> Callable[..., Any]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = plain_attention(q, k, v, causal=MASKS[causal], scale=scale)
        # A row that sees no key has no gradient, where autograd would make NaN of that of -inf.
        return o, lse.masked_fill(lse == -math.inf, 0.0)

    return function


def assert_close(
    actual: Sequence[Tensor], inputs: Sequence[Tensor], do: Tensor | None, dlse: Tensor | None = None, **options: Any
) -> None:
    """Three times the error of plain attention in the inputs' dtype, and the floor."""
    upstream = [None if tensor is None else tensor.double() for tensor in (do, dlse)]
    true = gradients_of(plain(**options), [tensor.double() for tensor in inputs], *upstream)
    near = gradients_of(plain(**options), inputs, do, dlse)
    for name, mine, exact, other in zip(("dq", "dk", "dv"), actual, true, near, strict=True):
        allowed = 3 * max_error(other, exact) + 1e-5
        assert math.isfinite(allowed) and mine.dtype == inputs[0].dtype
        assert max_error(mine, exact) <= allowed, (name, options, [tensor.shape for tensor in inputs])


@every_mask
def test_multi_head_latent_attention(causal: bool | str) -> None:
    """Many query heads on one head of keys, as DeepSeek-V2's absorbed form has them."""
    sizes = ((16, 1000, 576), (1, 1010, 576), (1, 1010, 512))
    inputs = [draw(1, *size, dtype=torch.bfloat16) for size in sizes]
    do, dlse = draw(1, 16, 1000, 512, dtype=torch.bfloat16), draw(1, 16, 1000, dtype=torch.float32)
    assert_close(gradients_of(flash(causal=causal), inputs, do, dlse), inputs, do, dlse, causal=causal)


@every_mask
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(("layout", "dtype"), [("bhsd", torch.float16), ("bshd", torch.bfloat16)], ids=str)
@pytest.mark.parametrize("width_v", [64, 40])
def test_layouts_and_groups(causal: bool | str, kv_heads: int, layout: str, dtype: torch.dtype, width_v: int) -> None:
    inputs = [draw(2, *size, dtype=dtype) for size in ((6, 100, 64), (kv_heads, 130, 64), (kv_heads, 130, width_v))]
    do, dlse = draw(2, 6, 100, width_v, dtype=dtype), draw(2, 6, 100, dtype=torch.float32)
    given = [t.transpose(1, 2).contiguous() if layout == "bshd" else t for t in (*inputs, do)]
    actual = gradients_of(flash(causal=causal, layout=layout), given[:3], given[3], dlse)
    assert [each.stride() for each in actual] == [each.stride() for each in given[:3]]
    turned = [each.transpose(1, 2) if layout == "bshd" else each for each in actual]
    assert_close(turned, inputs, do, dlse, causal=causal)


LENGTHS = [(1, 1), (1, 20), (20, 1), (3, 5), (5, 3), (15, 17), (17, 15), (63, 65), (64, 64), (65, 63), (127, 129)]
LENGTHS += [(129, 127), (200, 77), (76, 1), (1, 300), (300, 1000), (128, 4095), (20001, 3)]


@every_mask
def test_every_length_and_group(causal: bool | str) -> None:
    """Among them rows that see nothing: their dq is zero, whatever their gradients are."""
    groups = itertools.cycle([(2, 2), (9, 3), (12, 2), (28, 4), (8, 1)])
    for (seq_q, seq_kv), (heads, kv_heads) in zip(LENGTHS, groups, strict=False):
        inputs = [draw(2, heads, seq_q, 64), draw(2, kv_heads, seq_kv, 64), draw(2, kv_heads, seq_kv, 64)]
        do, dlse = draw(2, heads, seq_q, 64), draw(2, heads, seq_q, dtype=torch.float32)
        actual = gradients_of(flash(causal=causal), inputs, do, dlse)
        assert_close(actual, inputs, do, dlse, causal=causal)
        blind = max(seq_q - seq_kv, 0) if causal is True else 0
        assert not actual[0][:, :, :blind].any()
        do[:, :, :blind], dlse[:, :, :blind] = 3e4, -1e30
        assert all(map(torch.equal, gradients_of(flash(causal=causal), inputs, do, dlse), actual))


@every_mask
@pytest.mark.parametrize("wanted", ["output", "lse", "both"])
def test_gradients_of_either_result(causal: bool | str, wanted: str) -> None:
    inputs = [draw(1, 4, 90, 64), draw(1, 2, 60, 64), draw(1, 2, 60, 64)]
    do = None if wanted == "lse" else draw(1, 4, 90, 64)
    dlse = None if wanted == "output" else draw(1, 4, 90, dtype=torch.float32)
    actual = gradients_of(flash(causal=causal), inputs, do, dlse)
    assert_close(actual, inputs, do, dlse, causal=causal)
    assert wanted != "lse" or not actual[2].any()


@pytest.fixture
def grouped() -> list[Tensor]:
    """q, k, v and dO of a call with groups and ragged lengths."""
    return [draw(2, 4, 70, 64), draw(2, 2, 90, 64), draw(2, 2, 90, 64), draw(2, 4, 70, 64)]


def test_any_strides_give_the_same_bits(grouped: list[Tensor]) -> None:
    expected = gradients_of(flash(causal=True), grouped[:3], grouped[3])
    orders = [(0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3), (2, 1, 0, 3)]
    for turn in range(4):
        views = [strided_like(each, order) for each, order in zip(grouped, orders[turn:] + orders[:turn], strict=True)]
        assert all(map(torch.equal, gradients_of(flash(causal=True), views[:3], views[3]), expected))


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0,), (1,), (2,), (3,), (0, 1), (1, 2)], ids=str)
def test_expanded_gradients(grouped: list[Tensor], dims: tuple[int, ...]) -> None:
    """What `o.sum()`, `o.mean(1)` and their like send back has stride 0."""
    q, k, v, do = grouped
    one = do[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(4))].expand(do.shape)
    actual = gradients_of(flash(), (q, k, v), one)
    assert all(map(torch.equal, actual, gradients_of(flash(), (q, k, v), one.contiguous())))
    assert_close(actual, (q, k, v), one)


def test_expanded_keys_and_strided_last_dimensions(grouped: list[Tensor]) -> None:
    q, _, _, do = grouped
    shared = [draw(2, 1, 90, 64).expand(2, 4, 90, 64) for _ in range(2)]
    turned = [draw(*each.shape[:2], 64, each.shape[2]).transpose(2, 3) for each in grouped]
    strided = [draw(*each.shape[:3], 128)[..., ::2] for each in grouped]
    for *inputs, upstream in ([q, *shared, do], turned, strided):
        expected = gradients_of(flash(), [each.contiguous() for each in inputs], upstream.contiguous())
        assert all(map(torch.equal, gradients_of(flash(), inputs, upstream), expected))


@pytest.mark.parametrize("aligned_first", [True, False])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_unaligned_storage_in_either_order(which: int, aligned_first: bool) -> None:
    flashgen.forget()
    buffer = draw(1 + 2 * 80 * 64)
    kinds = [buffer[:-1].view(1, 2, 80, 64), buffer[1:].view(1, 2, 80, 64), draw(1, 2, 80, 65)[..., :64]]
    tensors = [draw(1, 2, 80, 64) for _ in range(4)]
    for tensors[which] in kinds if aligned_first else kinds[::-1]:
        assert_close(gradients_of(flash(), tensors[:3], tensors[3]), tensors[:3], tensors[3])


def test_an_unaligned_copy_and_an_unaligned_tensor_are_two_kinds_of_call() -> None:
    """A strided dO is copied to where rows are aligned; an unaligned q stays where it is, whatever was bound before."""
    flashgen.forget()
    q, k, v, wide = draw(1, 2, 512, 64), draw(1, 2, 512, 64), draw(1, 2, 512, 64), draw(1 + 2 * 512 * 128)
    strided = wide[1:].view(1, 2, 512, 128)[..., ::2]
    shifted = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
    for inputs, do in (((q, k, v), strided), ((shifted, k, v), wide[:-1].view(1, 2, 512, 128)[..., ::2])):
        assert_close(gradients_of(flash(), inputs, do), inputs, do)
    for inputs in ((wide[1:].view(1, 2, 512, 128)[..., ::2], k, v), (q, shifted, v)):
        plain_o, _ = plain_attention(*(each.double() for each in inputs))
        assert max_error(flashgen.attention(*inputs), plain_o) < 0.01  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1, 1e-3, 3.0, -1e-20])
@pytest.mark.parametrize("causal", [False, True])
def test_scales_are_used_as_given(grouped: list[Tensor], scale: float, causal: bool) -> None:
    (*inputs, do), dlse = grouped, draw(2, 4, 70, dtype=torch.float32)
    actual = gradients_of(flash(scale=scale, causal=causal), inputs, do, dlse)
    assert_close(actual, inputs, do, dlse, scale=float(scale), causal=causal)
    assert scale != 0 or not (actual[0].any() or actual[1].any())


@every_mask
def test_large_logits(causal: bool | str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        *inputs, do = (std * draw(1, 2, seq, 64, dtype=dtype) for std, seq in ((40, 128), (1, 256), (1, 256), (1, 128)))
        assert_close(gradients_of(flash(causal=causal), inputs, do), inputs, do, causal=causal)


def test_logits_whose_rounding_is_felt() -> None:
    """At 1e4 fp32 holds a score to 1e-3: P recomputed from the log-sum-exp may exceed 1, but not by more."""
    *inputs, do = (draw(1, 2, seq, 64, dtype=torch.float32) for seq in (128, 200, 200, 128))
    inputs[0] *= 1e4
    actual = gradients_of(flash(), inputs, do)
    *_, true = gradients_of(plain(), [each.double() for each in inputs], do.double())
    assert all(each.isfinite().all() for each in actual) and max_error(actual[2], true) <= 0.02 * true.abs().max()


class TestClosedForms:
    def test_gradients_of_v_sum_to_those_of_the_output(self) -> None:
        """Columns of P: the same in all channels after `o.sum()`; their sum counts the rows that see a key."""
        q, k, v = (draw(1, 2, seq, 64).requires_grad_() for seq in (200, 77, 77))
        for causal, rows in ((False, 200), (True, 77), ("top_left", 200)):
            (dv,) = torch.autograd.grad(flashgen.attention(q, k, v, causal=causal).sum(), v)  # type: ignore[union-attr]
            assert max_error(dv, dv[..., :1].expand(dv.shape)) <= 2**-10 * dv.abs().max()
            assert max_error(dv.double().sum(2), torch.full((1, 2, 64), rows, device="cuda")) <= 2**-10 * rows

    def test_equal_values_or_keys_move_nothing(self) -> None:
        """Gradients of a row's scores add up to zero; where all values are alike, so are the gradients."""
        q, other, do = (draw(1, 2, 300, 64) for _ in range(3))
        same = draw(1, 2, 1, 64).expand(1, 2, 300, 64)
        dq, dk, dv = gradients_of(flash(causal=True), (q, other, same), do)
        assert dq.abs().max() < 5e-3 and dk.abs().max() < 5e-3 and dv.abs().max() > 0.5
        dq, dk, _ = gradients_of(flash(causal=True), (q, same, other), do)
        assert dq.abs().max() < 5e-3 and dk.abs().max() > 0.05

    def test_gradient_of_lse_is_the_mean_key(self) -> None:
        q, k, v = torch.zeros(1, 1, 5, 64, device="cuda", dtype=torch.float16), draw(1, 1, 8, 64), draw(1, 1, 8, 64)
        dq, dk, dv = gradients_of(flash(causal="top_left"), (q, k, v), None, torch.ones(1, 1, 5, device="cuda"))
        means = k.double().cumsum(2)[:, :, :5] / torch.arange(1, 6, device="cuda")[:, None]
        assert max_error(dq, means / 8) < 1e-3 and not dk.any() and not dv.any()


@pytest.mark.parametrize("sizes", [(0, 2, 8, 8), (2, 0, 8, 8), (2, 2, 0, 8), (2, 2, 8, 0)], ids=str)
def test_empty_sizes(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, seq_q, seq_kv = sizes
    inputs = [draw(batch, heads, seq_q, 64), draw(batch, heads, seq_kv, 64), draw(batch, heads, seq_kv, 32)]
    poison()
    gradients = gradients_of(flash(), inputs, draw(batch, heads, seq_q, 32))
    assert all(mine.shape == each.shape and not mine.any() for mine, each in zip(gradients, inputs, strict=True))


def poison() -> None:
    """Leave NaN in whatever memory the allocator hands out next."""
    torch.cuda.empty_cache()
    for power in range(4, 25):
        held = [torch.full((2**power,), torch.nan, device="cuda") for _ in range(8 if power < 20 else 2)]
    del held


@every_mask
def test_what_memory_held_before_does_not_matter(grouped: list[Tensor], causal: bool | str) -> None:
    expected = gradients_of(flash(causal=causal), grouped[:3], grouped[3])
    for _ in range(5):
        poison()
        actual = gradients_of(flash(causal=causal), grouped[:3], grouped[3])
        assert all(map(torch.equal, actual, expected)) and all(each.isfinite().all() for each in actual)


@pytest.mark.parametrize("causal", [False, True])
def test_repeated_calls_give_the_same_bits(causal: bool) -> None:
    *inputs, do = (draw(2, 16, 4096, 128, dtype=torch.bfloat16) for _ in range(4))
    first = gradients_of(flash(causal=causal), inputs, do)
    for _ in range(20):
        assert all(map(torch.equal, gradients_of(flash(causal=causal), inputs, do), first))
    corner = [each[:1, -1:] for each in (*first, *inputs, do)]
    assert_close(corner[:3], corner[3:6], corner[6], causal=causal)


def test_batch_elements_do_not_meet(grouped: list[Tensor]) -> None:
    *inputs, do = grouped
    expected = gradients_of(flash(causal=True), inputs, do)
    alone = gradients_of(flash(causal=True), [each[1:] for each in inputs], do[1:])
    spoilt = [torch.cat([torch.full_like(each[:1], torch.nan), each[1:]]) for each in grouped]
    beside = gradients_of(flash(causal=True), spoilt[:3], spoilt[3])
    for whole, one, other in zip(expected, alone, beside, strict=True):
        assert torch.equal(whole[1:], one) and torch.equal(whole[1:], other[1:])


def test_more_heads_than_a_grid_dimension_and_a_workspace_beyond_32_bits() -> None:
    """2 * 128 fp32 of workspace for each of 2**23 + 70 heads."""
    batch = 2**23 + 70
    *inputs, do = (draw(batch, 1, seq, 16) for seq in (1, 2, 2, 1))
    actual = gradients_of(flash(causal=True), inputs, do)
    for part in (slice(0, 100), slice(65500, 65600), slice(-100, None)):
        assert_close([each[part] for each in actual], [each[part] for each in inputs], do[part], causal=True)
