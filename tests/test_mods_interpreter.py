"""The caller's own expressions in generated kernels, forward and backward, in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from interpreted import Interpreter, assert_right, interpreter_of
from mods import MASKS, SCORES, features

from flashgen.cases import SMALL_CASES, Case
from flashgen.problem import Problem
from flashgen.space import Config
from flashgen.spec import Causal, Spec

FORWARD = Config(block_q=16, block_kv=16, num_warps=4, num_stages=2, index_bits=32, advance=0)
BACKWARD = Config(
    dkdv_block_q=16, dkdv_block_kv=32, dkdv_num_warps=4, dkdv_num_stages=2,
    dq_block_q=32, dq_block_kv=16, dq_num_warps=4, dq_num_stages=2,
)  # fmt: skip
# Many small blocks, so that some are hidden, some partly and some seen whole; and what is strided.
CASES = (Case("blocks", Problem(1, 2, 1, 53, 70)), SMALL_CASES[3])


@pytest.fixture(scope="module")
def forward() -> Iterator[Interpreter]:
    with interpreter_of("forward") as running:
        yield running


@pytest.fixture(scope="module")
def backward() -> Iterator[Interpreter]:
    with interpreter_of("backward") as running:
        yield running


@pytest.mark.parametrize("name", SCORES)
def test_every_score(forward: Interpreter, backward: Interpreter, name: str) -> None:
    causal: Causal = "none" if name == "hiding" else "bottom_right"
    for op, running, config in (("forward", forward, FORWARD), ("backward", backward, BACKWARD)):
        spec = Spec(op, 16, 16, "fp32", causal, **features("score_mod", name))  # type: ignore[arg-type]
        assert_right(running.launcher(spec, config), spec, CASES)


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(forward: Interpreter, backward: Interpreter, name: str) -> None:
    for op, running, config in (("forward", forward, FORWARD), ("backward", backward, BACKWARD)):
        spec = Spec(op, 16, 16, "fp32", **features("mask_mod", name))  # type: ignore[arg-type]
        assert_right(running.launcher(spec, config), spec, CASES)


@pytest.mark.parametrize("feature", ["softcap", "bias", "window", "mask", "segments", "sinks", "causal"])
def test_beside_other_features(forward: Interpreter, backward: Interpreter, feature: str) -> None:
    both = features("score_mod", "cap") | features("mask_mod", "window by head")
    other = {"causal": "bottom_right"} if feature == "causal" else {feature: "fp32" if feature == "bias" else True}
    spec = Spec("forward", 16, 16, "fp32", **both, **other)  # type: ignore[arg-type]
    assert_right(forward.launcher(spec, FORWARD), spec, CASES[1:])
    assert_right(backward.launcher(spec.backward, BACKWARD), spec.backward, CASES[1:])


@pytest.mark.parametrize("name", ["nothing", "prefix", "random"])
@pytest.mark.parametrize("other", [{}, {"window": True}, {"segments": True}], ids="+".join)
def test_rows_that_see_nothing(forward: Interpreter, backward: Interpreter, other: dict[str, bool], name: str) -> None:
    """Where no row of a block sees a key, ranges of blocks are empty in more than one way."""
    spec = Spec("forward", 16, 16, "fp32", "bottom_right", **other, **features("mask_mod", name))
    cases = (SMALL_CASES[2], Case("tail", Problem(1, 2, 1, 62, 32)))
    assert_right(forward.launcher(spec, FORWARD), spec, cases)
    assert_right(backward.launcher(spec.backward, BACKWARD), spec.backward, cases)


def test_two_expressions_read_the_same_tensors(forward: Interpreter, backward: Interpreter) -> None:
    spec = Spec(
        "forward", 16, 16, "fp32", score_mod="(score + mod0[head, q_idx])", mask_mod="(mod1[q_idx] == mod1[kv_idx])",
        mod_tensors="fp16[2] int64[1]",
    )  # fmt: skip
    assert_right(forward.launcher(spec, FORWARD), spec, CASES[1:])
    assert_right(backward.launcher(spec.backward, BACKWARD), spec.backward, CASES[1:])
