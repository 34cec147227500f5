"""Where templates, tuned configs, caches and generated files live; every environment variable is read here."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The folder "templates" or "tuned": inside an installed wheel, or beside the package in a checkout."""
    candidates = (_PACKAGE / "_data" / name, _PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no {name}/ folder; looked in {', '.join(map(str, candidates))}. Reinstall flashgen.")


def user_dir() -> Path:
    """The user's own folder: `$FLASHGEN_HOME`, else the platform's cache folder."""
    home = os.environ.get("FLASHGEN_HOME")
    return Path(home).expanduser() if home else Path(platformdirs.user_cache_dir("flashgen", appauthor=False))


def tuned_dirs() -> list[Path]:
    """Files and folders of tuned configs, first look-up first: `$FLASHGEN_TUNED`, the user's, the shipped ones."""
    override = os.environ.get("FLASHGEN_TUNED")
    places = [Path(override).expanduser()] if override else []
    return [*places, user_dir() / "tuned", data_dir("tuned")]


def generated_dir() -> Path:
    """A writable folder for generated source files; a temporary one where the user's cannot be written."""
    folder = user_dir() / "generated"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _temporary_dir()


@functools.cache
def _temporary_dir() -> Path:
    """This process's own folder: under a name that others can guess, they could leave code to be imported."""
    return Path(tempfile.mkdtemp(prefix="flashgen-"))


def write_source(text: str, slug: str, folder: Path | None = None) -> Path:
    """Write `text` to `<folder>/<slug>_<hash>.py` once, atomically, and return the path.

    The name holds a hash of the text, so a path never changes its content: Triton reads kernels back through
    `inspect`, which trusts the path (rewriting one in place gave the old source with the new bytecode).
    """
    folder = generated_dir() if folder is None else folder
    path = folder / f"{slug}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    return path
