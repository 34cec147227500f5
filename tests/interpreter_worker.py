"""Runs generated files in Triton's interpreter, for `test_interpreter.py`.

A process of its own, because `TRITON_INTERPRET` counts only when set before triton is imported and rules out compiling.
Reads pickled (path, arguments of `launch`) from stdin; answers with the written tensors, or with a traceback.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flashgen.compile import load_module
from flashgen.descales import FP8


def _run(path: Path, *arguments: object) -> tuple[object, object]:
    module = load_module(path)
    assert type(module.kernel).__name__ == "InterpretedFunction", "TRITON_INTERPRET was not set before triton's import"
    # q, k and v in bytes are fp8, which torch does not pickle.
    inputs = (each.view(FP8) if getattr(each, "dtype", None) == torch.uint8 else each for each in arguments[:3])
    module.launch(*inputs, *arguments[3:])
    o, lse = arguments[3:5]
    assert isinstance(o, Tensor)
    return o, lse


def main(run: Callable[..., object] = _run) -> None:
    # Nothing but answers may reach stdout.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: object = run(*request)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
