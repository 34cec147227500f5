"""A launch that must have all of a GPU, where it has a part: another order takes over."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.bound import Run, with_spare


def _spare(launched: list[tuple[Any, ...]]) -> Run:
    return lambda *given: launched.append(given)


def _failing(words: str) -> Run:
    def run(*given: Any) -> None:
        raise RuntimeError(words)

    return run


def test_the_spare_is_for_launches_that_find_no_room() -> None:
    launched: list[tuple[Any, ...]] = []
    spared: list[tuple[Any, ...]] = []
    with_spare(_spare(launched), lambda: _spare(spared))(1, 2)
    assert launched == [(1, 2)] and not spared
    with_spare(_failing("Triton Error [CUDA]: too many blocks in cooperative launch"), lambda: _spare(spared))(3)
    assert spared == [(3,)]


def test_other_errors_are_not_hidden() -> None:
    spared: list[tuple[Any, ...]] = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        with_spare(_failing("Triton Error [CUDA]: an illegal memory access"), lambda: _spare(spared))()
    assert not spared
