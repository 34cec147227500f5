"""What generated decode kernels compute, run by Triton's interpreter on the CPU: numbers against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from interpreted import Interpreter, interpreter_of

from flashgen import check_decode
from flashgen.check import Accuracy
from flashgen.decode_cases import SMALL_DECODE_CASES, DecodeCase
from flashgen.problem import Problem
from flashgen.space import Config
from flashgen.spec import Causal, DType, Spec

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right")
CONFIG = Config(block_q=16, block_kv=16, num_warps=4, num_stages=2, blocks_per_sm=2)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreter_of("decode") as started:
        yield started


# Those with rows of their own, and with more than a block of them.
RAGGED = SMALL_DECODE_CASES[2:]


def _spec(**fields: Any) -> Spec:
    return Spec("decode", **{"head_dim": 32, "head_dim_v": 32, "dtype": "fp16", **fields})


def _assert_right(
    interpreter: Interpreter,
    spec: Spec,
    cases: tuple[DecodeCase, ...] = SMALL_DECODE_CASES,
    config: Config = CONFIG,
) -> None:
    """`check_decode` accepts it, and forgives bf16, which the interpreter truncates where hardware rounds."""
    expected = check_decode.expected_of

    def allow_truncation(*given: Any) -> Any:
        found = expected(*given)
        return [replace(each, allowed=2 * each.allowed) if each.name != "lse" else each for each in found]

    with pytest.MonkeyPatch.context() as patch:
        if spec.dtype == "bf16":
            patch.setattr(check_decode, "expected_of", allow_truncation)
        result = check_decode.check_decode(interpreter.decode_launcher(spec, config), spec, "cpu", cases)
    assert isinstance(result, Accuracy), result.reason


@pytest.mark.parametrize(("dtype", "paged"), [("fp16", True), ("bf16", False), ("fp32", True)])
@pytest.mark.parametrize("causal", CAUSAL)
def test_every_mask_and_dtype(interpreter: Interpreter, causal: Causal, paged: bool, dtype: DType) -> None:
    _assert_right(interpreter, _spec(dtype=dtype, causal=causal, paged=paged))


FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "window": {"window": True},
    "sinks": {"sinks": True},
    "all of them": {"softcap": True, "alibi": True, "window": True, "sinks": True},
}


@pytest.mark.parametrize(
    ("features", "causal"),
    [*((name, "bottom_right") for name in FEATURES), ("window", "none"), ("all of them", "none")],
)
def test_every_feature(interpreter: Interpreter, causal: Causal, features: str) -> None:
    _assert_right(interpreter, _spec(causal=causal, paged=True, **FEATURES[features]), SMALL_DECODE_CASES[1:3])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("appended", "fields"),
    [(True, {}), (False, {"varlen": True}), (True, {"varlen": True, "alibi": True, "sinks": True})],
    ids=str,
)
def test_ragged_queries_and_new_keys(
    interpreter: Interpreter, appended: bool, fields: dict[str, Any], paged: bool
) -> None:
    _assert_right(interpreter, _spec(causal="bottom_right", paged=paged, appended=appended, **fields), RAGGED)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("descale", ["tensor", "head", "token"])
@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_caches_of_8_bits(interpreter: Interpreter, cache: str, descale: str, paged: bool) -> None:
    spec = _spec(causal="bottom_right", cache=cache, descale=descale, paged=paged, appended=descale == "token")
    _assert_right(interpreter, spec, SMALL_DECODE_CASES[1:3])


@pytest.mark.parametrize("widths", [(72, 40), (16, 128), (288, 272), (1, 5)], ids=str)
@pytest.mark.parametrize("appended", [False, True])
def test_every_width(interpreter: Interpreter, widths: tuple[int, int], appended: bool) -> None:
    spec = _spec(head_dim=widths[0], head_dim_v=widths[1], causal="bottom_right", paged=True, appended=appended)
    _assert_right(interpreter, spec, SMALL_DECODE_CASES[1:3])


@pytest.mark.parametrize("block_kv", [16, 32, 64])
@pytest.mark.parametrize("page_size", [16, 20, 64])
def test_pages_and_blocks_of_every_size(interpreter: Interpreter, page_size: int, block_kv: int) -> None:
    config = Config(**{**CONFIG, "block_kv": block_kv, "block_q": 32})
    case = DecodeCase("pages", Problem(2, 7, 1, 5, 130), (125, 30), page_size=page_size, num_splits=2)
    _assert_right(interpreter, _spec(causal="bottom_right", paged=True, appended=page_size == 20), (case,), config)


@pytest.mark.parametrize(("group", "num_splits"), [(1, None), (3, 1), (4, 7), (7, None), (8, 3)])
def test_every_group(interpreter: Interpreter, group: int, num_splits: int | None) -> None:
    cases = tuple(
        DecodeCase(f"{seq_q} rows", Problem(2, 2 * group, 2, seq_q, 70), (70 - seq_q, 3), num_splits=num_splits)
        for seq_q in (1, 5)
    )
    _assert_right(interpreter, _spec(causal="bottom_right", appended=True), cases)


def test_lengths_beyond_the_cache(interpreter: Interpreter) -> None:
    """Lengths are those that there can be; new keys for which there is no room are neither kept nor seen."""
    case = DecodeCase("beyond", Problem(3, 2, 1, 4, 40), (40, 38, 0), page_size=20, num_splits=2)
    for paged in (False, True):
        _assert_right(interpreter, _spec(causal="bottom_right", appended=True, paged=paged), (case,))
