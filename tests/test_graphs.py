"""How many launches and caches a graph has; the times themselves are for a GPU."""

from __future__ import annotations

import pytest

from flashgen.benchmark import kv_bytes
from flashgen.graphs import GRAPH_BYTES, LAUNCHES, MAX_COPIES, ROTATED_BYTES, copies_of, in_turns
from flashgen.problem import Problem
from flashgen.spec import Spec

SPEC = Spec("decode", 128, 128, "bf16", "bottom_right")


def test_what_a_decode_reads() -> None:
    problem = Problem(16, 32, 8, 1, 4096)
    assert kv_bytes(SPEC, problem) == 16 * 8 * 4096 * (128 + 128) * 2
    eight_bits = Spec("decode", 128, 64, "bf16", "bottom_right", cache="int8")
    assert kv_bytes(eight_bits, problem) == 16 * 8 * 4096 * (128 + 64)


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**24, 2**28, ROTATED_BYTES - 1, ROTATED_BYTES, 2**40])
def test_a_cache_is_read_again_only_after_others_or_it_is_large(size: int) -> None:
    copies = copies_of(size)
    assert 1 <= copies <= MAX_COPIES
    assert copies * size >= ROTATED_BYTES or copies == MAX_COPIES


@pytest.mark.parametrize(
    ("copies", "size", "launches"),
    [(64, 2**24, 64), (4, 2**28, 12), (3, 2**29, 9), (1, 2**30, 4), (1, 2**31, 2), (1, 2**40, 1), (7, 1, 14)],
)
def test_every_cache_is_read_equally_often(copies: int, size: int, launches: int) -> None:
    calls = [lambda number=number: number for number in range(copies)]
    order = [call() for call in in_turns(calls, size)]
    assert len(order) == launches
    assert order == [*range(copies)] * (launches // copies)
    assert launches >= LAUNCHES or launches * size >= GRAPH_BYTES
