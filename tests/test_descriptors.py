"""What launches with TMA descriptors remember."""

from __future__ import annotations

import pytest
import torch
from variants import HOPPER_BACKWARD_FUSED_GOLDEN, HOPPER_BACKWARD_GOLDEN

from flashgen import descriptors, launch
from flashgen.compile import launches
from flashgen.descriptors import Described
from flashgen.families import Variant


class Recorder:
    """A bound kernel that keeps what it is launched with, by a launcher that makes its own descriptors."""

    def __init__(self, taken: list[object]) -> None:
        self.taken = taken
        self.launcher = taken.extend

    def __call__(self, *arguments: object) -> None:
        self.taken.extend(arguments)


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
    assert tuple(described(q, k)) == tuple(described(q, k)) == expected
    # One tensor in two places has two layouts.
    assert tuple(described(k, q)) == (k.data_ptr(), 2, 4, 4, 1, q.data_ptr(), 2, 4, 8, 1)
    assert made == [(0, q.data_ptr()), (1, k.data_ptr()), (0, k.data_ptr()), (1, q.data_ptr())]


def test_what_is_no_descriptor_goes_as_it_is() -> None:
    made, make = _counting()
    q, workspace = torch.zeros(2, 4), torch.zeros(3)
    described = descriptors._remembering(make, [None, ([2, 4], [4, 1]), None, ([3], [1])])  # type: ignore[arg-type]
    taken = described(0.5, q, workspace, workspace)
    assert taken[0] == 0.5 and taken[6] is workspace
    assert taken[1:6] == [q.data_ptr(), 2, 4, 4, 1] and taken[7:] == [workspace.data_ptr(), 3, 1]
    # Descriptors are numbered among themselves.
    assert made == [(0, q.data_ptr()), (1, workspace.data_ptr())]


def test_what_is_remembered_does_not_grow_for_ever(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made, make = _counting()
    monkeypatch.setattr(descriptors, "MAX_REMEMBERED", 3)
    described = descriptors._remembering(make, [([1], [1])])  # type: ignore[arg-type]
    tensors = [torch.zeros(1) for _ in range(8)]
    assert [described(tensor)[0] for tensor in tensors] == [tensor.data_ptr() for tensor in tensors]
    assert [described(tensor)[0] for tensor in tensors] == [tensor.data_ptr() for tensor in tensors]
    assert len(made) > 8


@pytest.mark.parametrize(
    "variant", (*HOPPER_BACKWARD_GOLDEN, *HOPPER_BACKWARD_FUSED_GOLDEN), ids=lambda variant: variant.slug
)
def test_every_kernel_of_a_backward_gets_its_arguments(variant: Variant) -> None:
    spec = variant.spec
    lengths = {"q": (6, 100, spec.head_dim), "k": (2, 50, spec.head_dim), "v": (2, 50, spec.head_dim_v)}
    q, k, v = (torch.zeros(3, *shape) for shape in lengths.values())
    o = torch.zeros(3, 6, 100, spec.head_dim_v)
    tensors = (q, k, v, o, o, q, k, v)
    given = {name: torch.zeros(1) for name in launch.arguments_of(spec)}
    for each in launches(variant, *tensors):
        layouts = launch._layouts(variant, each.kernel, tensors)
        taken: list[object] = []
        run = descriptors.describing(Recorder(taken), layouts)
        run(*launch._pick(variant, each.kernel)(tuple(given.values())))
        parameters = getattr(launch.module_of(variant), each.kernel).params
        constants = [name for name in each.options if name.isupper()]
        assert len(taken) + len(each.sizes) + len(constants) == len(parameters)
        for parameter, argument in zip(parameters, taken, strict=False):
            name = launch._argument(parameter.name)
            if not parameter.name.endswith("_desc"):
                assert argument is given[name]
                continue
            assert isinstance(argument, Described) and argument.base is given[name]
            if parameter.name == "sums_desc":
                assert argument.shape == [launch.workspace_size(variant, q) // 256, 256]
                assert argument.strides == [256, 1]
            elif name == "workspace":
                assert (argument.shape, argument.strides) == ([36, 128], [128, 1])
            else:
                tensor = dict(zip(launch.laid_out(spec), tensors, strict=True))[name]
                assert (argument.shape, argument.strides) == (list(tensor.shape), list(tensor.stride()))


def test_zeros_of_graphs_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured call counts with nobody else gets; eager calls of a stream share theirs, and nothing is freed."""
    zeros, capturing = torch.zeros, [False]
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: zeros(count, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(descriptors, "RESERVE", 16)
    for name, empty in (("_zeros", {}), ("_left", {}), ("_reserves", [])):
        monkeypatch.setattr(descriptors, name, empty)
    capturing[0] = True
    assert len(descriptors.zeros_of(0, 1, 3)) == 3  # nothing was reserved yet
    capturing[0] = False
    eager = descriptors.zeros_of(0, 1, 3)
    assert descriptors.zeros_of(0, 1, 4) is eager and descriptors.zeros_of(0, 2, 3) is not eager
    larger = descriptors.zeros_of(0, 1, 5)
    assert len(larger) >= 5 and any(each is eager for each in descriptors._reserves)
    capturing[0] = True
    taken = [descriptors.zeros_of(0, 1, 6) for _ in range(4)]
    for place, each in enumerate(taken):
        assert len(each) == 6 and not each.any()
        each.fill_(place + 1)
    assert [each.unique().tolist() for each in taken] == [[1], [2], [3], [4]]
    assert not larger.any() and not eager.any()
    capturing[0] = False
    descriptors.zeros_of(0, 1, 5)
    assert len(descriptors._left[0]) == 16
