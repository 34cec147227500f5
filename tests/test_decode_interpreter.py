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
from flashgen.space import Config
from flashgen.spec import Causal, DType, Spec

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right")
CONFIG = Config(block_q=16, block_kv=16, num_warps=4, num_stages=2, blocks_per_sm=2)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreter_of("decode") as started:
        yield started


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


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("causal", CAUSAL)
def test_every_mask_and_dtype(interpreter: Interpreter, causal: Causal, paged: bool, dtype: DType) -> None:
    _assert_right(interpreter, _spec(dtype=dtype, causal=causal, paged=paged))
