"""Options of a call: good ones are brought into one form, bad ones refused; and what each of them means, row by row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modified_calls import FEATURES
from torch import Tensor

import flashgen
from flashgen.errors import InputError
from flashgen.features import MODIFIERS
from flashgen.judging import UNLIMITED, window_sides
from flashgen.modifiers import Modifiers, Options, check_gradients, modifiers_from

SIZES = (2, 4, 5, 7)
Q = torch.zeros(2, 4, 5, 8)


def _judge(like: Tensor = Q, sizes: tuple[int, int, int, int] = SIZES, **options: Any) -> Modifiers:
    return modifiers_from(sizes, like, Options(**options))


def _refused(like: Tensor = Q, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        _judge(like, **options)
    assert isinstance(error.value, ValueError)
    return str(error.value)


def test_nothing_given_is_nothing() -> None:
    assert _judge() == Modifiers() and _judge().arguments("none") == ()


def _packed(q: Any, k: Any, v: Any, **options: Any) -> Any:
    ends = torch.tensor([0, q.shape[2]], dtype=torch.int32)
    one = (each[0].transpose(0, 1) for each in (q, k, v))
    return flashgen.attention_varlen(*one, ends, ends, q.shape[2], q.shape[2], **options)


@pytest.mark.parametrize("value", [0, -1.0, 0.0, math.nan, math.inf, 2.0**61, 2.0**-61, True, "30", [30]])
def test_softcaps_that_cap_nothing(value: object) -> None:
    message = _refused(softcap=value)
    assert "softcap must be None or a number from 8.7e-19 to 1.2e+18" in message and repr(value) in message


def test_softcap_is_a_float() -> None:
    softcap = _judge(softcap=30).softcap
    assert softcap == 30.0 and type(softcap) is float


@pytest.mark.parametrize("value", [5, "57", (1,), (1, 2, 3), torch.ones(2)])
def test_windows_that_are_no_pair(value: object) -> None:
    assert "window must be None or a pair (left, right)" in _refused(window=value)
    with pytest.raises(InputError, match="pair"):
        window_sides(value)


@pytest.mark.parametrize("value", [(-1, 0), (0, -3), (1.0, 2), (True, 1), ("1", 2)])
def test_windows_whose_sides_are_no_numbers_of_keys(value: object) -> None:
    message = _refused(window=value)
    assert "each side of window must be None or a number of keys from 0 on" in message and repr(value) in message


def test_windows_are_two_numbers() -> None:
    assert _judge(window=(3, None)).window == (3, UNLIMITED)
    assert _judge(window=[None, 0]).window == (UNLIMITED, 0)
    assert _judge(window=(2**40, 1)).window == (UNLIMITED, 1)
    assert _judge(window=(None, None)).window is None and _judge(window=(2**40, 2**31)).window is None
    assert _judge(window=(3, 5)).arguments("none") == (3, 5)
    # Causal kernels know the right side by themselves.
    assert _judge(window=(3, 5)).arguments("bottom_right") == (3, 0)


def test_windows_over_lengths_whose_distances_are_no_int32() -> None:
    with pytest.raises(InputError, match=f"window needs lengths below {2**29}, but got {2**30}"):
        _judge(sizes=(1, 1, 1, 2**30), window=(1, 1))
    assert _judge(sizes=(1, 1, 1, 2**30), window=(None, None)) == Modifiers()


TENSORS = {
    "alibi_slopes": torch.ones(4), "bias": torch.ones(5, 7), "mask": torch.ones(5, 7, dtype=torch.bool),
    "sinks": torch.ones(4), "segment_ids_q": torch.ones(2, 5, dtype=torch.int32),
    "segment_ids_kv": torch.ones(2, 7, dtype=torch.int32),
}  # fmt: skip


def _with(name: str, value: object) -> dict[str, object]:
    """Segment ids come in pairs."""
    pair = {each: TENSORS[each] for each in TENSORS if name.startswith("segment") and each.startswith("segment")}
    return {**pair, name: value}


@pytest.mark.parametrize("name", TENSORS)
def test_what_is_no_tensor_or_elsewhere(name: str) -> None:
    assert f"{name} must be None or a torch.Tensor, but got list" in _refused(**_with(name, [1.0]))
    elsewhere = TENSORS[name].to("meta")
    assert f"{name} must be on q's device cpu, but got meta. Move it there." in _refused(**_with(name, elsewhere))


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("alibi_slopes", (torch.int32, torch.bool)),
        ("bias", (torch.int64, torch.bool, torch.complex64)),
        ("mask", (torch.uint8, torch.int64, torch.float32)),
        ("sinks", (torch.int32, torch.bool)),
        ("segment_ids_q", (torch.int16, torch.float32, torch.bool)),
        ("segment_ids_kv", (torch.uint8, torch.float64)),
    ],
)
def test_tensors_of_other_dtypes(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        message = _refused(**_with(name, TENSORS[name].to(dtype)))
        assert f"{name} must hold" in message and f"but got {dtype}" in message
    if name == "mask":
        assert "add numbers as bias" in message


def test_a_bias_is_of_qs_dtype_or_fp32() -> None:
    for q_dtype, allowed in (
        (torch.bfloat16, {torch.bfloat16}),
        (torch.float64, {torch.float64}),
        (torch.float32, set()),
        (torch.float8_e4m3fn, {torch.bfloat16}),
    ):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            given = {"like": Q.to(q_dtype), "bias": torch.ones(5, 7, dtype=dtype)}
            if dtype in allowed | {torch.float32}:
                assert _judge(**given).bias.dtype == dtype  # type: ignore[union-attr]
            else:
                own = torch.bfloat16 if q_dtype == torch.float8_e4m3fn else q_dtype
                assert f"bias must be {own}, as the output, or torch.float32, but got {dtype}" in _refused(**given)


BROADCAST = [
    shape
    for keep in itertools.product((True, False), repeat=4)
    for whole in [tuple(size if kept else 1 for size, kept in zip(SIZES, keep, strict=True))]
    for shape in {whole, whole[1:], whole[2:], whole[3:], ()}
    if all(size == 1 for size in whole[: 4 - len(shape)])
]


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_what_is_broadcast(name: str) -> None:
    for shape in BROADCAST:
        given = torch.rand(shape) < 0.5
        given = given if name == "mask" else given.float()
        found = getattr(_judge(**{name: given}), name)
        assert torch.equal(found, given.expand(SIZES)) and found.data_ptr() == given.data_ptr()
    for wrong in ((2, 4, 5, 6), (7, 5), (3, 1, 1, 1), (2, 5, 7), (1, 2, 4, 5, 7), (0,)):
        message = _refused(**{name: torch.ones(wrong).to(TENSORS[name].dtype)})
        assert f"{name} must be broadcastable to [batch, heads, seq_q, seq_kv] = [2, 4, 5, 7]" in message
        assert str(list(wrong)) in message


def test_slopes_and_sinks_are_fp32_one_a_head() -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        modifiers = _judge(alibi_slopes=torch.ones(4, dtype=dtype), sinks=torch.ones(4, dtype=dtype))
        assert modifiers.alibi_slopes is not None and modifiers.alibi_slopes.shape == (2, 4)
        assert modifiers.sinks is not None and modifiers.sinks.shape == (4,)
        assert modifiers.alibi_slopes.dtype == modifiers.sinks.dtype == torch.float32
    wide = _judge(Q.double(), alibi_slopes=torch.ones(2, 4).double(), sinks=torch.ones(4).double())
    assert wide.alibi_slopes.dtype == wide.sinks.dtype == torch.float64  # type: ignore[union-attr]
    assert "alibi_slopes must be [4] or [2, 4], but got (5,)" in _refused(alibi_slopes=torch.ones(5))
    assert "sinks must be [4], one a head, but got (2, 4)" in _refused(sinks=torch.ones(2, 4))


def test_segment_ids_come_in_pairs_of_int32() -> None:
    ids = _judge(
        segment_ids_q=torch.ones(5, 2, dtype=torch.int64).T, segment_ids_kv=torch.ones(2, 7, dtype=torch.int32)
    )
    for each in (ids.segment_ids_q, ids.segment_ids_kv):
        assert each is not None and each.dtype == torch.int32 and each.is_contiguous()
    for name, other in (("segment_ids_q", "segment_ids_kv"), ("segment_ids_kv", "segment_ids_q")):
        message = _refused(**{name: TENSORS[name]})
        assert f"segment_ids_q and segment_ids_kv must be given together, but {other} is None" in message
        assert f"{name} must be [2, {5 if name[-1] == 'q' else 7}]" in _refused(**_with(name, TENSORS[name][:1]))


def test_what_has_no_gradient_says_so() -> None:
    table, starts = torch.ones(4, requires_grad=True), torch.tensor([0, 1], dtype=torch.int32)
    each = Q[0].transpose(0, 1)
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("mod_tensors", lambda: check_gradients(Options(score_mod="score + mod0[head]", mod_tensors=[table]))),
        (
            "mod_tensors",
            lambda: flashgen.attention(Q, Q, Q, score_mod="score + t[head]", mod_tensors={"t": table}),
        ),
        ("alibi_slopes", lambda: flashgen.attention_varlen(each, each, each, starts, starts, 1, 1, alibi_slopes=table)),
    )
    for name, call in calls:
        with pytest.raises(InputError, match=rf"{name} have no gradient here.*detach\(\)"):
            call()
        with torch.no_grad():
            call()


def test_arguments_are_named_by_the_spec() -> None:
    """One argument for each name that a spec of all features gives its kernels, in that order."""
    seed = torch.ones(2, dtype=torch.int64)
    whole = _judge(softcap=5.0, window=(1, 2), dropout_p=0.25, dropout_seed=seed, **TENSORS)
    others = {"window_left": 1, "window_right": 2, "dropout_threshold": 2**30, "dropout_scale": 4 / 3}
    arguments = dict(
        zip([name for feature in FEATURES for name in MODIFIERS[feature]], whole.arguments("none"), strict=True)
    )
    for name, value in arguments.items():
        if name == "mask":
            assert isinstance(value, Tensor) and value.dtype == torch.uint8 and value.stride() == (0, 0, 7, 1)
        else:
            known = {**whole._asdict(), **others, "dropout_seed": seed}[name]
            assert value is known or value == known


def _rows(q: Tensor, k: Tensor, v: Tensor, causal: object, scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention as the documentation tells it: one row after the other, one key after the other."""
    (batch, heads, seq_q, _), (kv_heads, seq_kv) = q.shape, k.shape[1:3]
    o, lse = q.new_zeros(batch, heads, seq_q, v.shape[3]), q.new_full((batch, heads, seq_q), -math.inf)
    for b, h, i in itertools.product(range(batch), range(heads), range(seq_q)):
        group, there = h // (heads // kv_heads), i if causal == "top_left" else i + seq_kv - seq_q
        scores, values = [], []
        for j in range(seq_kv):
            s = float(q[b, h, i] @ k[b, group, j]) * scale
            if (cap := options.get("softcap")) is not None:
                s = math.tanh(s / cap) * cap
            if (slopes := options.get("alibi_slopes")) is not None:
                s -= float(slopes[h]) * abs(j - (i + seq_kv - seq_q))
            if (bias := options.get("bias")) is not None:
                s += float(bias[b, h, i, j])
            left, right = options.get("window") or (None, None)
            hidden = causal is not False and j > there
            hidden |= left is not None and j < there - left
            hidden |= right is not None and j > there + right
            hidden |= (mask := options.get("mask")) is not None and not mask[b, h, i, j]
            if (ids := options.get("segment_ids_q")) is not None:
                hidden |= int(ids[b, i]) != int(options["segment_ids_kv"][b, j])
            if not hidden:
                scores.append(s)
                values.append(v[b, group, j])
        if (sinks := options.get("sinks")) is not None:
            scores.append(float(sinks[h]))
            values.append(v.new_zeros(v.shape[3]))
        if scores:
            logits = torch.tensor(scores, dtype=q.dtype)
            lse[b, h, i] = logits.logsumexp(0)
            o[b, h, i] = logits.softmax(0) @ torch.stack(values)
    return o, lse


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _options(seq_q: int, seq_kv: int) -> dict[str, dict[str, Any]]:
    """Every feature, by name."""
    return {
        "window": {"window": (2, 1)},
        "left window": {"window": (1, None)},
        "right window": {"window": (None, 0)},
        "softcap": {"softcap": 0.7},
        "alibi": {"alibi_slopes": _random(2, seed=5).abs()},
        "bias": {"bias": _random(2, 2, seq_q, seq_kv, seed=6) * 2},
        "mask": {"mask": _random(2, 2, seq_q, seq_kv, seed=7) > 0.3},
        "sinks": {"sinks": _random(2, seed=8)},
        "segments": {
            "segment_ids_q": torch.tensor([[0, 0, 1, 1, 2, 3][:seq_q], [4, 4, 4, 5, 5, 5][:seq_q]]),
            "segment_ids_kv": torch.tensor([[0, 1, 1, 1, 2, 2][:seq_kv], [5, 4, 4, 4, 5, 9][:seq_kv]]),
        },
    }


EVERY = tuple(_options(1, 1))
PAIRS = (("softcap", "bias"), ("window", "alibi"), ("mask", "segments"), ("window", "sinks"), ("bias", "mask"))


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("features", [*((name,) for name in EVERY), *PAIRS, tuple(_options(1, 1))[2:]], ids="+".join)
def test_each_option_means_what_is_written(features: tuple[str, ...], causal: bool | str) -> None:
    for seq_q, seq_kv in ((3, 5), (6, 4), (1, 6), (4, 4)):
        q, k, v = _random(2, 2, seq_q, 3, seed=1), _random(2, 1, seq_kv, 3, seed=2), _random(2, 1, seq_kv, 2, seed=3)
        known = _options(seq_q, seq_kv)
        options: dict[str, Any] = {}
        for feature in features:
            options |= known[feature]
        actual = flashgen.attention(q, k, v, causal=causal, scale=0.9, return_lse=True, **options)
        torch.testing.assert_close(actual, _rows(q, k, v, causal, 0.9, **options))


def test_windows_include_both_ends() -> None:
    """Where all scores are equal the output counts keys: row i of 2 stands at key i + 3 of 5."""
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 5, 1)
    seen = torch.eye(5)[None, None]
    for causal, window, rows in (
        (False, (1, 1), ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1])),
        (False, (0, 0), ([0, 0, 0, 1, 0], [0, 0, 0, 0, 1])),
        (True, (2, 9), ([0, 1, 1, 1, 0], [0, 0, 1, 1, 1])),
        ("top_left", (0, None), ([1, 0, 0, 0, 0], [0, 1, 0, 0, 0])),
    ):
        o = flashgen.attention(q, k, seen, causal=causal, window=window)
        assert isinstance(o, Tensor) and (o[0, 0] > 0).int().tolist() == [*rows]


def test_the_cap_comes_before_the_bias() -> None:
    q, k = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1) * 1000.0
    _, lse = flashgen.attention(q, k, k, softcap=2.0, bias=torch.full((), 5.0), return_lse=True)
    assert lse.item() == 7.0


@pytest.mark.parametrize("seq_kv", [0, 4])
def test_rows_that_see_nothing_have_the_sink_or_nothing(seq_kv: int) -> None:
    q, k = _random(1, 3, 2, 4, seed=1), _random(1, 1, seq_kv, 4, seed=2)
    mask, sinks = torch.zeros(2, seq_kv, dtype=torch.bool), torch.tensor([0.5, -2.0, -math.inf])
    o, lse = flashgen.attention(q, k, k, mask=mask, return_lse=True)
    assert not o.any() and (lse == -math.inf).all()
    o, lse = flashgen.attention(q, k, k, mask=mask, sinks=sinks, return_lse=True)
    assert not o.any() and torch.equal(lse, sinks.double()[None, :, None].expand(1, 3, 2))


@pytest.mark.parametrize("call", [flashgen.attention, _packed], ids=["attention", "attention_varlen"])
def test_a_cap_that_is_nothing_beside_the_scale(call: Any) -> None:
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(InputError, match=r"scale must be at most 1\.3e\+30 times softcap, but got scale=1e"):
        call(q, q, q, scale=1e30, softcap=1e-3)
    assert call(q, q, q, scale=1e30, softcap=1.0).isfinite().all()
