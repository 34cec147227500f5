"""What generated kernels compute, run by Triton's interpreter on the CPU: numbers against float64 and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import interpreted
import pytest
import torch
from torch import Tensor

from flashgen import check
from flashgen.cases import SMALL_CASES, Case, strided_like
from flashgen.check import Launch
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Causal, DType, Spec
from flashgen.tensors import from_tensors

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DTYPES: tuple[DType, ...] = ("fp16", "bf16", "fp32")


def _config(block_q: int = 16, block_kv: int = 16, index_bits: int = 32, advance: int = 0) -> Config:
    return Config(block_q=block_q, block_kv=block_kv, num_warps=4, num_stages=2, index_bits=index_bits, advance=advance)


SMALL = _config()


class Interpreter(interpreted.Interpreter):
    """Plain calls, too."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: object = False,
        scale: float | None = None,
        config: Config = SMALL,
        o: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE, written over NaN."""
        spec, _ = from_tensors(q, k, v, causal=causal)
        if o is None:
            o = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
        o.fill_(torch.nan)
        lse = torch.full(q.shape[:3], torch.nan)
        self.launcher(spec, config)(q, k, v, o, lse, q.shape[3] ** -0.5 if scale is None else scale)
        return o, lse


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreted.interpreter_of("forward", Interpreter) as started:
        yield started


def _assert_right(launch: Launch, spec: Spec, cases: tuple[Case, ...] = SMALL_CASES) -> None:
    interpreted.assert_right(launch, spec, cases)


def _random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _counting(seq_q: int, seq_kv: int, head_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Equal scores and v[j] = j: row i is the mean of the keys it sees, its LSE the logarithm of their number."""
    q = torch.zeros(1, 1, seq_q, head_dim, dtype=torch.float16)
    k = _random(1, 1, seq_kv, head_dim)
    v = torch.arange(seq_kv, dtype=torch.float16)[None, None, :, None].repeat(1, 1, 1, head_dim)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", CAUSAL)
def test_every_mask_and_dtype(interpreter: Interpreter, causal: Causal, dtype: DType) -> None:
    spec = Spec(head_dim=32, head_dim_v=32, dtype=dtype, causal=causal)
    _assert_right(interpreter.launcher(spec, SMALL), spec)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(1, 1), (16, 16), (40, 40), (72, 72), (96, 96), (72, 40), (16, 72), (1, 17), (96, 1)]
)
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_every_width(interpreter: Interpreter, head_dim: int, head_dim_v: int, causal: Causal) -> None:
    spec = Spec(head_dim=head_dim, head_dim_v=head_dim_v, dtype="fp16", causal=causal)
    tail, _, empty_rows, strided, _ = SMALL_CASES
    _assert_right(interpreter.launcher(spec, SMALL), spec, (tail, empty_rows, strided))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("seq_q", [1, 15, 17, 33])
@pytest.mark.parametrize("seq_kv", [1, 15, 17, 33])
def test_every_length(interpreter: Interpreter, seq_q: int, seq_kv: int, causal: Causal) -> None:
    spec = Spec(head_dim=16, head_dim_v=16, dtype="fp32", causal=causal)
    launch = interpreter.launcher(spec, SMALL)
    _assert_right(launch, spec, (Case("length", Problem(1, 2, 1, seq_q, seq_kv)),))


@pytest.mark.parametrize("seq_q", [3, 20])
def test_every_place_of_the_diagonal_in_a_block(interpreter: Interpreter, seq_q: int) -> None:
    spec = Spec(head_dim=16, head_dim_v=16, dtype="fp32", causal="bottom_right")
    lengths = tuple(Case(f"{seq_kv} keys", Problem(1, 1, 1, seq_q, seq_kv)) for seq_kv in range(1, 40))
    _assert_right(interpreter.launcher(spec, SMALL), spec, lengths)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("causal", "config"), [("none", SMALL), ("bottom_right", SMALL), ("top_left", _config(32, 32))]
)
def test_rows_of_p_sum_to_one(interpreter: Interpreter, dtype: torch.dtype, causal: Causal, config: Config) -> None:
    q, k = _random(1, 2, 35, 24, dtype=dtype), _random(1, 2, 19, 24, dtype=dtype, seed=1)
    v = torch.full_like(k, 0.75)
    o, lse = interpreter.forward(q, k, v, causal=causal != "none" and causal, config=config)
    sees = lse.isfinite()[..., None]
    # P is rounded to the inputs' dtype before it multiplies V, its sum is not: up to half a unit of P apart.
    torch.testing.assert_close(
        o, torch.where(sees, 0.75, 0.0).to(dtype).expand_as(o), rtol=0, atol=2 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "causal", "mean", "seen"),
    [
        (3, 5, True, [1, 1.5, 2], [3, 4, 5]),
        (3, 5, "top_left", [0, 0.5, 1], [1, 2, 3]),
        (5, 3, True, [0, 0, 0, 0.5, 1], [0, 0, 1, 2, 3]),
        (5, 3, "top_left", [0, 0.5, 1, 1, 1], [1, 2, 3, 3, 3]),
        (1, 20, True, [9.5], [20]),
        (1, 20, False, [9.5], [20]),
        (1, 20, "top_left", [0], [1]),
        (40, 1, True, [0] * 40, [0] * 39 + [1]),
    ],
)
def test_mean_of_the_visible_keys(
    interpreter: Interpreter, seq_q: int, seq_kv: int, causal: object, mean: list[float], seen: list[int]
) -> None:
    o, lse = interpreter.forward(*_counting(seq_q, seq_kv), causal=causal)
    assert o[0, 0].tolist() == [[value] * 16 for value in mean]
    natural = torch.tensor(seen, dtype=torch.float64).log()
    assert check.max_error(lse[0, 0], natural) <= 1e-6


def test_no_keys_at_all(interpreter: Interpreter) -> None:
    q, k = _random(1, 2, 5, 16), _random(1, 2, 0, 16)
    for causal in (False, True, "top_left"):
        o, lse = interpreter.forward(q, k, k, causal=causal)
        assert torch.equal(o, torch.zeros_like(q))
        assert torch.equal(lse, torch.full((1, 2, 5), -math.inf))


@pytest.mark.parametrize("seq_q", [1, 19])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (12, 2), (6, 2), (4, 4), (5, 1)])
def test_query_head_reads_its_group(interpreter: Interpreter, heads: int, kv_heads: int, seq_q: int) -> None:
    q, k = _random(2, heads, seq_q, 16), _random(2, kv_heads, 7, 16, seed=1)
    # One value per key head and batch element, so that the output names what was read.
    value = torch.arange(2 * kv_heads, dtype=torch.float16).reshape(2, kv_heads)
    o, _ = interpreter.forward(q, k, value[..., None, None].expand_as(k).contiguous(), causal=True)
    expected = value.repeat_interleave(heads // kv_heads, dim=1)
    visible = o[:, :, -1]
    torch.testing.assert_close(visible, expected[..., None].expand_as(visible), rtol=1e-3, atol=0)
    spec = Spec(head_dim=16, head_dim_v=16, dtype="fp16", causal="bottom_right")
    _assert_right(interpreter.launcher(spec, SMALL), spec, (Case("gqa", Problem(2, heads, kv_heads, seq_q, 21)),))


def _empty(values: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=values.dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every other row": lambda t: _empty(t, t.shape[0], t.shape[1], 2 * t.shape[2], t.shape[3])[:, :, ::2],
    "heads inside": lambda t: _empty(t, t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2),
    "odd row stride": lambda t: _empty(t, *t.shape[:3], t.shape[3] + 1)[..., : t.shape[3]],
    "offset of one": lambda t: _empty(t, t.numel() + 1)[1:].view(t.shape),
    "batch inside": lambda t: strided_like(t, (2, 1, 0, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_layout_of_one_tensor_changes_no_bit(interpreter: Interpreter, name: str, layout: str) -> None:
    shapes = {"q": (2, 2, 18, 24), "k": (2, 2, 21, 24), "v": (2, 2, 21, 40), "o": (2, 2, 18, 40)}
    given = {key: _random(*shape, seed=seed) for seed, (key, shape) in enumerate(shapes.items())}
    contiguous, lse = interpreter.forward(**given, causal=True)
    view = LAYOUTS[layout](given[name]).copy_(given[name])
    strided, strided_lse = interpreter.forward(**{**given, name: view}, causal=True)
    assert torch.equal(strided, contiguous)
    assert torch.equal(strided_lse, lse)
    slack = view.untyped_storage().nbytes() // view.element_size() - view.numel()
    memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    assert int(memory.isnan().sum()) == slack, "memory outside the view was written"
    assert slack or layout == "heads inside"


@pytest.mark.parametrize("advance", [0, 1])
@pytest.mark.parametrize("index_bits", [32, 64])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_layouts_may_all_differ(interpreter: Interpreter, causal: Causal, index_bits: int, advance: int) -> None:
    q, k, v = _random(2, 2, 37, 24), _random(2, 2, 53, 24, seed=1), _random(2, 2, 53, 24, seed=2)
    option, config = causal != "none" and causal, _config(16, 16, index_bits, advance)
    expected, _ = interpreter.forward(q, k, v, causal=option)
    views = [LAYOUTS[layout](t).copy_(t) for layout, t in zip(LAYOUTS, (q, k, v, q), strict=False)]
    assert len({view.stride() for view in views}) == 4
    o, _ = interpreter.forward(*views[:3], causal=option, config=config, o=views[3])
    assert torch.equal(o, expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_expanded_tensors_change_no_bit(interpreter: Interpreter, axis: int) -> None:
    def pair(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        shape = [2, 4, rows, 16]
        narrow = _random(*(1 if each == axis else size for each, size in enumerate(shape)), seed=seed)
        return narrow.expand(shape), narrow.expand(shape).contiguous()

    (q, q_full), (k, k_full), (v, v_full) = pair(5, 0), pair(33, 1), pair(33, 2)
    assert 0 in q.stride() and 0 in k.stride() and 0 in v.stride()
    for causal in (False, True):
        o, lse = interpreter.forward(q, k, v, causal=causal)
        expected, expected_lse = interpreter.forward(q_full, k_full, v_full, causal=causal)
        assert torch.equal(o, expected) and torch.equal(lse, expected_lse)


def test_batch_elements_are_independent(interpreter: Interpreter) -> None:
    q, k, v = _random(2, 2, 17, 16), _random(2, 1, 20, 16, seed=1), _random(2, 1, 20, 16, seed=2)
    o, lse = interpreter.forward(q, k, v, causal=True)
    for index in (0, 1):
        one, one_lse = interpreter.forward(q[index, None], k[index, None], v[index, None], causal=True)
        assert torch.equal(o[index], one[0]) and torch.equal(lse[index], one_lse[0])
    assert not torch.equal(o[0], o[1])


# An empty tensor has the null pointer, which is what compiled kernels get for None.
@pytest.mark.parametrize("lse", [None, torch.empty(0)], ids=["none", "null"])
def test_output_is_the_same_without_lse(interpreter: Interpreter, lse: Tensor | None) -> None:
    q, k, v = _random(1, 2, 17, 16), _random(1, 2, 20, 16, seed=1), _random(1, 2, 20, 16, seed=2)
    expected, _ = interpreter.forward(q, k, v, causal=True)
    o = torch.full_like(q, torch.nan)
    spec, _ = from_tensors(q, k, v, causal=True)
    interpreter.launcher(spec, SMALL)(q, k, v, o, lse, 0.25)
    assert torch.equal(o, expected)


def test_all_logits_of_minus_1e5(interpreter: Interpreter) -> None:
    q = torch.full((1, 1, 1, 128), 400.0, dtype=torch.float16)
    k = torch.full((1, 1, 16, 128), -22.0, dtype=torch.float16)
    v = _random(1, 1, 16, 128)
    o, lse = interpreter.forward(q, k, v)
    logit = -400.0 * 22.0 * 128 * 128**-0.5
    assert logit < -9.9e4
    torch.testing.assert_close(o.float(), v.float().mean(2, keepdim=True), rtol=1e-3, atol=1e-4)
    assert abs(lse.item() - (logit + math.log(16))) <= abs(logit) * 2**-21


def test_one_key_with_a_score_of_1e12_gives_its_value(interpreter: Interpreter) -> None:
    q = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    o, lse = interpreter.forward(q, q, q)
    assert torch.equal(o, q)
    logit = 64 * 133120.0**2 / 8
    assert abs(lse.item() - logit) <= logit * 2**-21


def test_fp16_scores_beyond_fp16(interpreter: Interpreter) -> None:
    q = torch.full((1, 1, 17, 128), 100.0, dtype=torch.float16)
    v = _random(1, 1, 17, 128)
    o, lse = interpreter.forward(q, q, v, causal=True)
    means = v[0, 0].double().cumsum(0) / torch.arange(1, 18)[:, None]
    torch.testing.assert_close(o[0, 0].double(), means, rtol=2e-3, atol=5e-4)
    logit = 1.28e6 * 128**-0.5
    counts = torch.arange(1, 18, dtype=torch.float64).log()
    assert check.max_error(lse[0, 0], logit + counts) <= logit * 2**-21


@pytest.mark.parametrize("scale", [None, 1.0, 1e-3, 1e-30])
def test_scale_is_used_as_given(interpreter: Interpreter, scale: float | None) -> None:
    # 72 is padded to 128 inside the kernel, which must not reach the default scale.
    q, k, v = (_random(1, 1, 9, 72, dtype=torch.float32, seed=seed) for seed in range(3))
    o, lse = interpreter.forward(q, k, v, scale=scale)
    true_scale = 0.1178511301977579 if scale is None else scale
    expected, expected_lse = plain_attention(q.double(), k.double(), v.double(), scale=true_scale)
    assert check.max_error(o, expected) <= 1e-5
    assert check.max_error(lse, expected_lse) <= 1e-5


TILES = [(16, 16), (16, 64), (64, 16), (32, 32), (64, 64), (128, 32), (128, 128)]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_configs_agree_within_rounding(interpreter: Interpreter, tile: tuple[int, int], causal: Causal) -> None:
    spec = Spec(head_dim=24, head_dim_v=24, dtype="fp16", causal=causal)
    prepared = check.prepare(spec, Case("tiles", Problem(1, 1, 1, 41, 57)), "cpu")
    given, (output, lse) = prepared.inputs, prepared.expected
    option = causal != "none" and causal
    first, first_lse = interpreter.forward(*given, causal=option, config=_config(*tile))
    assert check.max_error(first, output.value) <= output.allowed
    assert check.max_error(first_lse, lse.value) <= lse.allowed
    # How K and V are addressed changes no number at all.
    for index_bits, advance in ((32, 1), (64, 0), (64, 1)):
        again, again_lse = interpreter.forward(*given, causal=option, config=_config(*tile, index_bits, advance))
        assert torch.equal(again, first) and torch.equal(again_lse, first_lse)


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 3), (5, 7), (7, 5)])
@pytest.mark.parametrize("causal", CAUSAL)
def test_tiles_larger_than_the_sequence(interpreter: Interpreter, causal: Causal, seq_q: int, seq_kv: int) -> None:
    spec = Spec(head_dim=16, head_dim_v=16, dtype="bf16", causal=causal)
    launch = interpreter.launcher(spec, _config(128, 64))
    _assert_right(launch, spec, (Case("short", Problem(2, 2, 1, seq_q, seq_kv), strided=True),))
