"""Sequences behind each other by generated kernels, with all that goes with them, in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreted import Interpreter, interpreter_of, random
from torch import Tensor

from flashgen.check import FLOOR, max_error
from flashgen.combinations import allowed, together, traits
from flashgen.modifiers import Modifiers, Options, modifiers_from
from flashgen.reference import plain_attention
from flashgen.reference_backward import tiled_backward
from flashgen.space import Config
from flashgen.spec import Op, Spec

FORWARD = Config(block_q=16, block_kv=16, num_warps=4, num_stages=2, index_bits=32, advance=0)
BACKWARD = Config(
    dkdv_block_q=16, dkdv_block_kv=16, dkdv_num_warps=4, dkdv_num_stages=2,
    dq_block_q=16, dq_block_kv=16, dq_num_warps=4, dq_num_stages=2,
)  # fmt: skip
# No queries, no keys, one block and more than one, more rows than keys; one token of each belongs to nobody.
Q_LENGTHS, K_LENGTHS = (21, 0, 5, 18, 1), (9, 3, 37, 0, 16)
TOKENS = sum(Q_LENGTHS) + 1, sum(K_LENGTHS) + 1
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": random(5, 2, seed=9).abs()},
    "window": {"window": (7, 4)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": torch.tensor([5, 2])},
    "sinks": {"sinks": random(2, seed=8)},
}


def _walked(op: Op) -> list[str]:
    """What goes with varlen, none of it first; heads as wide as can be take too long; test_fp8_interpreter has fp8."""
    partners = {name for pair in allowed(op) if "varlen" in pair for name in pair if name != "varlen"}
    elsewhere = {name for name, fields in traits().items() if {"head_dim", "dtype"} & set(fields)}
    return ["varlen", *(name for name in traits() if name in partners - elsewhere)]


@pytest.fixture(scope="module", params=["forward", "backward"])
def interpreter(request: pytest.FixtureRequest) -> Iterator[tuple[Op, Interpreter]]:
    with interpreter_of(request.param) as running:
        yield request.param, running


def _ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _view(tensor: Tensor, longest: int) -> Tensor:
    """[sequences, heads, longest, width], all of which start at the first token."""
    heads, width = tensor.shape[1:]
    return tensor.as_strided((len(Q_LENGTHS), heads, longest, width), (0, tensor.stride(1), tensor.stride(0), 1))


class Call:
    """Tensors of one call, and what is right for each sequence of it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        given = {name: value for feature in spec.features for name, value in OPTIONS.get(feature, {}).items()}
        self.q, self.do = random(TOKENS[0], 2, 16, seed=1), random(TOKENS[0], 2, 16, seed=2)
        self.k, self.v = random(TOKENS[1], 1, 16, seed=3), random(TOKENS[1], 1, 16, seed=4)
        self.dlse = random(2, TOKENS[0], seed=5)
        # Of its keys the third sequence uses some.
        self.used = torch.tensor([9, 3, 30, 0, 16], dtype=torch.int32)
        sizes = (5, 2, max(Q_LENGTHS), max(K_LENGTHS))
        self.modifiers = modifiers_from(sizes, self.q, Options(**given))
        self.o, self.lse = torch.zeros(TOKENS[0], 2, 16), torch.full((2, TOKENS[0]), -torch.inf)
        self.gradients = [torch.zeros(each.shape) for each in (self.q, self.k, self.v)]
        starts = zip(_ends(Q_LENGTHS).tolist(), _ends(K_LENGTHS).tolist(), strict=True)
        for index, (first, start) in enumerate(itertools.islice(starts, 5)):
            rows = slice(first, first + Q_LENGTHS[index])
            self._fill(rows, slice(start, start + int(self.used[index])), index)

    def _fill(self, rows: slice, keys: slice, index: int) -> None:
        """What one sequence comes to, in float64."""
        q, do, k, v = (
            each[some].transpose(0, 1)[None].double()
            for each, some in ((self.q, rows), (self.do, rows), (self.k, keys), (self.v, keys))
        )
        own: Modifiers = self.modifiers.to(Tensor.double)
        if own.alibi_slopes is not None:
            own = own._replace(alibi_slopes=own.alibi_slopes[index : index + 1])
        if own.dropout is not None:
            own = own._replace(dropout=own.dropout._replace(first=index))
        o, lse = plain_attention(q, k, v, causal=self.spec.causal, modifiers=own)
        self.o[rows], self.lse[:, rows] = o[0].transpose(0, 1).float(), lse[0].float()
        dlse = self.dlse[None, :, rows].double()
        found = tiled_backward(q, k, v, o, lse, do, dlse, causal=self.spec.causal, modifiers=own)
        for result, of_one, some in zip(self.gradients, found, (rows, keys, keys), strict=False):
            assert of_one is not None
            result[some] = of_one[0].transpose(0, 1).float()

    def views(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of queries and of keys as kernels see them."""
        return [_view(each, max(Q_LENGTHS if len(each) == TOKENS[0] else K_LENGTHS)) for each in tensors]

    def lengths(self) -> tuple[Tensor | int, ...]:
        return _ends(Q_LENGTHS), _ends(K_LENGTHS), self.used, *TOKENS


def _assert_close(actual: Tensor, expected: Tensor, name: str) -> None:
    error = max_error(actual, expected)
    assert error <= FLOOR, f"{name} is off by {error:.3g}"


@pytest.mark.parametrize("partner", _walked("forward"))
def test_all_that_goes_with_it(interpreter: tuple[Op, Interpreter], partner: str) -> None:
    op, running = interpreter
    if op == "backward" and partner == "sinks":
        # A backward finds them in the log-sum-exp: one kernel more or less, but other numbers.
        assert together("sinks", "varlen", op) == Spec(op, varlen=True)
    fields: dict[str, Any] = {"head_dim": 16, "head_dim_v": 16, "dtype": "fp32"}
    call = Call(Spec(**fields, varlen=True) if partner == "varlen" else together(partner, "varlen", **fields))
    spec = call.spec if op == "forward" else call.spec.backward
    if op == "forward":
        # Tokens of no sequence are not written.
        o, lse = torch.zeros(call.o.shape), torch.full(call.lse.shape, -torch.inf)
        given = (*call.modifiers.arguments(spec.causal), *call.lengths())
        running.launcher(spec, FORWARD)(*call.views(call.q, call.k, call.v, o), lse, *given, 0.25)
        _assert_close(o, call.o, "o")
        _assert_close(lse, call.lse, "lse")
        return
    results = [torch.zeros(each.shape) for each in call.gradients]
    q, k, v, o, do, *gradients = call.views(call.q, call.k, call.v, call.o, call.do, *results)
    given = (*call.modifiers._replace(sinks=None).arguments(spec.causal), *call.lengths())
    running.launcher(spec, BACKWARD)(q, k, v, o, call.lse, do, call.dlse, *gradients, *given, 0.25)
    for name, actual, expected in zip(("dq", "dk", "dv"), results, call.gradients, strict=True):
        _assert_close(actual, expected, name)
