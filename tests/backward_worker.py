"""Runs generated backward files in Triton's interpreter, for `test_backward_interpreter.py`.

As `interpreter_worker.py`: reads pickled (path, arguments of `launch`), answers with what was written or a traceback.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import traceback
from pathlib import Path

from flashgen.compile import load_module


def _run(path: Path, *arguments: object) -> tuple[object, ...]:
    module = load_module(path)
    kernels = (module.delta_kernel, module.dkdv_kernel, module.dq_kernel)
    assert {type(kernel).__name__ for kernel in kernels} == {"InterpretedFunction"}, "TRITON_INTERPRET came too late"
    module.launch(*arguments)
    # dq, dk, dv and, where there is a bias, dbias.
    names = list(inspect.signature(module.launch).parameters)
    return arguments[names.index("dq") : names.index("workspace")]


def main() -> None:
    # Nothing but answers may reach stdout.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: object = _run(*request)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
