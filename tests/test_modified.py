"""Calls with options on CPU tensors against float64 and finite differences, and what a GPU's kernels would be given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modified_calls import DIFFERENTIABLE, FEATURES, Three, options, random, tensors
from torch import Tensor

import flashgen
from flashgen import launch, modified, plans
from flashgen.cases import strided_like
from flashgen.dropout import Dropout
from flashgen.errors import InputError, UnsupportedError
from flashgen.features import EXPRESSIONS
from flashgen.hardware import Gpu
from flashgen.launch import arguments_of, laid_out
from flashgen.modifiers import Modifiers, Options, modifiers_from
from flashgen.problem import Problem
from flashgen.reference import plain_attention, tiled_attention
from flashgen.reference_backward import tiled_backward
from flashgen.select import Selection, select
from flashgen.spec import Spec
from flashgen.tensors import causal_from

PAIRS = (("softcap", "bias"), ("window", "alibi"), ("mask", "segments"), ("window", "sinks"), ("bias", "sinks"))
SETS = (*((feature,) for feature in FEATURES), *PAIRS, FEATURES)
every_set = pytest.mark.parametrize("features", SETS, ids="+".join)


def _judged(q: Tensor, seq_kv: int, given: dict[str, Any]) -> Modifiers:
    return modifiers_from((*q.shape[:3], seq_kv), q, Options(**given))  # type: ignore[arg-type]


def _turned(layout: str, *each: Tensor) -> list[Tensor]:
    return [tensor if layout == "bhsd" else tensor.transpose(1, 2) for tensor in each]


@every_set
@pytest.mark.parametrize(("causal", "layout"), [(False, "bshd"), (True, "bhsd"), ("top_left", "bshd")])
def test_every_feature_against_the_formula(features: tuple[str, ...], causal: bool | str, layout: str) -> None:
    q, k, v = tensors(layout=layout)
    given = options(*features)
    o, lse = flashgen.attention(q, k, v, causal=causal, scale=0.8, layout=layout, return_lse=True, **given)
    views = _turned(layout, q, k, v)
    expected = plain_attention(*views, causal=causal_from(causal), scale=0.8, modifiers=_judged(views[0], 6, given))
    torch.testing.assert_close((*_turned(layout, o), lse), expected)
    assert torch.equal(flashgen.attention(q, k, v, causal=causal, scale=0.8, layout=layout, **given), o)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_tensors_with_everything(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=dtype)
    for bias_dtype in {dtype, torch.float32}:
        given = options(*FEATURES, dtype=bias_dtype)
        o, lse = flashgen.attention(q, k, v, return_lse=True, **given)
        wide = {name: each.double() if name in ("bias", "sinks") else each for name, each in given.items()}
        expected, expected_lse = flashgen.attention(q.double(), k.double(), v.double(), return_lse=True, **wide)
        assert o.dtype == dtype and lse.dtype == torch.float32
        torch.testing.assert_close(o.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def _gradcheck(given: dict[str, Any], causal: bool | str = False, layout: str = "bhsd", **others: Any) -> None:
    """Of the output and the log-sum-exp of rows that see a key or have a sink."""
    differentiable = [name for name in DIFFERENTIABLE if name in given]
    parts = [*tensors(layout=layout), *(given[name].double() for name in differentiable)]
    leaves = [each.clone().requires_grad_() for each in parts]

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        passed = {**given, **dict(zip(differentiable, rest, strict=True))}
        o, lse = flashgen.attention(q, k, v, causal=causal, layout=layout, return_lse=True, **others, **passed)
        return o, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(call, leaves)


@every_set
def test_finite_differences(features: tuple[str, ...]) -> None:
    for causal, layout in ((False, "bhsd"), (True, "bshd")):
        _gradcheck(options(*features), causal, layout)


@pytest.mark.parametrize("scale", [-0.6, 0, 2])
def test_finite_differences_whatever_the_scale(scale: float) -> None:
    _gradcheck(options(*FEATURES), "top_left", scale=scale)


SHAPES = (
    (2, 4, 4, 6), (1, 4, 4, 6), (2, 1, 4, 6), (1, 1, 4, 6), (1, 4, 1, 6), (2, 1, 4, 1), (1, 1, 1, 1), (4, 4, 6),
    (4, 1, 6), (1, 4, 6), (4, 6), (1, 6), (4, 1), (6,), (1,), (),
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_a_bias_has_its_shape(shape: tuple[int, ...]) -> None:
    _gradcheck({"bias": random(*shape, seed=9)}, "bottom_right")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_bias_is_summed_before_it_is_rounded(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=torch.bfloat16)
    leaf = random(6, seed=9, dtype=dtype).requires_grad_()
    wide = leaf.detach().double().requires_grad_()
    (actual,) = torch.autograd.grad(flashgen.attention(q, k, v, bias=leaf).float().sum(), leaf)  # type: ignore[union-attr]
    o = flashgen.attention(q.double(), k.double(), v.double(), bias=wide)
    (expected,) = torch.autograd.grad(o.sum(), wide)  # type: ignore[union-attr]
    assert actual.dtype == dtype
    # The inputs' own rounding of O stands in delta; one rounding of the sum comes to it.
    torch.testing.assert_close(actual.double(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("wanted", [("bias",), ("sinks",), ("q",), ("v", "sinks"), ("k", "bias")])
def test_only_what_requires_a_gradient_gets_one(wanted: tuple[str, ...]) -> None:
    given = options("bias", "sinks", "window")

    def gradients(names: tuple[str, ...]) -> dict[str, Tensor]:
        leaves = dict(zip("qkv", tensors(), strict=True)) | {name: given[name].clone() for name in ("bias", "sinks")}
        for name in names:
            leaves[name].requires_grad_()
        o, lse = flashgen.attention(**leaves, window=(2, 1), return_lse=True)  # type: ignore[arg-type]
        torch.autograd.backward((o.cos().sum(), lse.sin().sum()))
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    some, every = gradients(wanted), gradients(("q", "k", "v", "bias", "sinks"))
    assert set(some) == set(wanted)
    assert all(torch.equal(each, every[name]) for name, each in some.items())


@pytest.mark.parametrize(
    ("batch", "heads", "seq_q", "seq_kv"), [(0, 4, 4, 6), (2, 0, 4, 6), (2, 4, 0, 6), (2, 4, 4, 0)]
)
def test_nothing_to_attend(batch: int, heads: int, seq_q: int, seq_kv: int) -> None:
    q, k = torch.ones(batch, heads, seq_q, 8), torch.ones(batch, heads, seq_kv, 8)
    bias = torch.ones(seq_q, seq_kv, requires_grad=True)
    sinks = torch.arange(heads).float().requires_grad_()
    ids = {"segment_ids_q": torch.ones(batch, seq_q).int(), "segment_ids_kv": torch.ones(batch, seq_kv).int()}
    o, lse = flashgen.attention(q, k, k, causal=True, window=(1, 1), bias=bias, sinks=sinks, return_lse=True, **ids)
    assert torch.equal(o, torch.zeros_like(q)) and torch.equal(lse, sinks[None, :, None].expand(batch, heads, seq_q))
    dbias, dsinks = torch.autograd.grad((o, lse), (bias, sinks), (torch.ones_like(o), torch.ones_like(lse)))
    assert torch.equal(dbias, torch.zeros_like(bias)) and torch.equal(dsinks, torch.full_like(sinks, batch * seq_q))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = tensors()
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = False
    sinks = torch.full((4,), -math.inf, dtype=torch.float64, requires_grad=True)
    o, lse = flashgen.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    torch.testing.assert_close((o, lse), flashgen.attention(q, k, v, mask=mask, return_lse=True))
    (dsinks,) = torch.autograd.grad(o.sum(), sinks)
    assert not dsinks.any()


def test_the_plain_path_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a call without options went the way of those with some")

    monkeypatch.setattr("flashgen.api._modified", refuse)
    q, k, v = (each.requires_grad_() for each in tensors())
    flashgen.attention(q, k, v, window=None, bias=None).sum().backward()  # type: ignore[union-attr]
    with pytest.raises(AssertionError):
        flashgen.attention(q, k, v, softcap=1.0)


def test_other_mistakes_are_found_as_without_options() -> None:
    q, k, v = tensors()
    for given, others, word in (
        ((q[0], k, v), {}, "4 dimensions"),
        ((q, None, v), {}, "k must be a torch.Tensor"),
        ((q, k.float(), v), {}, "share one dtype"),
        ((q, k, v), {"scale": math.nan}, "scale must be"),
        ((q, k, v), {"causal": "upper"}, "causal must be"),
        ((q, k, v), {"layout": "bhds"}, "layout must be"),
    ):
        with pytest.raises(InputError, match=word):
            flashgen.attention(*given, softcap=1.0, **others)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="family='triton_fwd' runs on a GPU"):
        flashgen.attention(q, k, v, softcap=1.0, family="triton_fwd")
    with pytest.raises(UnsupportedError, match="CUDA and CPU tensors, but got meta"):
        flashgen.attention(*(each.to("meta") for each in (q, k, v)), softcap=1.0)


# A GPU's half, on CPU tensors: plans bind what stands below instead of kernels.


class _Bound:
    """Takes what a kernel takes, and computes it by the reference."""

    def __init__(self, spec: Spec, views: list[Tensor]) -> None:
        self.spec = spec
        self.layouts = dict(zip(laid_out(spec), views, strict=True))
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any) -> None:
        given = dict(zip(arguments_of(self.spec), arguments, strict=True))
        self.calls.append(dict(given))
        for name in laid_out(self.spec)[: len(laid_out(self.spec.plain))]:
            planned = self.layouts[name].shape, self.layouts[name].stride()
            view, turned = given[name], given[name].transpose(1, 2)
            given[name] = view if (view.shape, view.stride()) == planned else turned
            assert (given[name].shape, given[name].stride()) == planned, name
        assert given["scale"] > 0
        modifiers = self._modifiers(given)
        q, k, v, *_ = given.values()
        how: dict[str, Any] = {"causal": self.spec.causal, "scale": given["scale"], "modifiers": modifiers}
        if self.spec.op == "forward":
            o, lse = tiled_attention(q, k, v, **how)
            given["o"].copy_(o)
            if given["lse"] is not None:
                given["lse"].copy_(lse)
            return
        results = tiled_backward(q, k, v, given["o"], given["lse"], given["do"], given["dlse"], **how)
        for name, result in zip(("dq", "dk", "dv", "dbias"), results, strict=False):
            if result is not None and given[name].numel():
                given[name].copy_(result)

    def _modifiers(self, given: dict[str, Any]) -> Modifiers:
        for name in self.spec.modifiers:
            if name in self.layouts:
                assert given[name].stride() == self.layouts[name].stride(), name
        fields = {name: given[name] for name in Modifiers._fields if name in self.spec.modifiers}
        if self.spec.dropout:
            fields["dropout"] = Dropout(given["dropout_threshold"] / 2**32, given["dropout_seed"])
            assert given["dropout_scale"] == pytest.approx(fields["dropout"].scale)
        if self.spec.mask:
            assert fields["mask"].dtype == torch.uint8
            fields["mask"] = fields["mask"].view(torch.bool)
        if self.spec.window:
            fields["window"] = (given["window_left"], given["window_right"])
            assert all(type(side) is int for side in fields["window"])
        fields |= {name: getattr(self.spec, name) for name in EXPRESSIONS if name in self.spec.features}
        fields["mod_tensors"] = tuple(given[f"mod{index}"] for index in range(len(self.spec.tensors)))
        for index, table in enumerate(fields["mod_tensors"]):
            assert [given[f"mod{index}_size_{axis}"] for axis in range(table.dim())] == list(table.shape)
        return Modifiers(**fields)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Bound | None]]:
    """What plans were made, in order."""
    made: list[_Bound | None] = []

    def select_and_bind(
        spec: Spec, problem: Problem, family: str | None, views: list[Tensor], nothing: bool
    ) -> tuple[Selection, Callable[..., None] | None, bool]:
        made.append(None if nothing else _Bound(spec, views))
        return select(spec, problem, Gpu.named("a100"), family), made[-1], True

    monkeypatch.setattr(plans, "select_and_bind", select_and_bind)
    monkeypatch.setattr(launch, "workspace_size", lambda variant, q: q.numel())
    modified.forget()
    yield made
    modified.forget()


def _on_gpu(
    given: Three, features: dict[str, Any], *, causal: str = "none", scale: float | None = None, layout: str = "bhsd"
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Results and gradients (dq, dk, dv, dbias), as a GPU's half has them, then as the CPU's."""
    q, k, v = given
    view = q if layout == "bhsd" else q.transpose(1, 2)
    modifiers = _judged(view, k.shape[2 if layout == "bhsd" else 1], features)
    o, lse = modified.attend_on_gpu(q, k, v, causal, scale, layout, True, None, modifiers)
    assert lse is not None
    do, dlse = random(*o.shape, seed=4, dtype=o.dtype), random(*lse.shape, seed=5, dtype=torch.float32)
    without = modifiers._replace(sinks=None)
    results = modified.gradients_on_gpu(q, k, v, o, lse, do, dlse, causal, scale, layout, without, True)
    bias = features.get("bias")
    o2, lse2 = modified.attend(q, k, v, causal, scale, layout, True, None, Options(**features))
    expected = modified.gradients(
        q, k, v, o2, lse2, do, dlse, causal, scale, layout, Options(**features), bias is not None, False
    )
    return (o, lse, *(each for each in results if each is not None)), (o2, lse2, *expected[: len(results)])


@every_set
@pytest.mark.parametrize(("causal", "scale", "layout"), [("none", None, "bhsd"), ("bottom_right", 0.3, "bshd")])
def test_kernels_are_given_what_they_name(
    features: tuple[str, ...], causal: str, scale: float | None, layout: str, bounds: list[_Bound | None]
) -> None:
    given = tensors(dtype=torch.float32, layout=layout)
    actual, expected = _on_gpu(
        given, options(*features, dtype=torch.float32), causal=causal, scale=scale, layout=layout
    )
    torch.testing.assert_close(actual, expected[: len(actual)])
    forward, backward = bounds
    assert forward is not None and set(forward.spec.features) == set(features) and forward.spec.causal == causal
    assert backward is not None and backward.spec.op == "backward"
    assert set(backward.spec.features) == set(features) - {"sinks"}


@pytest.mark.parametrize("scale", [-0.4, 0, 0.0, -2])
def test_kernels_are_given_a_positive_scale(scale: float, bounds: list[_Bound | None]) -> None:
    """The others are of scores that were scaled already: nothing else changes."""
    actual, expected = _on_gpu(tensors(dtype=torch.float32), options(*FEATURES, dtype=torch.float32), scale=scale)
    torch.testing.assert_close(actual, expected)
    assert len(bounds) == 2


def test_values_are_given_with_each_call_and_layouts_are_planned_for(bounds: list[_Bound | None]) -> None:
    q, k, v = tensors(dtype=torch.float32)

    def attend(**given: Any) -> None:
        modified.attend_on_gpu(q, k, v, "none", None, "bhsd", False, None, _judged(q, 6, given))

    for window, softcap in (((1, 2), 3.0), ((None, 0), 30.0), ((0, 5), 0.1)):
        attend(window=window, softcap=softcap)
    (bound,) = bounds
    assert bound is not None
    assert [call["softcap"] for call in bound.calls] == [3.0, 30.0, 0.1]
    assert [(call["window_left"], call["window_right"]) for call in bound.calls] == [(1, 2), (2**29, 0), (0, 5)]
    assert all(call["lse"] is None for call in bound.calls)
    whole = torch.randn(2, 4, 4, 6)
    for bias in (whole, whole[:1], whole[0], whole.transpose(0, 1).contiguous().transpose(0, 1), whole.half().float()):
        attend(bias=bias)
    # [1, 4, 4, 6] and [4, 4, 6] are one layout, and so are equal strides of other memory.
    assert len(bounds) == 1 + 3
    attend(bias=whole, softcap=2.0)
    attend(alibi_slopes=torch.ones(4))
    attend(alibi_slopes=torch.ones(2, 4))
    attend(mask=whole > 0)
    attend(mask=whole[0, 0] > 0)
    assert len(bounds) == 4 + 5


def test_strided_tensors_and_results(bounds: list[_Bound | None]) -> None:
    q, k, v = tensors(dtype=torch.float32)
    given = (
        strided_like(q, (0, 2, 1, 3)),
        k.transpose(2, 3).contiguous().transpose(2, 3),
        strided_like(v, (1, 0, 2, 3)),
    )
    features = options(*FEATURES, dtype=torch.float32)
    features["bias"] = strided_like(features["bias"], (1, 0, 2, 3))
    features["mask"] = features["mask"].transpose(2, 3).contiguous().transpose(2, 3)
    actual, expected = _on_gpu(given, features)
    torch.testing.assert_close(actual, expected)


def test_a_gradient_of_the_bias_that_nobody_wants_is_a_null_pointer(bounds: list[_Bound | None]) -> None:
    q, k, v = tensors(dtype=torch.float32)
    modifiers = _judged(q, 6, options("bias", dtype=torch.float32))
    o, lse = modified.attend_on_gpu(q, k, v, "none", None, "bhsd", True, None, modifiers)
    assert lse is not None
    rest = (None, "none", None, "bhsd", modifiers)
    *_, without = modified.gradients_on_gpu(q, k, v, o, lse, o, *rest, False)
    *_, wanted = modified.gradients_on_gpu(q, k, v, o, lse, o, *rest, True)
    backward = bounds[1]
    assert len(bounds) == 2 and backward is not None and without is not None and wanted is not None
    first, second = (call["dbias"] for call in backward.calls)
    assert first.numel() == first.data_ptr() == 0 and first.dtype == torch.float32 and without.numel() == 0
    assert second is wanted and wanted.shape == (2, 4, 4, 6) and wanted.any()
    # Both are one plan, bound to the strides of the whole.
    assert backward.layouts["dbias"].shape == (2, 4, 4, 6) and backward.layouts["dbias"].is_contiguous()


@pytest.mark.parametrize("sizes", [(0, 4, 4, 6), (2, 0, 4, 6), (2, 4, 0, 6), (2, 4, 4, 0)])
def test_nothing_to_attend_launches_nothing(sizes: tuple[int, int, int, int], bounds: list[_Bound | None]) -> None:
    batch, heads, seq_q, seq_kv = sizes
    q, k = torch.ones(batch, heads, seq_q, 8), torch.ones(batch, heads, seq_kv, 8)
    for sinks in (None, torch.arange(heads).float()):
        modifiers = _judged(q, seq_kv, {"bias": torch.ones(seq_q, seq_kv), "sinks": sinks})
        o, lse = modified.attend_on_gpu(q, k, k, "none", None, "bhsd", True, None, modifiers)
        filled = torch.full((heads,), -math.inf) if sinks is None else sinks
        assert lse is not None and torch.equal(lse, filled[None, :, None].expand(batch, heads, seq_q))
        assert torch.equal(o, torch.zeros_like(q))
        results = modified.gradients_on_gpu(
            q, k, k, o, lse, o, None, "none", None, "bhsd", modifiers._replace(sinks=None), True
        )
        for result, like in zip(results, (q, k, k, modifiers.bias), strict=True):
            assert result is not None and like is not None and torch.equal(result, torch.zeros_like(like))
    assert bounds and not any(bounds)


def test_a_family_by_name_is_asked_for(bounds: list[_Bound | None]) -> None:
    q, k, v = tensors(dtype=torch.float32)
    modifiers = _judged(q, 6, {"softcap": 1.0})
    modified.attend_on_gpu(q, k, v, "none", None, "bhsd", False, "triton_fwd", modifiers)
    with pytest.raises(UnsupportedError, match="hopper_fwd"):
        modified.attend_on_gpu(q, k, v, "none", None, "bhsd", False, "hopper_fwd", modifiers)


def test_gradients_that_do_not_fit_are_refused(bounds: list[_Bound | None]) -> None:
    q, k, v = tensors(dtype=torch.float32)
    modifiers = _judged(q, 6, {"softcap": 1.0})
    o, lse = modified.attend_on_gpu(q, k, v, "none", None, "bhsd", True, None, modifiers)
    assert lse is not None
    for wrong in ((o[:1], lse, o, None), (o, lse[:, :, :1], o, None), (o, lse, o.half(), None), (o, lse, o, lse[0])):
        with pytest.raises(InputError, match="as q and v ask for"):
            modified.gradients_on_gpu(q, k, v, *wrong, "none", None, "bhsd", modifiers, False)


def test_bf16_bias_of_fp32_tensors_is_refused_before_a_launch(bounds: list[_Bound | None]) -> None:
    q, k, v = tensors(dtype=torch.float32)
    with pytest.raises(InputError, match=r"bias must be torch\.float32"):
        modified.attend(q, k, v, "none", None, "bhsd", False, None, Options(bias=torch.ones(6).bfloat16()))
    assert not bounds


class _OnGpu(Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def gpu_tensors(monkeypatch: pytest.MonkeyPatch) -> Three:
    monkeypatch.setattr(plans, "gpu_of", lambda index: Gpu.named("h200"))
    q, k, v = (each.as_subclass(_OnGpu) for each in tensors(dtype=torch.float32))
    return q, k, v


@every_set
def test_eager_calls_pass_the_operators_by(
    features: tuple[str, ...], gpu_tensors: Three, bounds: list[_Bound | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("an eager call on a GPU went through an operator")

    given = options(*features, dtype=torch.float32)
    leaves = [each.requires_grad_() for each in gpu_tensors]
    others = [each.clone().requires_grad_() for each in tensors(dtype=torch.float32)]
    # A gradient of slopes would need no kernel.
    for name in {"bias", "sinks"} & set(given):
        given[name].requires_grad_()
        leaves.append(given[name])
        others.append(given[name])
    expected, expected_lse = flashgen.attention(*others[:3], return_lse=True, **given)
    upstream = torch.randn(expected.shape), torch.randn(expected_lse.shape)
    gradients = torch.autograd.grad((expected, expected_lse), others, upstream)
    for name in ("forward_modified", "backward_modified"):
        monkeypatch.setattr(torch.ops.flashgen, name, refuse)
    o, lse = flashgen.attention(*leaves[:3], return_lse=True, **given)
    results = o, lse, *torch.autograd.grad((o, lse), leaves, upstream)
    for one, other in zip(results, (expected, expected_lse, *gradients), strict=True):
        torch.testing.assert_close(one.as_subclass(Tensor), other)
    with torch.no_grad():
        alone = flashgen.attention(*leaves[:3], **given)
    assert torch.equal(alone, o)  # type: ignore[arg-type]
    assert [bound.spec.op for bound in bounds if bound is not None] == ["forward", "backward"]


def test_bad_options_never_reach_a_plan(gpu_tensors: Three, bounds: list[_Bound | None]) -> None:
    q, k, v = gpu_tensors
    for given in ({"softcap": 0.0}, {"window": (-1, 1)}, {"bias": torch.ones(5)}, {"mask": torch.ones(6)}):
        for wants_grad in (False, True):
            with pytest.raises(InputError):
                flashgen.attention(q.detach().requires_grad_(wants_grad), k, v, **given)  # type: ignore[arg-type]
    assert not bounds


def test_explain_takes_the_options(gpu_tensors: Three) -> None:
    given = options(*FEATURES, dtype=torch.float32)
    selection = flashgen.explain(*gpu_tensors, causal=True, family="triton_fwd", **given)
    assert selection.variant.spec.features == FEATURES and selection.variant.spec.bias == "fp32"
    backward = flashgen.explain(*gpu_tensors, op="backward", family="triton_bwd", **given)
    assert backward.variant.spec.features == tuple(name for name in FEATURES if name != "sinks")
    assert flashgen.explain(*gpu_tensors, window=(None, None)).variant.spec.features == ()
    with pytest.raises(InputError, match="softcap must be"):
        flashgen.explain(*gpu_tensors, softcap=-1.0)
