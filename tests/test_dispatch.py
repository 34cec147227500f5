"""`flashgen.attention` on CPU tensors: every dtype, layout and scale against float64, and what it refuses."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen import dispatch
from flashgen.cases import strided_like
from flashgen.check import max_error
from flashgen.errors import InputError, UnsupportedError
from flashgen.reference import plain_attention
from flashgen.tensors import causal_from, positive_scale

CAUSAL = (False, True, "bottom_right", "top_left")


def _qkv(
    seq_q: int = 9, seq_kv: int = 13, *, heads: int = 6, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seq_q * 100 + seq_kv)
    shapes = ((2, heads, seq_q, 24), (2, kv_heads, seq_kv, 24), (2, kv_heads, seq_kv, 40))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def _truth(q: Tensor, k: Tensor, v: Tensor, causal: object, scale: float | None = None) -> tuple[Tensor, Tensor]:
    return plain_attention(q.double(), k.double(), v.double(), causal=causal_from(causal), scale=scale)


def _bshd(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2).contiguous() for tensor in tensors]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", dispatch.CPU_DTYPES)
def test_every_dtype_and_mask(dtype: torch.dtype, causal: bool | str) -> None:
    for seq_q, seq_kv in ((9, 13), (13, 9), (1, 1), (1, 600), (600, 1)):
        q, k, v = _qkv(seq_q, seq_kv, dtype=dtype)
        o, lse = flashgen.attention(q, k, v, causal=causal, return_lse=True)
        assert o.dtype == dtype and o.shape == (2, 6, seq_q, 40)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and lse.shape == (2, 6, seq_q)
        expected, expected_lse = _truth(q, k, v, causal)
        plain, _ = plain_attention(q, k, v, causal=causal_from(causal))
        assert max_error(o, expected) <= 2 * max_error(plain, expected) + 8 * torch.finfo(dtype).eps
        assert max_error(lse, expected_lse) <= (1e-13 if dtype == torch.float64 else 4e-6)


@pytest.mark.parametrize("causal", CAUSAL)
def test_layouts_agree(causal: bool | str) -> None:
    q, k, v = _qkv()
    o, lse = flashgen.attention(q, k, v, causal=causal, return_lse=True)
    other, other_lse = flashgen.attention(*_bshd(q, k, v), causal=causal, layout="bshd", return_lse=True)
    assert other.shape == (2, 9, 6, 40)
    assert torch.equal(other.transpose(1, 2), o)
    # The LSE is [batch, heads, seq_q] in either layout.
    assert torch.equal(other_lse, lse)


def test_one_result_unless_two_are_asked_for() -> None:
    q, k, v = _qkv()
    o = flashgen.attention(q, k, v)
    assert isinstance(o, Tensor)
    assert torch.equal(o, flashgen.attention(q, k, v, return_lse=True)[0])


def test_inputs_are_left_alone() -> None:
    given = _qkv()
    before = [tensor.clone() for tensor in given]
    for scale in (None, 0.0, -1.0):
        flashgen.attention(*given, causal=True, scale=scale)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1, 1e-3, 1e-30, 0.0, 0, -0.5, -3])
def test_scale_is_used_as_given(scale: float) -> None:
    q, k, v = _qkv()
    for causal in (False, True):
        o, lse = flashgen.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        expected, expected_lse = _truth(q, k, v, causal, scale)
        assert max_error(o, expected) <= 1e-5
        assert max_error(lse, expected_lse) <= 2e-5


def test_default_scale_is_that_of_the_true_width() -> None:
    q, k, v = (torch.randn(1, 1, 5, 72, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    assert torch.equal(flashgen.attention(q, k, v), flashgen.attention(q, k, v, scale=72**-0.5))
    assert not torch.equal(flashgen.attention(q, k, v), flashgen.attention(q, k, v, scale=128**-0.5))


def test_a_scale_that_overflows_the_scores_type_is_refused() -> None:
    q, k, v = _qkv()
    with pytest.raises(InputError, match="scale"):
        flashgen.attention(q, k, v, scale=1e39)
    o = flashgen.attention(q.double(), k.double(), v.double(), scale=1e39)
    assert o.isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.5, 2])
def test_kernels_get_a_positive_scale(scale: float) -> None:
    q = strided_like(_qkv()[0], (0, 2, 1, 3))
    turned, positive = positive_scale(q, scale)
    assert positive > 0
    torch.testing.assert_close(turned * positive, q * float(scale))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (12, 2), (6, 2), (4, 4), (5, 1)])
def test_query_heads_read_their_group(heads: int, kv_heads: int) -> None:
    q, k, v = _qkv(heads=heads, kv_heads=kv_heads)
    group = heads // kv_heads
    expanded = [tensor.repeat_interleave(group, dim=1) for tensor in (k, v)]
    torch.testing.assert_close(flashgen.attention(q, k, v, causal=True), flashgen.attention(q, *expanded, causal=True))


def test_any_memory_order() -> None:
    q, k, v = _qkv()
    expected = flashgen.attention(q, k, v, causal=True)
    for order in itertools.permutations(range(3)):
        views = [strided_like(tensor, (*order, 3)) for tensor in (q, k, v)]
        torch.testing.assert_close(flashgen.attention(*views, causal=True), expected)
    # Not even the last dimension has to be contiguous.
    views = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (q, k, v)]
    torch.testing.assert_close(flashgen.attention(*views, causal=True), expected)
    shared = k[:, :1].expand(2, 2, 13, 24)
    torch.testing.assert_close(flashgen.attention(q, shared, v), flashgen.attention(q, shared.contiguous(), v))


def test_rows_that_see_nothing() -> None:
    q, k, v = _qkv(5, 3)
    o, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    assert not o[:, :, :2].any() and (lse[:, :, :2] == -math.inf).all()
    assert o[:, :, 2:].any() and lse[:, :, 2:].isfinite().all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seq_q", "seq_kv"),
    [(0, 2, 1, 8, 8), (2, 0, 0, 8, 8), (2, 2, 1, 0, 8), (2, 2, 1, 8, 0)],
)
def test_nothing_to_attend(layout: str, batch: int, heads: int, kv_heads: int, seq_q: int, seq_kv: int) -> None:
    q, k = torch.ones(batch, heads, seq_q, 16), torch.ones(batch, kv_heads, seq_kv, 16)
    given = [q, k, k] if layout == "bhsd" else _bshd(q, k, k)
    o, lse = flashgen.attention(*given, causal=True, layout=layout, return_lse=True)
    assert torch.equal(o, torch.zeros_like(given[0]))
    assert torch.equal(lse, torch.full((batch, heads, seq_q), -math.inf))


def test_gradients_flow_on_the_cpu() -> None:
    q, k, v = (tensor.double().requires_grad_() for tensor in _qkv(5, 4))
    for layout in ("bhsd", "bshd"):
        given = (q, k, v) if layout == "bhsd" else tuple(tensor.transpose(1, 2) for tensor in (q, k, v))
        o = flashgen.attention(*given, causal=True, layout=layout)
        assert isinstance(o, Tensor)
        expected, _ = _truth(q, k, v, True)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        mine = torch.autograd.grad((o if layout == "bhsd" else o.transpose(1, 2)).mul(weights).sum(), (q, k, v))
        # The plain formula has no gradient for rows that see nothing; they contribute nothing.
        theirs = torch.autograd.grad(expected[:, :, 1:].mul(weights[:, :, 1:]).sum(), (q, k, v))
        for actual, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(actual, right.nan_to_num())


def test_options_that_mean_nothing() -> None:
    q, k, v = _qkv()
    for options, word in (
        ({"causal": "upper"}, "causal"),
        ({"causal": None}, "causal"),
        ({"layout": "bhds"}, "layout"),
        ({"scale": math.nan}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"scale": "1"}, "scale"),
    ):
        with pytest.raises(InputError, match=word):
            flashgen.attention(q, k, v, **options)  # type: ignore[arg-type]


def test_tensors_that_do_not_fit() -> None:
    q, k, v = _qkv()
    for given, word in (
        ((q[0], k, v), "4 dimensions"),
        ((q, k.half(), v), "share one dtype"),
        ((q, k, v.to("meta")), "share one device"),
        ((q[:, :3], k, v), "multiple of kv_heads"),
        ((q, k, v[:, :, 1:]), "agree in length"),
        ((q, k[..., :8], v), "head_dim"),
        ((q[..., :0], k[..., :0], v), "at least 1"),
        ((q.int(), k.int(), v.int()), "dtype must be one of"),
        ((None, k, v), "q must be a torch.Tensor"),
        ((q, None, v), "k must be a torch.Tensor"),
        ((q, k, [1.0]), "v must be a torch.Tensor"),
    ):
        with pytest.raises(InputError, match=word) as error:
            flashgen.attention(*given)  # type: ignore[arg-type]
        assert isinstance(error.value, ValueError)


def test_devices_without_kernels() -> None:
    with pytest.raises(UnsupportedError, match="CUDA and CPU tensors, but got meta"):
        flashgen.attention(*(tensor.to("meta") for tensor in _qkv()))


def test_a_family_is_never_replaced_by_something_else() -> None:
    with pytest.raises(UnsupportedError, match="family='triton_fwd' runs on a GPU"):
        flashgen.attention(*_qkv(), family="triton_fwd")


def test_explain_is_about_gpus() -> None:
    with pytest.raises(InputError, match="the tensors are on cpu"):
        flashgen.explain(*_qkv())
    with pytest.raises(InputError, match="4 dimensions"):
        flashgen.explain(*(tensor[0] for tensor in _qkv()))


def test_forgetting_changes_no_result() -> None:
    before = flashgen.attention(*_qkv())
    flashgen.forget()
    assert torch.equal(flashgen.attention(*_qkv()), before)


def test_import_and_call_where_no_gpu_is_visible() -> None:
    code = """
import torch
import flashgen
x = torch.ones(1, 1, 3, 8)
print(flashgen.attention(x, x, x, causal=True).sum().item(), torch.cuda.is_initialized())
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["24.0", "False"]
