"""Launchers of generated files in Triton's interpreter."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from flashgen import check
from flashgen.cases import Case
from flashgen.check import Launch
from flashgen.check_decode import SCRATCH
from flashgen.combinations import allowed, traits
from flashgen.descales import FP8
from flashgen.families import FAMILIES, Variant
from flashgen.launch import arguments_of, laid_out, split_for
from flashgen.modifiers import Modifiers
from flashgen.paths import write_source
from flashgen.render import render
from flashgen.space import Config
from flashgen.spec import DTYPE_NAMES, Causal, Op, Spec
from flashgen.tensors import with_features

WORKERS = {"forward": "interpreter_worker.py", "backward": "backward_worker.py", "decode": "decode_worker.py"}
FAMILY = {"forward": "triton_fwd", "backward": "triton_bwd", "decode": "triton_decode"}
# Of `arguments_of` a spec: what is written.
RESULTS = ("dq", "dk", "dv", "dbias")


class Interpreter:
    """The other end of `interpreter_worker.py` or `backward_worker.py`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def launcher(self, spec: Spec, config: Config) -> Launch:
        """A function of `arguments_of` the spec, without the workspace."""
        variant = Variant(FAMILIES[FAMILY[spec.op]], spec, config)
        path = write_source(render(variant, interpreter=True), variant.slug)
        names = list(arguments_of(spec))
        written = [names.index(name) for name in (("o", "lse") if spec.op == "forward" else RESULTS) if name in names]

        def launch(*arguments: Tensor | float | None) -> None:
            given = list(arguments)
            if "workspace" in names:
                q = arguments[0]
                assert isinstance(q, Tensor)
                # 2 * batch * heads * seq_q, padded to 128; what was left in it must not matter.
                size = 2 * q.shape[0] * q.shape[1] * -(-q.shape[2] // 128) * 128
                given.insert(names.index("workspace"), torch.full((size,), torch.nan))
            self.run(path, given, [given[index] for index in written])

        return launch

    def run(self, path: Path, given: Sequence[object], written: Sequence[object]) -> None:
        """Run one file on arguments; `written` are those of them that the worker answers with."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # torch pickles no fp8: it travels as bytes.
        sent = [each.view(torch.uint8) if isinstance(each, Tensor) and each.dtype == FP8 else each for each in given]
        pickle.dump((path, *sent), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, str):
            pytest.fail(answer)
        # The whole memory, so that what was written outside the view is seen too.
        for mine, result in zip(written, answer, strict=True):
            if isinstance(mine, Tensor):
                mine.untyped_storage().copy_(result.untyped_storage())

    def decode_launcher(self, spec: Spec, config: Config) -> Launch:
        """A function of `arguments_of` a decode, without workspace and counters; a GPU of two multiprocessors."""
        variant = Variant(FAMILIES[FAMILY[spec.op]], spec, config)
        path = write_source(render(variant, interpreter=True), variant.slug)
        names = arguments_of(spec)

        def launch(*arguments: Tensor | float | None, num_splits: int | None = None) -> None:
            named = dict(zip((name for name in names if name not in SCRATCH), arguments, strict=True))
            views = [each for name in laid_out(spec) if isinstance(each := named[name], Tensor)]
            split = split_for(variant, *views, num_splits=num_splits, multiprocessors=2)
            # What was left in the workspace must not matter.
            named |= {"workspace": torch.full((split.workspace,), torch.nan)}
            named |= {"counters": torch.zeros(split.counters, dtype=torch.int32)}
            written = [named[name] for name in ("o", "lse", "k", "v", "counters")]
            self.run(path, [*(named[name] for name in names), split.splits], written)
            assert not named["counters"].any(), "counters are left as they were"  # type: ignore[union-attr]

        return launch


Kind = TypeVar("Kind", bound=Interpreter)


@contextmanager
def interpreter_of(op: str, kind: type[Kind] = Interpreter) -> Iterator[Kind]:  # type: ignore[assignment]
    """An interpreter of forward or backward files."""
    command = [sys.executable, str(Path(__file__).with_name(WORKERS[op]))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        yield kind(process)


def assert_right(launch: Launch, spec: Spec, cases: tuple[Case, ...]) -> None:
    """`check` accepts it, and forgives bf16, which the interpreter truncates where hardware rounds, twice the error."""
    prepare = check.prepare

    def allow_truncation(spec: Spec, case: Case, device: str) -> check.Prepared:
        prepared = prepare(spec, case, device)
        twice = tuple(
            each if each.name == "lse" else replace(each, allowed=2 * each.allowed) for each in prepared.expected
        )
        return replace(prepared, expected=twice) if "bf16" in (spec.out_dtype, spec.bias) else prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "prepare", allow_truncation)
        result = check.check(launch, spec, "cpu", cases)
    assert isinstance(result, check.Accuracy), result.reason


def spec_of(op: Op, q: Tensor, v: Tensor, modifiers: Modifiers, causal: Causal) -> Spec:
    """What a kernel has to compute for one call."""
    return with_features(Spec(op, q.shape[3], v.shape[3], DTYPE_NAMES[q.dtype], causal), modifiers)


def walked(op: Op) -> list[tuple[str, str]]:
    """Pairs of features to run for the op; heads as wide as can be take too long, and sequences need other tensors."""
    every = traits()
    return [
        pair
        for pair in allowed(op)
        # A backward finds sinks in the log-sum-exp: it is that of the other feature.
        if "varlen" not in pair and not (op == "backward" and "sinks" in pair)
        and not any("head_dim" in every[name] for name in pair)
    ]  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Only the row's own key, one side, blocks seen whole, wider than everything; of causal ones only the left side counts.
_SIDES = ((0, 0), (0, 5), (20, 1), (40, 33), (None, 2), (2, None), (1000, 1000))
WINDOWS = [("none", sides) for sides in _SIDES]
WINDOWS += [(causal, sides) for causal in ("bottom_right", "top_left") for sides in _SIDES[::2]]
LENGTHS = ((53, 37), (37, 70), (70, 70))
