"""Child processes for work that may hang, abort or poison its process; a failure comes back as a value."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from pebble import ProcessExpired, ProcessPool

from flashgen.errors import MissingDependencyError

P = ParamSpec("P")
R = TypeVar("R")


# How a worker whose CUDA context is broken leaves, and how it says why.
_POISONED = 70
_LAST_WORDS = "flashgen worker ends: "


@dataclass(frozen=True)
class Failure:
    """Why a task did not return: its exception, a timeout or the death of its process.

    Attributes:
        kind: "timeout", "crash", or the exception's class name.
        reason: one sentence.
        fatal: the worker's CUDA context is broken, or its process gone.
    """

    kind: str
    reason: str
    fatal: bool = False


class Workers:
    """A pool of child processes with a time limit on every task.

    A worker that dies or runs out of time is replaced; its task yields a Failure, the others go on. What workers
    print (compiler dumps of hundreds of lines) is kept apart and quoted in the Failure.
    """

    def __init__(self, count: int, preload: str = "flashgen.compile") -> None:
        # forkserver: torch is imported once, no thread or CUDA context of this process is inherited.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["flashgen.starting", preload])
        with _ctrl_c_ignored():
            multiprocessing.forkserver.ensure_running()
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="flashgen-workers-")
        self._pool = self._new_pool()

    def _new_pool(self) -> Any:
        arguments = (self._folder.name, list(sys.path))
        return ProcessPool(max_workers=self.count, context=self._context, initializer=_start_worker, initargs=arguments)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.stop()
        self._pool.join()
        self._folder.cleanup()

    def submit(self, timeout: float, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `function(*args)` in a worker; `outcome` reads the result. The timeout counts from the task's start."""
        try:
            return self._schedule(timeout, function, args, kwargs)
        except RuntimeError:  # the pool broke: a worker died while it was idle
            self._pool.stop()
            self._pool.join()
            self._pool = self._new_pool()
            return self._schedule(timeout, function, args, kwargs)

    def _schedule(
        self, timeout: float, function: Callable[..., R], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Future[R]:
        future: Future[R] = self._pool.schedule(_guarded, args=(function, args, kwargs), timeout=timeout)
        return future

    def outcome(self, future: Future[R]) -> R | Failure:
        """Wait for a task: its value, or why there is none."""
        try:
            result = future.result()
        except TimeoutError as error:
            return Failure("timeout", f"did not finish within {error.args[1]:.0f} s", fatal=True)
        except ProcessExpired as error:
            return self._death(error)
        except (BrokenProcessPool, CancelledError):
            return Failure("crash", "its process died", fatal=True)
        if isinstance(result, Failure) and result.kind in ("ModuleNotFoundError", "ImportError"):
            raise MissingDependencyError(f"{result.reason}. Install it: no candidate can be tried without it.")
        return result

    def _death(self, error: ProcessExpired) -> Failure:
        """Why a process died: it said so itself, or its output tells."""
        text = ""
        with contextlib.suppress(OSError):
            text = (Path(self._folder.name) / f"{error.pid}.err").read_text(errors="replace")
        last = text.splitlines()[-1:]
        if error.exitcode == _POISONED and last and last[0].startswith(_LAST_WORDS):
            kind, _, reason = last[0].removeprefix(_LAST_WORDS).partition(" ")
            return Failure(kind, reason, fatal=True)
        return Failure("crash", f"its process died (exit code {error.exitcode}){_summary(text)}", fatal=True)


def _summary(text: str) -> str:
    """The telling line of a compiler's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|assert|fatal|LLVM", line, re.IGNORECASE)]
    chosen = (telling or lines)[:1]
    return f": {chosen[0][:300]}" if chosen else ""


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """What is started here ignores Ctrl-C from its first instruction on; later it would print a traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end_group(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


def _start_worker(folder: str, path: list[str]) -> None:
    sys.path[:] = path
    sys.excepthook = sys.__excepthook__
    descriptor = os.open(os.path.join(folder, f"{os.getpid()}.err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # Triton prints the whole PTX to stdout when ptxas fails, where --json must stay alone.
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # The terminal's Ctrl-C is for the parent: it would kill compilers in the middle.
    os.setpgid(0, 0)
    # Whoever stops a worker stops what it has started, too: a hung ptxas would keep its core for hours.
    signal.signal(signal.SIGTERM, _end_group)


def _guarded(function: Callable[..., R], args: tuple[object, ...], kwargs: dict[str, object]) -> R | Failure:
    """Any exception of a candidate is a Failure with its reason; our own exit requests pass."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        kind = type(error).__name__
        # Compilers put the place first and the complaint last, with an excerpt between.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        reason = f"{kind}: {lines[0] if len(lines) == 1 else f'{lines[0]} {lines[-1]}'}"[:300]
        if kind == "AcceleratorError" or re.search(r"CUDA error|illegal memory access", str(error)):
            # This process lives, but every later CUDA call in it would fail: end it, and only it.
            os.write(2, f"\n{_LAST_WORDS}{kind} {reason}\n".encode())
            os._exit(_POISONED)
        return Failure(kind, reason)
