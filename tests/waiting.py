"""Calls that must not wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Whatever waits for the GPU raises, as far as torch sees it."""
    try:
        with warnings.catch_warnings():
            # Torch says once that it does not see all; where warnings are errors, that would come with the mode set.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
