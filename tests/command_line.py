"""`flashgen` on the command line, in this process or in one of its own, where torch sees no GPU."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flashgen.cli import main

# Seconds until a process that should do something counts as hung.
PATIENCE = 120


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: object
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one sentence of a command that failed; nothing but click's usage may stand before it."""
        *before, last = self.err.strip().splitlines()
        assert last.startswith("Error: "), self.err
        assert all(line.startswith(("Usage: ", "Try ")) or not line for line in before), self.err
        return last.removeprefix("Error: ")


def run(*arguments: str | Path) -> Ended:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["flashgen", *map(str, arguments)])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as end:
            main()
    return Ended(end.value.code or 0, out.getvalue(), err.getvalue())


def start(home: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start a command in a process and process group of its own, with `home` as $FLASHGEN_HOME."""
    return subprocess.Popen(
        [sys.executable, "-c", "from flashgen.cli import main; main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "FLASHGEN_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""},
    )


def end(process: subprocess.Popen[str]) -> Ended:
    """Wait until a started command is over."""
    out, err = process.communicate(timeout=PATIENCE)
    return Ended(process.returncode, out, err)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look again and again; a condition that never comes fails the test."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.02)


def processes_of(home: Path) -> list[str]:
    """Command lines of all living processes, whatever their parent, whose $FLASHGEN_HOME is `home`."""
    mark = f"FLASHGEN_HOME={home}\0".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (place / "environ").read_bytes() + b"\0":
                found.append((place / "cmdline").read_text().replace("\0", " "))
    return found
