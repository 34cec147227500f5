"""What holds for the text of every generated file, for the tests of each kernel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashgen.families import Variant
from flashgen.render import render

FOLDER = Path(__file__).parent / "golden"


def assert_golden(golden: Variant, request: pytest.FixtureRequest) -> None:
    """The text is that of its golden file, which `pytest --update-golden` writes anew."""
    path = FOLDER / f"{golden.slug}.py"
    text = render(golden)
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert path.exists(), "pytest --update-golden writes it"
    assert text == path.read_text()


def assert_formatted_and_clean(variants: Sequence[Variant], folder: Path) -> None:
    """ruff finds nothing, by its rules for generated files, whatever the surrounding project says."""
    for each in variants:
        (folder / f"{each.slug}.py").write_text(render(each))
    assert len(list(folder.iterdir())) == len({each.slug for each in variants}) > 0
    for rules in (("format", "--check"), ("check", "--select", "F,B,E501")):
        command = [sys.executable, "-m", "ruff", *rules, "--isolated", "--no-cache", "--line-length", "120", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
