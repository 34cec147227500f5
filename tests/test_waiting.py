"""The mode in which waits are errors ends with its test: what comes later may wait."""

from __future__ import annotations

import warnings

import pytest
import torch
from waiting import waits_are_errors


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is set; as in torch, a warning comes once, behind its effect."""
    found: list[str] = []

    def set_mode(mode: str) -> None:
        found.append(mode)
        if len(found) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return found


def test_the_warning_of_torch_is_no_error(modes: list[str]) -> None:
    for _ in range(2):
        with waits_are_errors():
            assert modes[-1] == "error"
        assert modes[-1] == "default"


def test_the_mode_ends_with_a_failure(modes: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), waits_are_errors():
        raise ZeroDivisionError
    assert modes == ["error", "default"]
