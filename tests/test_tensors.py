"""A caller's tensors and options: good input is described, bad input refused with the values and the way out."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashgen.errors import InputError
from flashgen.problem import Problem
from flashgen.spec import DTYPE_NAMES, TORCH_DTYPES, Causal, Spec
from flashgen.tensors import causal_from, check_scale, from_tensors, has_memory


def _tensors(
    q: tuple[int, ...] = (2, 4, 5, 64), k: tuple[int, ...] = (2, 2, 7, 64), v: tuple[int, ...] = (2, 2, 7, 32)
) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float16, device="meta") for shape in (q, k, v)]


def test_tensors_are_described() -> None:
    spec, problem = from_tensors(*_tensors(), causal=True)
    assert spec == Spec(head_dim=64, head_dim_v=32, dtype="fp16", causal="bottom_right")
    assert problem == Problem(batch=2, heads=4, kv_heads=2, seq_q=5, seq_kv=7)


def test_layouts_describe_the_same_call() -> None:
    bshd = [tensor.transpose(1, 2) for tensor in _tensors()]
    assert from_tensors(*bshd, layout="bshd") == from_tensors(*_tensors())


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_has_one_name(name: str) -> None:
    tensors = [tensor.to(TORCH_DTYPES[name]) for tensor in _tensors()]
    spec, _ = from_tensors(*tensors)
    assert spec.dtype == name == DTYPE_NAMES[TORCH_DTYPES[name]]
    assert spec.element_bytes == tensors[0].element_size()


@pytest.fixture
def restored_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.usefixtures("restored_tf32")
def test_tf32_is_torchs_choice_and_for_fp32_only(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    assert from_tensors(*(tensor.float() for tensor in _tensors()))[0].precision == ("tf32" if allowed else "ieee")
    assert from_tensors(*_tensors())[0].precision == "ieee"


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"q": (4, 5, 64)}, ["q must have 4 dimensions", "(4, 5, 64)", "unsqueeze"]),
        ({"v": (1, 2, 2, 7, 32)}, ["v must have 4 dimensions", "(1, 2, 2, 7, 32)"]),
        ({"k": (3, 2, 7, 64)}, ["batch", "2, 3 and 2"]),
        ({"k": (2, 4, 7, 64)}, ["heads", "4 and 2"]),
        ({"k": (2, 2, 8, 64)}, ["length", "8 and 7"]),
        ({"k": (2, 2, 7, 32)}, ["head_dim", "q 64, k 32"]),
        ({"q": (2, 4, 5, 0), "k": (2, 2, 7, 0)}, ["head dims must be at least 1", "q 0, k 0"]),
        ({"v": (2, 2, 7, 0)}, ["head dims must be at least 1", "v 0"]),
        ({"q": (2, 4, 5, 577), "k": (2, 2, 7, 577)}, ["1 <= head_dim <= 576", "577"]),
        ({"v": (2, 2, 7, 577)}, ["1 <= head_dim_v <= 576", "577"]),
        ({"q": (2, 33, 5, 64)}, ["heads must be a multiple of kv_heads", "heads=33, kv_heads=2"]),
        ({"q": (2, 3, 5, 64)}, ["heads must be a multiple of kv_heads", "heads=3, kv_heads=2"]),
        ({"q": (2, 1, 5, 64)}, ["heads=1, kv_heads=2"]),
        ({"k": (2, 0, 7, 64), "v": (2, 0, 7, 32)}, ["heads=4, kv_heads=0"]),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        from_tensors(*_tensors(**shapes))
    assert isinstance(error.value, ValueError)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_dtypes_that_do_not_fit() -> None:
    q, k, v = _tensors()
    with pytest.raises(InputError, match=r"share one dtype, but got q torch\.float16, k torch\.bfloat16"):
        from_tensors(q, k.bfloat16(), v)
    for dtype in (torch.float64, torch.int32, torch.complex64, torch.float8_e5m2):
        with pytest.raises(InputError, match=f"dtype must be one of .*, but got {dtype}"):
            from_tensors(q.to(dtype), k.to(dtype), v.to(dtype))


def test_devices_that_do_not_fit() -> None:
    q, k, v = _tensors()
    with pytest.raises(InputError, match="share one device, but got q cpu, k meta, v meta"):
        from_tensors(torch.empty_like(q, device="cpu"), k, v)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor(name: str) -> None:
    named: dict[str, object] = dict(zip("qkv", _tensors(), strict=True))
    named[name] = [[1.0]]
    with pytest.raises(InputError, match=f"{name} must be a torch.Tensor, but got list"):
        from_tensors(**named)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["bhds", "BHSD", "", None, 4])
def test_unknown_layouts(layout: object) -> None:
    with pytest.raises(InputError, match="layout must be 'bhsd' or 'bshd'"):
        from_tensors(*_tensors(), layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "causal"),
    [
        (False, "none"),
        (True, "bottom_right"),
        (0, "none"),
        (1, "bottom_right"),
        ("bottom_right", "bottom_right"),
        ("top_left", "top_left"),
    ],
)
def test_causal_is_named(value: object, causal: Causal) -> None:
    assert causal_from(value) == causal
    assert from_tensors(*_tensors(), causal=value)[0].causal == causal


@pytest.mark.parametrize("value", ["upper", "none", "", None, 2, -1, 0.5, math.nan, [True]])
def test_unknown_causal(value: object) -> None:
    with pytest.raises(InputError, match=r"causal must be False, True, 'bottom_right' or 'top_left'"):
        from_tensors(*_tensors(), causal=value)


@pytest.mark.parametrize("scale", [None, 1, 1.0, 1e-3, 0.0, -0.5, 1e-30, 1e37])
def test_finite_scales(scale: float | None) -> None:
    for dtype in TORCH_DTYPES.values():
        check_scale(scale, dtype)
    check_scale(scale, torch.float64)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, True, "1", torch.tensor(1.0), 1j])
def test_scales_that_are_no_finite_number(scale: object) -> None:
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(InputError, match="scale must be None or a finite number, but got"):
            check_scale(scale, dtype)


@pytest.mark.parametrize("scale", [1e39, -1e39, 1e-39, -1e-39, 1e-35])
def test_scales_out_of_the_range_of_kernels(scale: float) -> None:
    for dtype in TORCH_DTYPES.values():
        with pytest.raises(InputError, match=f"scale of {dtype} inputs must be 0 or between") as error:
            check_scale(scale, dtype)
        assert f"got {scale!r}" in str(error.value)
    check_scale(scale, torch.float64)


def test_who_has_memory() -> None:
    tensor, empty = torch.ones(2, 3), torch.ones(0, 3)
    assert has_memory(tensor, empty) and not has_memory(tensor, torch.empty(2, 3, device="meta"))
    seen: list[bool] = []

    def look(inside: Tensor) -> Tensor:
        seen.append(has_memory(inside))
        return inside

    torch.vmap(look)(tensor)
    torch.func.functionalize(look)(tensor)
    assert seen == [False, False]
