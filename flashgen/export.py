"""A variant as a source file of the user's own: it imports torch and triton, and nothing of flashgen."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from flashgen.errors import InputError, UnsupportedError
from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.render import render
from flashgen.select import Selection, select
from flashgen.spec import Spec

# The features that templates/lib/standalone.py.jinja has options for.
EXPORTED = ("softcap", "alibi", "bias", "window", "mask", "segments", "sinks")


def export(spec: Spec, problem: Problem, gpu: Gpu, path: Path, family: str | None = None) -> Selection:
    """Write the kernel that `attention` would launch on `gpu` to a file that runs without flashgen.

    Args:
        spec: what it computes.
        problem: the sizes that it should be fast at.
        gpu: the target; it need not be present.
        path: the file to write; an existing one is replaced.
        family: only this kernel family.

    Returns:
        which variant was written, and why.

    Raises:
        InputError: the file cannot be written.
        UnsupportedError: no kernel computes this on that GPU.
    """
    selection = select(spec, problem, gpu, family)
    write(selection.variant, path)
    return selection


def write(variant: Variant, path: Path) -> None:
    """Write one variant with an `attention()` function and a self-check; atomically."""
    if variant.spec.op == "decode":
        raise UnsupportedError(
            "an exported file takes no cache yet; `flashgen show --source` prints the kernel with its launch."
        )
    missing = [name for name in variant.spec.features if name not in EXPORTED]
    if missing:
        raise UnsupportedError(
            f"an exported file computes no {', '.join(missing)} yet; `flashgen show --source` prints the kernel with "
            "its launch."
        )
    text = render(variant, standalone=True)
    target = path.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.chmod(0o644)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Name a file in a folder that exists.") from error
