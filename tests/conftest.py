"""What every test gets: a FLASHGEN_HOME of its own, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashgen.workers import Workers

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ anew instead of comparing with it"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Before collection, so that no test module can read or write the user's own tuned configs.
    home = tempfile.mkdtemp(prefix="flashgen-tests-")
    os.environ["FLASHGEN_HOME"] = home
    os.environ.pop("FLASHGEN_TUNED", None)
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a GPU, and torch.cuda.is_available() is false")
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker("gpu")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Child processes that compile."""
    with Workers(2) as pool:
        yield pool
