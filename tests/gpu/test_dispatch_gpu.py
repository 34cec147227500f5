"""attention() on a real GPU: layouts, alignment, limits, devices, streams, graphs and what it compiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen import launch
from flashgen.cases import strided_like
from flashgen.check import max_error
from flashgen.errors import InputError
from flashgen.reference import plain_attention


def draw(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def assert_close(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> None:
    expected, _ = plain_attention(q.double(), k.double(), v.double(), **options)  # type: ignore[arg-type]
    plain, _ = plain_attention(q, k, v, **options)  # type: ignore[arg-type]
    assert max_error(o, expected) <= 2 * max_error(plain, expected) + 1e-5


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_lse(causal: bool | str, layout: str) -> None:
    q, k, v = draw(2, 6, 100, 64), draw(2, 2, 130, 64), draw(2, 2, 130, 64)
    mask = {False: "none", True: "bottom_right", "top_left": "top_left"}[causal]
    given = [t.transpose(1, 2).contiguous() for t in (q, k, v)] if layout == "bshd" else [q, k, v]
    o, lse = flashgen.attention(*given, causal=causal, layout=layout, return_lse=True)
    assert o.shape == given[0].shape
    assert_close(o.transpose(1, 2) if layout == "bshd" else o, q, k, v, causal=mask)
    assert max_error(lse, plain_attention(q.double(), k.double(), v.double(), causal=mask)[1]) < 1e-4
    assert torch.equal(o, flashgen.attention(*given, causal=causal, layout=layout))


def test_any_strides_give_the_same_bits() -> None:
    q, k, v = draw(2, 4, 70, 64), draw(2, 4, 90, 64), draw(2, 4, 90, 64)
    expected = flashgen.attention(q, k, v, causal=True)
    orders = [(0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)]
    for first, second, third in zip(orders, orders[1:] + orders[:1], orders[2:] + orders[:2], strict=True):
        views = strided_like(q, first), strided_like(k, second), strided_like(v, third)
        assert torch.equal(flashgen.attention(*views, causal=True), expected)


def test_expanded_and_strided_last_dimension() -> None:
    k = draw(1, 1, 65, 64).expand(1, 8, 65, 64)
    q = draw(1, 8, 65, 64)
    assert torch.equal(flashgen.attention(q, k, k), flashgen.attention(q, k.contiguous(), k.contiguous()))
    wide = draw(1, 8, 65, 128)[..., ::2]
    assert torch.equal(flashgen.attention(wide, k, k), flashgen.attention(wide.contiguous(), k, k))
    turned = draw(1, 8, 64, 65).transpose(2, 3)
    assert torch.equal(flashgen.attention(turned, k, k), flashgen.attention(turned.contiguous(), k, k))


@pytest.mark.parametrize("aligned_first", [True, False])
def test_unaligned_storage_in_either_order(aligned_first: bool) -> None:
    flashgen.forget()
    buffer = draw(1 + 2 * 80 * 64)
    aligned = buffer[:-1].view(1, 2, 80, 64)
    unaligned = buffer[1:].view(1, 2, 80, 64)
    padded = draw(1, 2, 80, 65)[..., :64]
    order = [aligned, unaligned, padded] if aligned_first else [padded, unaligned, aligned]
    for q in order:
        assert_close(flashgen.attention(q, q, q), q, q, q)


def test_scales_are_used_as_given() -> None:
    q, k, v = draw(1, 2, 50, 72), draw(1, 2, 60, 72), draw(1, 2, 60, 72)
    assert torch.equal(flashgen.attention(q, k, v), flashgen.attention(q, k, v, scale=72**-0.5))
    for scale in (1.0, 1e-3, -0.2, 1):
        assert_close(flashgen.attention(q, k, v, scale=scale), q, k, v, scale=float(scale))
    gaps = strided_like(q, (0, 2, 1, 3))
    assert torch.equal(flashgen.attention(gaps, k, v, scale=-0.2), flashgen.attention(q, k, v, scale=-0.2))
    assert max_error(flashgen.attention(q, k, v, scale=0.0), v.double().mean(2, keepdim=True).expand(q.shape)) < 1e-3


@pytest.mark.parametrize("sizes", [(0, 2, 8, 8), (2, 0, 8, 8), (2, 2, 0, 8), (2, 2, 8, 0)])
def test_empty_sizes(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, seq_q, seq_kv = sizes
    o, lse = flashgen.attention(
        draw(batch, heads, seq_q, 64), draw(batch, heads, seq_kv, 64), draw(batch, heads, seq_kv, 32), return_lse=True
    )
    assert o.shape == (batch, heads, seq_q, 32) and lse.shape == (batch, heads, seq_q)
    assert not o.any() and (lse == -torch.inf).all()


def test_more_heads_than_a_grid_dimension_holds() -> None:
    q = draw(70000, 1, 10, 16)
    assert_close(flashgen.attention(q, q, q)[-5:], q[-5:], q[-5:], q[-5:])


def test_offsets_beyond_32_bits() -> None:
    """Rows 2**30 elements apart: the third row lies beyond 2**31."""
    buffer = torch.empty(2**31 + 64, device="cuda", dtype=torch.bfloat16)
    view = buffer.as_strided((1, 1, 3, 64), (2**31, 2**31, 2**30, 1))
    view.copy_(draw(1, 1, 3, 64, dtype=torch.bfloat16))
    dense = view.contiguous()
    q = draw(1, 1, 5, 64, dtype=torch.bfloat16)
    assert torch.equal(flashgen.attention(q, view, view), flashgen.attention(q, dense, dense))
    assert torch.equal(flashgen.attention(view, dense, dense), flashgen.attention(dense, dense, dense))


def test_lengths_and_batches_do_not_compile_again() -> None:
    flashgen.forget()
    q = draw(1, 2, 1, 64)
    flashgen.attention(q, draw(1, 2, 1, 64), draw(1, 2, 1, 64))
    before = launch._loaded.cache_info().misses
    for seq_kv in range(2, 64):
        k = draw(1 + seq_kv % 3, 2, seq_kv, 64)
        flashgen.attention(draw(1 + seq_kv % 3, 2, 1 + seq_kv % 5, 64), k, k)
    # At most one more: the buckets beyond the first may have another tuned config.
    assert launch._loaded.cache_info().misses - before <= 2


def test_calls_on_a_stream_wait_for_their_inputs() -> None:
    stream = torch.cuda.Stream()
    big = torch.randn(6000, 6000, device="cuda", dtype=torch.float16)
    k = draw(1, 2, 256, 64)
    flashgen.attention(k, k, k)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            late = big @ big
        q = (late[:512, :64] * 0 + 1).view(1, 2, 256, 64)
        o = flashgen.attention(q, k, k)
    stream.synchronize()
    assert torch.equal(o, flashgen.attention(torch.ones_like(k), k, k))


@pytest.mark.parametrize("known", [True, False])
def test_cuda_graphs(known: bool) -> None:
    flashgen.forget()
    q, k, v = draw(1, 2, 77, 64), draw(1, 2, 93, 64), draw(1, 2, 93, 64)
    if known:
        flashgen.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flashgen.attention(q, k, v, causal=True)
    q.copy_(draw(1, 2, 77, 64))
    graph.replay()
    torch.cuda.synchronize()
    assert_close(o, q, k, v, causal="bottom_right")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_other_device() -> None:
    torch.cuda.set_device(0)
    q = torch.randn(1, 2, 100, 64, device="cuda:1", dtype=torch.float16)
    o = flashgen.attention(q, q, q, causal=True)
    assert o.device == q.device and torch.cuda.current_device() == 0
    assert_close(o, q, q, q, causal="bottom_right")
    with pytest.raises(InputError, match="device"):
        flashgen.attention(q.to("cuda:0"), q, q)


def test_tf32_follows_torch() -> None:
    q = draw(1, 1, 256, 64, dtype=torch.float32)
    expected, _ = plain_attention(q.double(), q.double(), q.double())
    assert max_error(flashgen.attention(q, q, q), expected) < 1e-5
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert 1e-5 < max_error(flashgen.attention(q, q, q), expected) < 1e-2
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_repeated_calls_give_the_same_bits() -> None:
    q = draw(1, 16, 512, 72)
    first = flashgen.attention(q, q, q)
    assert all(torch.equal(flashgen.attention(q, q, q), first) for _ in range(30))


def test_bad_calls_say_what_to_do() -> None:
    q = draw(1, 2, 8, 64)
    for arguments, message in (
        ((q[0], q, q), "4 dimensions"),
        ((q, None, q), "Tensor"),
        ((q, q.cpu(), q), "device"),
        ((q, q.bfloat16(), q), "dtype"),
        ((draw(1, 3, 8, 64), q, q), "multiple"),
        ((q, draw(1, 2, 8, 32), q), "head_dim"),
        ((q.double(), q.double(), q.double()), "float64"),
        ((draw(1, 2, 8, 600),) * 3, "576"),
    ):
        with pytest.raises(InputError, match=message):
            flashgen.attention(*arguments)
    with pytest.raises(InputError, match="scale"):
        flashgen.attention(q, q, q, scale=float("nan"))
    with pytest.raises(InputError, match="causal"):
        flashgen.attention(q, q, q, causal="upper")
    with pytest.raises(flashgen.FlashgenError, match="triton_fwd"):
        flashgen.attention(q, q, q, family="triton_fwdd")


def test_explain_names_variant_file_and_reason() -> None:
    q = draw(1, 2, 300, 64)
    selection = flashgen.explain(q, q, q, causal=True)
    assert selection.variant.spec.causal == "bottom_right"
    assert selection.method in str(selection) and selection.variant.slug in str(selection)


@pytest.mark.parametrize("offset", [0, 1])
def test_compiled_equals_eager(offset: int) -> None:
    """Also where alignment is not what the first call had: an operator is opaque to the compiler."""
    compiled = torch.compile(lambda q, k, v: flashgen.attention(q, k, v, causal=True) * 2, fullgraph=True)
    k = draw(1, 2, 90, 64)
    for start in (offset, 1 - offset):
        q = draw(1 + 2 * 80 * 64)[start : start + 2 * 80 * 64].view(1, 2, 80, 64)
        with torch.no_grad():
            assert torch.equal(compiled(q, k, k), flashgen.attention(q, k, k, causal=True) * 2)


def test_the_operator_passes_opcheck() -> None:
    q, k, v = draw(2, 5, 4, 64).transpose(1, 2), draw(2, 2, 7, 64), draw(2, 2, 7, 32)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(
        torch.ops.flashgen.forward, (q, k, v, "bottom_right", None, "bhsd", True, None), test_utils=checks
    )
    torch.library.opcheck(torch.ops.flashgen.forward, (q, k, k, "none", 0.3, "bhsd", False, None), test_utils=checks)


def test_a_tuned_config_that_cannot_run_here_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A winner that another compiler version turns into too much shared memory: one warning, the right answer."""
    from flashgen import select as selecting

    flashgen.forget()
    q = draw(1, 2, 128, 256)
    selection = flashgen.explain(q, q, q)
    variant = selection.variant
    too_big = type(variant.config)(block_q=128, block_kv=128, num_warps=8, num_stages=4, index_bits=32, advance=0)
    broken = replace(selection, variant=replace(variant, config=too_big), method="measured", source="a file")
    monkeypatch.setitem(selecting._selected, (variant.spec, selection.bucket, selection.gpu, None, True), broken)
    with pytest.warns(UserWarning, match="does not work here"):
        assert_close(flashgen.attention(q, q, q), q, q, q)
    assert "does not work here" in str(flashgen.explain(q, q, q))
    flashgen.forget()
