"""What launches with TMA descriptors remember."""

from __future__ import annotations

import torch

from flashgen import descriptors
from flashgen.descriptors import Described


def _counting() -> tuple[list[tuple[int, int]], object]:
    made: list[tuple[int, int]] = []

    def make(described: Described, number: int) -> list[object]:
        made.append((number, described.base.data_ptr()))
        return [described.base.data_ptr(), *described.shape, *described.strides]

    return made, make


def test_a_descriptor_is_made_once_for_every_address() -> None:
    made, make = _counting()
    q, k = torch.zeros(2, 4), torch.zeros(2, 4)
    described = descriptors._remembering(make, [([2, 4], [4, 1]), ([2, 4], [8, 1])])  # type: ignore[arg-type]
    expected = (q.data_ptr(), 2, 4, 4, 1, k.data_ptr(), 2, 4, 8, 1)
    assert described(q, k) == described(q, k) == expected
    # One tensor in two places has two layouts.
    assert described(k, q) == (k.data_ptr(), 2, 4, 4, 1, q.data_ptr(), 2, 4, 8, 1)
    assert made == [(0, q.data_ptr()), (1, k.data_ptr()), (0, k.data_ptr()), (1, q.data_ptr())]


def test_what_is_remembered_does_not_grow_for_ever(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made, make = _counting()
    monkeypatch.setattr(descriptors, "MAX_REMEMBERED", 3)
    described = descriptors._remembering(make, [([1], [1])])  # type: ignore[arg-type]
    tensors = [torch.zeros(1) for _ in range(8)]
    assert [described(tensor)[0] for tensor in tensors] == [tensor.data_ptr() for tensor in tensors]
    assert [described(tensor)[0] for tensor in tensors] == [tensor.data_ptr() for tensor in tensors]
    assert len(made) > 8
