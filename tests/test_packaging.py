"""The wheel, the sdist and the editable install all carry and find templates/ and tuned/."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

CHECKOUT = Path(__file__).resolve().parent.parent
DATA_FOLDERS = ("templates", "tuned")

# Runs in the venv: says where flashgen is, and fails unless it renders and computes.
USE_FLASHGEN = """
import torch
import flashgen
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import Gpu
from flashgen.paths import data_dir
from flashgen.render import render
from flashgen.spec import Spec

spec = Spec(head_dim=64, head_dim_v=64, causal="bottom_right")
for family in FAMILIES.values():
    text = render(Variant(family, spec, family.default(spec, Gpu.named("h200"))))
    compile(text, family.name, "exec")

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 33, 16).unbind()
wide_q, wide_k, wide_v = q.double(), k.double(), v.double()
expected = torch.softmax(wide_q @ wide_k.mT * 16**-0.5, dim=-1) @ wide_v
error = (flashgen.attention(q, k, v).double() - expected).abs().max().item()
assert error < 1e-5, error
print(flashgen.__file__, data_dir("templates"), data_dir("tuned"), sep="\\n")
"""


def _run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must not see the checkout by accident."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _venv_with(wheel: Path, folder: Path) -> Path:
    """A venv's Python: this wheel, and from the running environment the dependencies only.

    A site-packages folder that a .pth file names gives its packages, but its own .pth files stay unread: an editable
    flashgen in it stays invisible.
    """
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin/python"
    _run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder.parent
    )
    site_packages = Path(_run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def _use(python: Path, cwd: Path) -> list[Path]:
    cwd.mkdir()
    return [Path(line) for line in _run(python, "-c", USE_FLASHGEN, cwd=cwd).split()]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), both built from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    _run(*build, "--wheel", "--sdist", CHECKOUT, cwd=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _data_files() -> list[str]:
    files = [path for folder in DATA_FOLDERS for path in (CHECKOUT / folder).rglob("*") if path.is_file()]
    return [path.relative_to(CHECKOUT).as_posix() for path in files]


@pytest.mark.parametrize("folder", DATA_FOLDERS)
def test_the_checkout_has_data_to_ship(folder: str) -> None:
    assert [name for name in _data_files() if name.startswith(folder)]


def test_the_wheel_has_every_template_and_tuned_file(distributions: tuple[Path, Path]) -> None:
    names = _names(distributions[0])
    assert {f"flashgen/_data/{name}" for name in _data_files()} <= names
    assert {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "flashgen").rglob("*.py")} <= names
    assert all(name.startswith("flashgen/") or ".dist-info/" in name for name in names)


def test_the_sdist_has_every_template_and_tuned_file(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*_data_files(), "pyproject.toml", "README.md", "tests/test_packaging.py"} <= names


def test_a_wheel_built_from_the_sdist_is_the_same(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = distributions
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    _run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, source, cwd=tmp_path)
    (twin,) = tmp_path.glob("*.whl")
    assert twin.name == wheel.name
    assert _names(twin) == _names(wheel)


def test_an_installed_wheel_renders_and_computes(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    python = _venv_with(distributions[0], tmp_path / "venv")
    module, templates, tuned = _use(python, tmp_path / "elsewhere")
    assert module.is_relative_to(tmp_path / "venv")
    assert templates == module.parent / "_data/templates"
    assert tuned == module.parent / "_data/tuned"


def test_an_editable_install_reads_the_checkout(tmp_path: Path) -> None:
    hook = "import sys, hatchling.build; print(hatchling.build.build_editable(sys.argv[1]))"
    name = _run(sys.executable, "-c", hook, tmp_path, cwd=CHECKOUT).split()[-1]
    python = _venv_with(tmp_path / name, tmp_path / "venv")
    module, templates, tuned = _use(python, tmp_path / "elsewhere")
    assert module == CHECKOUT / "flashgen/__init__.py"
    assert (templates, tuned) == (CHECKOUT / "templates", CHECKOUT / "tuned")
