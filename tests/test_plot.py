"""Pictures: real files of every format, one panel per spec, and paths that are refused before anything is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot

from flashgen.benchmark import Measurement
from flashgen.compare import Row
from flashgen.errors import InputError, MissingDependencyError
from flashgen.plot import check_plot_path, plot
from flashgen.problem import Problem
from flashgen.spec import Spec


def _rows(*specs: Spec) -> list[Row]:
    rows = []
    for spec in specs:
        for seq in (512, 1024, 2048):
            for name, tflops in (("flashgen", 300.0), ("fa2", 250.0)):
                problem = Problem(1, 16, 16, seq, seq)
                took = Measurement(100.0, 1.0, 30)
                rows.append(Row(spec, problem, "forward", name, took, tflops + seq / 100, 0, None, 3e10))
    return rows


HEADERS = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


@pytest.mark.parametrize("ending", HEADERS)
def test_a_picture_is_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plot{ending}"
    check_plot_path(path)
    plot(_rows(Spec(), Spec(causal="bottom_right"), Spec(dtype="fp16")), path, "a title")
    content = path.read_bytes()
    assert content.startswith(HEADERS[ending]) and len(content) > 5000
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    # Figures that stay open pile up in a long run.
    assert pyplot.get_fignums() == []


def test_names_and_numbers_stand_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Text as text, not as outlines.
    monkeypatch.setitem(pyplot.rcParams, "svg.fonttype", "none")
    plot(_rows(Spec(), Spec(causal="bottom_right")), tmp_path / "plot.svg", "NVIDIA H200, torch 2.13")
    text = (tmp_path / "plot.svg").read_text()
    for word in ("NVIDIA H200, torch 2.13", "d128_bf16", "d128_bf16_causal", "flashgen", "fa2", "TFLOP/s"):
        assert f">{word}</text>" in text
    assert text.count(">sequence length</text>") == 2


def test_what_did_not_run_leaves_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pyplot.rcParams, "svg.fonttype", "none")
    rows = [
        replace(row, measurement=None, tflops=None, failure="out of memory") if row.name == "fa2" else row
        for row in _rows(Spec())
    ]
    plot(rows, tmp_path / "plot.svg", "title")
    text = (tmp_path / "plot.svg").read_text()
    assert ">flashgen</text>" in text and ">fa2</text>" not in text


def test_nothing_ran(tmp_path: Path) -> None:
    rows = [replace(row, measurement=None, tflops=None, failure="out of memory") for row in _rows(Spec())]
    plot(rows, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(HEADERS[".png"])


@pytest.mark.parametrize("name", ["plot.txt", "plot", "plot.jpg", "plot.png.gz"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"must end in .png, .svg or .pdf, but got '{name}'"):
        check_plot_path(tmp_path / name)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing is not a folder"):
        check_plot_path(tmp_path / "missing" / "plot.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'flashgen\[plot\]'"):
        check_plot_path(tmp_path / "plot.png")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plot.png").mkdir()
    with pytest.raises(InputError, match="cannot be written: Is a directory"):
        plot(_rows(Spec()), tmp_path / "plot.png", "title")
    assert pyplot.get_fignums() == []
