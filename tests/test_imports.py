"""What `import flashgen` may load, and which file may know which library."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "flashgen"
HEAVY = {"optuna", "jinja2", "yaml", "click", "rich", "pebble", "triton"}


def _python(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    code = """
import json, sys
import torch
before = set(sys.modules)
import flashgen
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = set(json.loads(_python(code)))
    assert "flashgen" in loaded
    assert not loaded & HEAVY


def test_import_asks_nothing_of_the_gpu() -> None:
    code = """
import torch

def refuse(*args, **kwargs):
    raise AssertionError("import flashgen asked CUDA")

for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
import flashgen
print(torch.cuda.is_initialized())
"""
    assert _python(code).strip() == "False"


def test_import_and_cpu_tensors_need_no_triton() -> None:
    code = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import torch
import flashgen
x = torch.ones(1, 1, 3, 8)
print(flashgen.attention(x, x, x).sum().item())
"""
    assert float(_python(code)) == 24.0


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _importers(library: str) -> set[str]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix() for path in files if library in _imports(path)}


def test_only_the_tuner_knows_optuna() -> None:
    assert _importers("optuna") == {"search.py"}


def test_only_render_knows_jinja() -> None:
    assert _importers("jinja2") == {"render.py"}


def test_only_the_store_knows_yaml() -> None:
    assert _importers("yaml") == {"store.py"}
