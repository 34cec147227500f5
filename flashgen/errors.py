"""One class per kind of mistake; every message states the condition, the values and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlashgenError(Exception):
    """Base of everything that flashgen raises on purpose."""


class InputError(FlashgenError, ValueError):
    """A caller's tensors or options cannot be computed as asked."""


class UnsupportedError(FlashgenError, NotImplementedError):
    """The request is meaningful, but no kernel here does it."""


class UnknownNameError(FlashgenError, KeyError):
    """A GPU, family or entry that does not exist under this name."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0])


class MissingDependencyError(FlashgenError, ImportError):
    """An optional package that this operation needs is not installed."""


class GpuError(FlashgenError, RuntimeError):
    """The GPU that was asked for is not in this machine."""


class RenderError(FlashgenError, RuntimeError):
    """A template could not be rendered, or its text is not what Triton can import."""


class StoreError(FlashgenError, ValueError):
    """A file of tuned configurations cannot be read or written."""


class TuneError(FlashgenError, RuntimeError):
    """A search ended with no usable candidate."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known spelling, or lists what is known."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(options)}."
