"""The size budget: small files, short functions, few parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "flashgen"
MAX_FILE_LINES = 250
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
# `attention`, `attention_kvcache` and `explain` take every option there is; gradients take what the forward took, what
# it returned and the gradients of that; the operators take every option of `attention` and no defaults, and so does
# what they call; a layer takes what its projections are made of.
MANY = (
    "reference_backward.py tiled_backward", "gradients.py gradients", "gradients.py _without_a_positive_scale",
    "cpu.py gradients_on_cpu", "autograd.py backward", "api.py _by_operator", "nn.py __init__", "api.py attention",
    "api.py _modified", "dispatch.py explain", "modified.py attend", "modified.py attend_on_gpu",
    "modified.py gradients", "modified.py gradients_on_gpu", "modified_autograd.py compute",
    "modified_autograd.py compute_gradients", "varlen.py gradients", "varlen_api.py attention_varlen",
    "varlen_autograd.py compute", "varlen_autograd.py backward_varlen", "varlen_api.py _attend", "varlen.py attend",
    "fp8.py attention_fp8", "fp8.py compute", "kvcache_api.py attention_kvcache", "kvcache_api.py _call",
    "kvcache_autograd.py compute",
)  # fmt: skip
# Its body is a few lines; the rest says what every option is.
LONG = ("api.py attention", "kvcache_api.py attention_kvcache")


def _files() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, text in _files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{name}:{node.lineno} {node.name}", node


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument]
    return len([name for name in names if name not in ("self", "cls")])


def _assert_within(limit: int, what: str, sizes: dict[str, int]) -> None:
    assert sizes, f"nothing was measured in {PACKAGE}"
    over = sorted(((size, name) for name, size in sizes.items() if size > limit), reverse=True)
    table = "\n".join(f"{size:6}  {name}" for size, name in over)
    assert not over, f"more than {limit} {what}:\n{table}"


def test_files_are_small() -> None:
    _assert_within(MAX_FILE_LINES, "lines in a file", {name: len(text.splitlines()) for name, text in _files()})


def test_functions_are_short() -> None:
    _assert_within(
        MAX_FUNCTION_LINES,
        "lines in a function",
        {name: _lines(node) for name, node in _functions() if re.sub(r":\d+", "", name) not in LONG},
    )


def test_functions_take_few_parameters() -> None:
    _assert_within(
        MAX_PARAMETERS,
        "parameters",
        {name: _parameters(node) for name, node in _functions() if re.sub(r":\d+", "", name) not in MANY},
    )
