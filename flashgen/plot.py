"""Pictures of measurements."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from flashgen.compare import Row
from flashgen.errors import InputError, MissingDependencyError


def check_plot_path(path: Path) -> None:
    """Refuse before anything is measured.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InputError: the folder does not exist, or the ending names no picture format.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("plots need matplotlib, which is not installed: pip install 'flashgen[plot]'.")
    if not path.resolve().parent.is_dir():
        raise InputError(f"{path} cannot be written: {path.resolve().parent} is not a folder.")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"a plot file must end in .png, .svg or .pdf, but got {path.name!r}.")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw TFLOP/s over sequence length, one panel per spec, one line per implementation.

    Raises:
        InputError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(dict.fromkeys(row.label for row in rows))
    columns = min(2, len(labels))
    lines = -(-len(labels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(6 * columns, 3.5 * lines), squeeze=False)
    for axis, label in zip(axes.flat, labels, strict=False):
        for name in dict.fromkeys(row.name for row in rows):
            points = [
                (row.problem.seq_q, row.tflops)
                for row in rows
                if row.label == label and row.name == name and row.tflops is not None
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set_title(label)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("sequence length")
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(bottom=0)
        if axis.lines:
            axis.legend()
    for axis in list(axes.flat)[len(labels) :]:
        axis.set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Name another file.") from error
    finally:
        pyplot.close(figure)
