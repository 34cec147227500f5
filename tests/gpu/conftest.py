"""What all tests on a GPU need."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def device_thread() -> None:
    """Give autograd's thread of the device a context: torch warns when the first thing it does there is a product."""
    if torch.cuda.is_available():
        one = torch.ones(8, device="cuda", requires_grad=True)
        (one * one).sum().backward()
