"""Runs generated files of decode in Triton's interpreter; as `interpreter_worker.py`, which says why."""

from __future__ import annotations

from pathlib import Path

import interpreter_worker
import torch
from torch import Tensor

from flashgen.compile import load_module
from flashgen.descales import FP8


def _run(path: Path, *arguments: object) -> tuple[object, ...]:
    """Arguments of `launch`; answers with output, log-sum-exp, both caches and the counters."""
    module = load_module(path)
    assert type(module.kernel).__name__ == "InterpretedFunction", "TRITON_INTERPRET was not set before triton's import"
    given = [each.view(FP8) if getattr(each, "dtype", None) == torch.uint8 else each for each in arguments]
    module.launch(*given)
    _, k, v, o, lse, _, counters = given[:7]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    return o, lse, *(each.view(torch.uint8) if each.dtype == FP8 else each for each in (k, v)), counters


if __name__ == "__main__":
    interpreter_worker.main(_run)
