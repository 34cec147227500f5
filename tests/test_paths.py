"""Where flashgen finds its own data and puts the user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from flashgen import paths

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["templates", "tuned"])
def test_a_checkout_is_read_in_place(name: str) -> None:
    assert paths.data_dir(name) == CHECKOUT / name


def test_data_inside_the_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("package/_data/templates", "templates"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "package")
    assert paths.data_dir("templates") == tmp_path / "package/_data/templates"


def test_missing_data_names_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "package")
    with pytest.raises(FileNotFoundError) as error:
        paths.data_dir("templates")
    assert str(tmp_path / "package/_data/templates") in str(error.value)
    assert str(tmp_path / "templates") in str(error.value)


def test_flashgen_home_is_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    assert paths.user_dir() == tmp_path / "home"
    assert paths.generated_dir() == tmp_path / "home/generated"
    assert paths.generated_dir().is_dir()


def test_flashgen_home_may_start_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHGEN_HOME", "~/kernels")
    assert paths.user_dir() == tmp_path / "kernels"


def test_without_flashgen_home_it_is_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert paths.user_dir().is_relative_to(tmp_path)
    assert paths.user_dir().name.lower() == "flashgen"


def test_tuned_files_are_looked_up_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path))
    shipped = [tmp_path / "tuned", CHECKOUT / "tuned"]
    assert paths.tuned_dirs() == shipped
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path / "mine.yaml"))
    assert paths.tuned_dirs() == [tmp_path / "mine.yaml", *shipped]


def test_generated_files_go_elsewhere_where_the_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file in the folder's place refuses root as well, which a read-only folder would not.
    (tmp_path / "home").write_text("")
    (tmp_path / "temp").mkdir()
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    folder = paths.generated_dir()
    assert folder.is_relative_to(tmp_path / "temp")
    assert folder.is_dir() and os.access(folder, os.W_OK)
