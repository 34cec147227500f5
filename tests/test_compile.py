"""Text -> file -> module -> kernel: written once, imported once, compiled for GPUs that are not here, and read back."""

from __future__ import annotations

import functools
import multiprocessing
import re
import sys
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from variants import variant

from flashgen import paths
from flashgen.compile import compile_kernel, load_module, module_of, require_triton
from flashgen.errors import MissingDependencyError, RenderError
from flashgen.families import Variant
from flashgen.gate import MAX_STACK, judge
from flashgen.hardware import Gpu
from flashgen.launch import is_aligned
from flashgen.paths import write_source
from flashgen.render import kernel_options, render
from flashgen.resources import Resources
from flashgen.spec import TORCH_DTYPES, Spec
from flashgen.workers import Failure

A100 = Gpu.named("a100")
WIDE = variant(Spec(dtype="fp16"), 128, 64, 8, 2)
NARROW = variant(Spec(head_dim=64, head_dim_v=64, dtype="fp16", causal="bottom_right"), 64, 32, 4, 2)

LONG_TEXT = "# the same line over and over\n" * 100_000


@functools.cache
def _compiled(which: Variant, gpu: Gpu, aligned: bool = True) -> Any:
    return compile_kernel(which, gpu, aligned=aligned)


def _write_and_read_back(start: Barrier, folder: Path, results: SimpleQueue[tuple[str, bool]]) -> None:
    start.wait()
    path = write_source(LONG_TEXT, "slug", folder)
    # Whoever sees the path, sees the whole text.
    results.put((path.name, path.read_text() == LONG_TEXT))


def test_eight_processes_write_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashgen.compile"])
    start, results = context.Barrier(8), context.SimpleQueue()
    processes = [context.Process(target=_write_and_read_back, args=(start, tmp_path, results)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    (name,) = {path.name for path in tmp_path.iterdir()}
    assert {results.get() for _ in processes} == {(name, True)}


def test_a_path_never_changes_its_content(tmp_path: Path) -> None:
    first = write_source("x = 1\n", "slug", tmp_path / "made")
    before = first.stat()
    assert re.fullmatch(r"slug_[0-9a-f]{12}\.py", first.name)
    assert write_source("x = 1\n", "slug", tmp_path / "made") == first
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert write_source("x = 2\n", "slug", tmp_path / "made") != first
    assert first.read_text() == "x = 1\n"


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    path = write_source("state = []\n", "once", tmp_path)
    module = load_module(path)
    assert load_module(path) is module is sys.modules[f"flashgen_generated.{path.stem}"]
    assert module_of(NARROW) is module_of(variant(NARROW.spec, 64, 32, 4, 2))
    assert module_of(NARROW) is not module_of(WIDE)


@pytest.mark.parametrize(
    ("text", "reason"), [("x = (\n", "SyntaxError"), ("import nowhere_at_all\n", "nowhere_at_all"), ("1 / 0\n", "zero")]
)
def test_a_file_that_does_not_import(tmp_path: Path, text: str, reason: str) -> None:
    path = write_source(text, "broken", tmp_path)
    with pytest.raises(RenderError, match=reason) as error:
        load_module(path)
    assert str(path) in str(error.value)
    assert error.value.__cause__ is not None
    assert not [name for name in sys.modules if path.stem in name]


def test_triton_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    require_triton()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="needs the package triton") as error:
        require_triton()
    assert isinstance(error.value, ImportError)


def test_alignment_is_part_of_the_kernel() -> None:
    aligned, unaligned = (_compiled(NARROW, A100, aligned=each).asm for each in (True, False))
    assert aligned["cubin"] != unaligned["cubin"]
    # Copies to shared memory are 16 bytes wide, or cannot be asynchronous at all.
    assert "cp.async" in aligned["ptx"] and "cp.async.cg.shared.global" not in unaligned["ptx"]
    # The caller's layout is a promise; one LSE that flashgen allocates itself is always aligned.
    assert len(re.findall(r"ld\.global", unaligned["ptx"])) > len(re.findall(r"ld\.global", aligned["ptx"]))


def _layouts(which: Variant, lengths: range) -> set[tuple[bool, tuple[tuple[str, int], ...]]]:
    """What distinguishes the kernels that calls of these lengths need, in both memory orders."""
    module = module_of(which)
    needed = set()
    for seq in lengths:
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
            shape = [[2, 3, seq, width][axis] for axis in order for width in (which.spec.head_dim,)]
            tensor = torch.empty(shape, dtype=TORCH_DTYPES[which.spec.dtype]).permute(order)
            _, _, options = module.plan(tensor, tensor, tensor, tensor)
            needed.add((is_aligned(tensor), tuple(sorted(options.items()))))
    return needed


def test_lengths_never_cause_a_compilation() -> None:
    assert _layouts(NARROW, range(1, 65)) == {(True, tuple(sorted(kernel_options(NARROW.config).items())))}
    odd = variant(Spec(head_dim=65, head_dim_v=65, dtype="fp16"))
    assert len(_layouts(odd, range(1, 65))) <= 2


def test_no_argument_is_specialised_on_its_value() -> None:
    # Lengths, strides and counts are run-time arguments with a declared type, constexpr only what CONFIG holds.
    parameters = module_of(NARROW).kernel.params
    constants = {parameter.name for parameter in parameters if parameter.is_constexpr}
    assert constants == {name for name in kernel_options(NARROW.config) if name.isupper()}
    typed = {parameter.name: parameter.annotation_type for parameter in parameters if parameter.annotation_type}
    assert typed.keys() == {parameter.name for parameter in parameters} - constants - {"Q", "K", "V", "O", "LSE"}
    assert {kind for name, kind in typed.items() if name.startswith("stride_")} == {"i64"}


def _meta(seq: int, row_stride: int) -> torch.Tensor:
    strides = (seq * row_stride, seq * row_stride, row_stride, 1)
    return torch.empty_strided((1, 1, seq, 64), strides, dtype=torch.float16, device="meta")


def test_plan_counts_blocks_and_widens_offsets_beyond_int32() -> None:
    module = module_of(NARROW)
    q = torch.empty(2, 6, 65, 64, dtype=torch.float16, device="meta")
    k = torch.empty(2, 2, 130, 64, dtype=torch.float16, device="meta")
    grid, sizes, options = module.plan(q, k, k, q)
    assert grid == (2 * 6 * 2, 1, 1)
    strides = (*q.stride()[:3], *k.stride()[:3], *k.stride()[:3], *q.stride()[:3])
    assert sizes == (*strides, 6, 3, 65, 130)
    assert options == module.CONFIG and options["INDEX_BITS"] == 32
    near, far = _meta(3, 2**29), _meta(3, 2**30)
    for k, v, bits in ((near, near, 32), (far, near, 64), (near, far, 64)):
        assert module.plan(near, k, v, near)[2] == {**module.CONFIG, "INDEX_BITS": bits}
    # Q and O are always addressed with 64 bits.
    assert module.plan(far, near, near, far)[2] == module.CONFIG


def test_options_of_a_call_reach_the_compiler() -> None:
    narrow = _compiled(NARROW, A100).asm["ttir"]
    wide = compile_kernel(NARROW, A100, options={**kernel_options(NARROW.config), "INDEX_BITS": 64}).asm["ttir"]
    assert narrow != wide
    assert wide == compile_kernel(variant(NARROW.spec, 64, 32, 4, 2, index_bits=64), A100).asm["ttir"]


def test_judgement_of_compiled_candidates() -> None:
    fine = Resources(shared=A100.shared_per_block, registers=255, stack=MAX_STACK["forward"], loop={})
    assert judge(NARROW, A100, (fine,)) is None
    large = judge(NARROW, A100, (Resources(A100.shared_per_block + 1, 255, 0, {}),))
    assert large is not None and (large.stage, large.kind) == ("resources", "shared memory")
    assert "166913" in large.reason and "166912" in large.reason
    spilled = judge(NARROW, A100, (Resources(0, 255, MAX_STACK["forward"] + 8, {}),))
    assert spilled is not None and (spilled.stage, spilled.kind) == ("resources", "spills")
    assert str(MAX_STACK["forward"] + 8) in spilled.reason
    failed = judge(NARROW, A100, Failure("crash", "its process died (exit code -6)", True))
    assert failed is not None and (failed.stage, failed.kind) == ("compile", "compile: crash")
    assert "sm_80" in failed.reason and "exit code -6" in failed.reason


def test_a_generated_file_is_where_paths_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "generated_dir", lambda: tmp_path)
    path = write_source(render(NARROW), NARROW.slug)
    assert path.parent == tmp_path and path.name.startswith(NARROW.slug)
    assert path.read_text() == render(NARROW)
