"""Tasks of which some fail, in the ways in which candidates do; for child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def double(number: int) -> int:
    return 2 * number


def double_slowly(number: int) -> int:
    time.sleep(0.3)
    return 2 * number


def hang() -> None:
    time.sleep(3600)


def hang_in_a_child(path: Path) -> None:
    """As a compiler that waits for its assembler; the child's number stands in the file."""
    with subprocess.Popen(["sleep", "3600"]) as child:
        path.write_text(str(child.pid))


def abort() -> None:
    print("note: all is well", file=sys.stderr)
    print("kernel.py:7: error: the words that tell", file=sys.stderr, flush=True)
    os.abort()


def leave() -> None:
    os._exit(7)


def fail(error: Exception) -> None:
    raise error


def noise() -> str:
    """Write to standard error, below Python's own, and return who did."""
    os.write(2, b"from the worker\n")
    return str(os.getpid())


def compile_for_the_wrong_gpu() -> None:
    """Copy by Hopper's TMA, compiled for Ampere: LLVM aborts the process."""
    import tma_copy
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    source = GluonASTSource(tma_copy.kernel, {"X": f"tensordesc<fp16[64,64],{layout!r}>"}, {})
    triton.compile(source, target=GPUTarget("cuda", 80, 32))
