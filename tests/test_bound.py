"""A kernel that must have all of a GPU, where it has a part: the launch in another order takes over."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen import bound


class _Kernel(bound.Bound):
    """A launch that is counted, or fails as CUDA does."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.launched: list[tuple[Any, ...]] = []

    def _launch(self, pointers: tuple[Any, ...]) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)
        self.launched.append(pointers)


class _Cooperative(bound.Cooperative, _Kernel):
    def __init__(self, spare: _Kernel, error: str | None) -> None:
        _Kernel.__init__(self, error)
        self._spare = lambda: spare


def test_the_spare_is_for_launches_that_find_no_room() -> None:
    spare = _Kernel()
    roomy = _Cooperative(spare, None)
    roomy._launch((1, 2))
    assert roomy.launched == [(1, 2)] and not spare.launched
    _Cooperative(spare, "Triton Error [CUDA]: too many blocks in cooperative launch")._launch((3,))
    assert spare.launched == [(3,)]


def test_other_errors_are_not_hidden() -> None:
    spare = _Kernel()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _Cooperative(spare, "Triton Error [CUDA]: an illegal memory access")._launch(())
    assert not spare.launched
