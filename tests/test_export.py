"""Exported files: complete, tidy, right, and of nobody's company but torch and triton."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_exported
import torch
from command_line import run
from entries import H200, SPEC, USABLE, entry
from torch import Tensor
from variants import variant

from flashgen import store
from flashgen.check import max_error
from flashgen.compile import load_module
from flashgen.errors import InputError, UnsupportedError
from flashgen.export import EXPORTED, export, write
from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.modifiers import Options, modifiers_from
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.render import kernel_options
from flashgen.select import forget_selections
from flashgen.spec import TORCH_DTYPES, Spec

KINDS = (("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32"))
SPECS = [
    Spec(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, precision=precision, causal=causal)  # type: ignore[arg-type]
    for head_dim, head_dim_v in ((64, 64), (72, 40))
    for dtype, precision in KINDS
    for causal in ("none", "bottom_right", "top_left")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All specs, exported."""
    place = tmp_path_factory.mktemp("exported")
    for spec in SPECS:
        write(variant(spec), place / f"{spec.slug}.py")
    return place


def _module(folder: Path, spec: Spec) -> object:
    return load_module(folder / f"{spec.slug}.py")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_it_says_what_it_is_and_imports_torch_and_triton(folder: Path, spec: Spec) -> None:
    text = (folder / f"{spec.slug}.py").read_text()
    tree = ast.parse(text)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        assert not isinstance(node, ast.ImportFrom)
    assert imported == {"torch", "triton", "triton.language"}
    about = ast.get_docstring(tree)
    assert about is not None and f"head_dim={spec.head_dim}, head_dim_v={spec.head_dim_v}" in about
    assert f"causal={spec.causal}" in about and f"precision={spec.precision}" in about
    functions = {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"kernel", "launch", "attention", "reference", "self_check"} <= functions.keys()
    assert f"[batch, heads, seq_q, {spec.head_dim_v}]" in str(functions["attention"])
    assert ("causal (" in str(functions["attention"])) == (spec.causal != "none")


def _ruff(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--no-cache", "--line-length", "120", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) == len(SPECS) == 24
    _ruff(folder, "format", "--check")
    _ruff(folder, "check", "--select", "F,B,E501")


def test_equal_variants_give_equal_files(tmp_path: Path) -> None:
    for name in ("one.py", "other.py"):
        write(variant(SPECS[0]), tmp_path / name)
    assert (tmp_path / "one.py").read_bytes() == (tmp_path / "other.py").read_bytes()
    assert str(tmp_path) not in (tmp_path / "one.py").read_text()


def _random(*shapes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_its_reference_is_ours(folder: Path, spec: Spec) -> None:
    module = _module(folder, spec)
    for heads, kv_heads, seq_q, seq_kv in ((2, 2, 7, 13), (6, 2, 13, 7), (4, 1, 1, 9), (3, 3, 9, 1)):
        shapes = ((2, heads, seq_q, spec.head_dim), (2, kv_heads, seq_kv, spec.head_dim))
        q, k, v = _random(*shapes, (2, kv_heads, seq_kv, spec.head_dim_v), dtype=TORCH_DTYPES[spec.dtype])
        for scale in (spec.head_dim**-0.5, 1.0, -0.25):
            mine = module.reference(q, k, v, scale)  # type: ignore[attr-defined]
            expected, lse = plain_attention(q.double(), k.double(), v.double(), causal=spec.causal, scale=scale)
            assert mine.dtype == torch.float64 and max_error(mine, expected) < 1e-12
            # Rows that see nothing are among them.
            if spec.causal == "bottom_right" and seq_q > seq_kv:
                empty = lse == -math.inf
                assert empty.any() and not mine[empty].any()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_it_refuses_what_does_not_fit(folder: Path, spec: Spec) -> None:
    attention = _module(folder, spec).attention  # type: ignore[attr-defined]
    shapes = ((2, 4, 9, spec.head_dim), (2, 2, 13, spec.head_dim), (2, 2, 13, spec.head_dim_v))
    q, k, v = _random(*shapes, dtype=TORCH_DTYPES[spec.dtype])
    other = torch.float16 if spec.dtype != "fp16" else torch.bfloat16
    for bad, word in (
        ((q[..., :-1], k, v), f"expected {spec.dtype} [.., .., .., {spec.head_dim}], but got"),
        ((q, k[..., :-1], v), str(tuple(k[..., :-1].shape))),
        ((q, k, v[..., :-1]), f"expected {spec.dtype} [.., .., .., {spec.head_dim_v}], but got"),
        ((q[0], k, v), f"expected {spec.dtype}"),
        ((q.to(other), k, v), str(other)),
        ((q, k.to(other), v), str(other)),
        ((q, k, v.to(other)), str(other)),
        ((q[:, :3], k, v), "do not fit together"),
        ((q, k[:, :0], v[:, :0]), "do not fit together"),
        ((q, k, v[:, :1]), "do not fit together"),
        ((q, k, v[:, :, :5]), "do not fit together"),
        ((q[:1], k, v), "do not fit together"),
    ):
        with pytest.raises(ValueError) as error:
            attention(*bad)
        assert word in str(error.value)


def _run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_it_imports_where_flashgen_does_not(folder: Path) -> None:
    code = """
import sys
from pathlib import Path
import run_exported
sys.meta_path.insert(0, run_exported.NoFlashgen())
try:
    import flashgen
except ModuleNotFoundError:
    print(len([run_exported.load(path).CONFIG for path in Path(sys.argv[1]).glob("*.py")]), "flashgen" in sys.modules)
"""
    done = _run("-c", code, folder, PYTHONPATH=os.pathsep.join([str(Path(run_exported.__file__).parent), *sys.path]))
    assert done.stdout.split() == ["24", "False"], done.stderr


RUNS = Spec(head_dim=24, head_dim_v=40, dtype="fp16", causal="bottom_right")


def test_it_runs_and_checks_itself(tmp_path: Path) -> None:
    path = tmp_path / "my_attention.py"
    write(variant(RUNS, 16, 16, 2, 1), path)
    done = _run(run_exported.__file__, path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "checked"
    assert [line.partition(":")[0] for line in lines] == [
        "seq_q 1, seq_kv 17",
        "seq_q 19, seq_kv 37",
        "seq_q 37, seq_kv 19",
    ]
    assert all(0.0 < float(line.split()[6].rstrip(",")) < float(line.split()[8]) for line in lines), lines


def test_its_self_check_notices_a_wrong_kernel(tmp_path: Path) -> None:
    path = tmp_path / "my_attention.py"
    write(variant(RUNS, 16, 16, 2, 1), path)
    text = path.read_text()
    off_by_one = "last_key = tl.minimum(offs_q + diagonal, seq_kv - 1)"
    assert off_by_one in text
    path.write_text(text.replace(off_by_one, "last_key = tl.minimum(offs_q + diagonal - 1, seq_kv - 1)"))
    done = _run(run_exported.__file__, path, TRITON_INTERPRET="1")
    assert done.returncode == 1 and done.stderr == "self-check failed\n"
    assert "checked" not in done.stdout


PROBLEM = Problem(1, 16, 16, 4096, 4096)


def test_export_writes_what_attention_would_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tmp_path / "tuned.yaml"
    store.merge(tuned, H200, [entry(config=7)])
    monkeypatch.setenv("FLASHGEN_TUNED", str(tuned))
    forget_selections()
    path = tmp_path / "kernel.py"
    selection = export(SPEC, PROBLEM, H200, path)
    assert selection.source == str(tuned) and selection.variant == Variant(selection.variant.family, SPEC, USABLE[7])
    written = load_module(path)
    assert kernel_options(USABLE[7]) == written.CONFIG
    forget_selections()


def test_no_file_where_there_is_no_kernel(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="v100 has capability sm_70"):
        export(SPEC, PROBLEM, Gpu.named("v100"), tmp_path / "kernel.py")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("old\n")
    with path.open() as reader:
        write(variant(SPECS[0]), path)
        # Who had it open reads the old text to its end.
        assert reader.read() == "old\n"
    assert "def attention(" in path.read_text() and path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["kernel.py"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "kernel.py"
    link.symlink_to(tmp_path / "elsewhere" / "target.py")
    write(variant(SPECS[0]), link)
    assert link.is_symlink() and "def attention(" in (tmp_path / "elsewhere" / "target.py").read_text()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for place, why in (
        (tmp_path / "missing" / "kernel.py", "No such file or directory"),
        (tmp_path / "file" / "kernel.py", "Not a directory"),
        (tmp_path / "folder", "Is a directory"),
        # Not even root makes a file here.
        (Path("/sys/kernel.py"), "Permission denied"),
    ):
        with pytest.raises(InputError, match=f"cannot be written: {why}. Name a file in a folder that exists."):
            write(variant(SPECS[0]), place)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]
    assert list((tmp_path / "folder").iterdir()) == []


def test_features_are_refused_before_a_file_is_made(tmp_path: Path) -> None:
    spec = Spec(head_dim=64, head_dim_v=64, window=True, varlen=True)
    with pytest.raises(UnsupportedError, match="an exported file computes no varlen yet"):
        export(spec, Problem(1, 8, 8, 1024, 1024), Gpu.named("a100"), tmp_path / "mine.py")
    assert not list(tmp_path.iterdir())


SETS = (*((name,) for name in EXPORTED), ("window", "sinks"), EXPORTED)
ALL = replace(RUNS, **{name: "fp16" if name == "bias" else True for name in EXPORTED})  # type: ignore[arg-type]


def _with(names: Sequence[str], causal: str) -> Spec:
    flags = {name: getattr(ALL, name) for name in names}
    return replace(RUNS, causal=causal, **flags)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def optional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With every set of options, exported."""
    place = tmp_path_factory.mktemp("optional")
    for names in SETS:
        for causal in ("none", "bottom_right", "top_left"):
            spec = _with(names, causal)
            write(variant(spec, 16, 16, 2, 1), place / f"{spec.slug}.py")
    return place


def test_ruff_finds_nothing_where_there_are_options(optional: Path) -> None:
    assert len(list(optional.glob("*.py"))) == 3 * len(SETS)
    _ruff(optional, "format", "--check")
    _ruff(optional, "check", "--select", "F,B,E501")


@pytest.mark.parametrize("names", SETS, ids="+".join)
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_its_reference_of_options_is_ours(optional: Path, causal: str, names: tuple[str, ...]) -> None:
    module: Any = _module(optional, _with(names, causal))
    torch.manual_seed(0)
    for seq_q, seq_kv in ((37, 23), (19, 64)):
        q, k, v = _random((2, 4, seq_q, 24), (2, 2, seq_kv, 24), (2, 2, seq_kv, 40), dtype=torch.float16)
        given = module.some_options(q, k)
        modifiers = modifiers_from((2, 4, seq_q, seq_kv), q, Options(**given)).to(Tensor.double)
        wide = (each.double() for each in (q, k, v))
        expected, _ = plain_attention(*wide, causal=causal, scale=0.3, modifiers=modifiers)
        assert max_error(module.reference(q, k, v, 0.3, **given), expected) < 1e-12


@pytest.mark.parametrize("names", [("window", "sinks"), EXPORTED], ids="+".join)
def test_it_runs_and_checks_itself_with_options(optional: Path, names: tuple[str, ...]) -> None:
    causal = "bottom_right" if names == EXPORTED else "none"
    done = _run(run_exported.__file__, optional / f"{_with(names, causal).slug}.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "checked" and done.stdout.count("max error") == 3


def test_options_that_do_not_fit(optional: Path) -> None:
    module: Any = _module(optional, ALL)
    q, k, v = _random((2, 4, 9, 24), (2, 2, 13, 24), (2, 2, 13, 40), dtype=torch.float16)
    good = module.some_options(q, k)
    for name, bad, word in (
        ("softcap", 0.0, "softcap must be from"),
        ("softcap", math.nan, "softcap must be from"),
        ("alibi_slopes", torch.ones(3), r"alibi_slopes must be broadcastable to \[2, 4\], but got \[3\]"),
        ("alibi_slopes", None, "alibi_slopes must be a tensor"),
        ("bias", torch.ones(9, 13), r"bias must be torch.float16 on cpu, but got torch.float32"),
        ("bias", torch.ones(9, 12).half(), r"bias must be broadcastable to \[2, 4, 9, 13\]"),
        ("bias", torch.ones(13, device="meta").half(), "but got torch.float16 on meta"),
        ("window", (-1, 0), "window must be"),
        ("window", (1.5, 0), "window must be"),
        ("mask", torch.ones(9, 13), "mask must be torch.bool"),
        ("segment_ids_q", torch.ones(2, 13).int(), r"segment_ids_q must be broadcastable to \[2, 9\]"),
        ("segment_ids_kv", torch.ones(2, 13), "torch.int32 or torch.int64"),
        ("sinks", torch.ones(2, 4), r"sinks must be broadcastable to \[4\]"),
    ):
        with pytest.raises(ValueError, match=word):
            module.attention(q, k, v, **{**good, name: bad})
    with pytest.raises(ValueError, match="no backward"):
        module.attention(q, k, v, **{**good, "sinks": torch.ones(4, requires_grad=True)})
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'window'"):
        module.attention(q, k, v, **{name: value for name, value in good.items() if name != "window"})


def test_export_with_options_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    ended = run("export", "--gpu", "a100", "--head-dim", "64", "--with", "window,softcap", "-o", path)
    assert ended.code == 0, ended
    text = path.read_text()
    assert "q, k, v, *, softcap, window, scale=None, return_lse=False" in text and "alibi" not in text
