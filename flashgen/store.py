"""Files of tuned configs, one per GPU: read, look up, merge, write. The only file that knows YAML."""

from __future__ import annotations

import functools
import os
import secrets
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from flashgen.choice import Lookup, choose
from flashgen.errors import FlashgenError, StoreError
from flashgen.hardware import Gpu, Identity
from flashgen.paths import tuned_dirs
from flashgen.problem import Bucket
from flashgen.records import Entry, Versions, gpu_from_plain, gpu_to_plain, label_of
from flashgen.spec import Spec
from flashgen.untrusted import mapping, shown
from flashgen.version import VERSION

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

SCHEMA = 1
_KEY = ("family", "spec", "bucket", "method")
_LOCK_SECONDS = 60
_REPLACE_RETRIES = 20
# PyYAML's constructors let all of these through for scalars such as `2001-99-99` or `!!bool x`.
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True)
class TunedFile:
    """What one file holds.

    Attributes:
        gpu_name, identity: the GPU that the file is for, to compare with Gpu.name and Gpu.identity.
        entries: those that can be used.
        complaints: one sentence for each entry that cannot.
        unread: these entries as they stand in the file, so that rewriting it keeps them.
    """

    path: Path
    gpu_name: str
    identity: Identity
    entries: list[Entry]
    complaints: list[str]
    unread: list[object]


class _Unknown:
    """A value whose tag YAML does not define, such as a pickled numpy scalar; kept as text, never built."""

    def __init__(self, node: yaml.Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"a value tagged {self.node.tag}"


class _Loader(SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            raise yaml.MarkedYAMLError(problem=f"a key stands twice among {keys}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)

    def printable_int(self, node: yaml.ScalarNode) -> int:
        value = self.construct_yaml_int(node)
        str(value)  # ValueError beyond 4300 digits; better here than where a message prints it
        return value


class _Dumper(yaml.SafeDumper):
    pass


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.printable_int)
_Loader.add_constructor(None, lambda loader, node: _Unknown(node))
_Dumper.add_representer(_Unknown, lambda dumper, value: value.node)


def read(path: Path, gpu_name: str | None = None) -> TunedFile:
    """Read one file; an entry that cannot be used becomes a complaint and takes no other with it.

    Args:
        path: the file.
        gpu_name: the GPU that the file must be for; None takes any.

    Raises:
        StoreError: the file is missing, not YAML, of another schema, or for another GPU.
    """
    try:
        top = yaml.load(path.read_bytes(), Loader=_Loader)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    except _YAML_ERRORS as error:
        problem = " ".join(str(error).split())
        raise StoreError(f"{path} is not valid YAML ({problem}). Correct it, or move it away.") from error
    try:
        schema = mapping("the file", top).get("schema")
        if type(schema) is not int or schema != SCHEMA:
            raise StoreError(f"flashgen {VERSION} reads schema {SCHEMA}, but it says {shown(schema)}.")
        plain = mapping("the file", top, ("schema", "gpu", "entries"))
        name, identity = gpu_from_plain(plain["gpu"])
        if gpu_name not in (None, name):
            raise StoreError(f"it is for {name}, not for {gpu_name}.")
        if not isinstance(plain["entries"], list):
            raise StoreError("entries must be a list.")
    except FlashgenError as error:
        raise StoreError(f"{path} cannot be used: {error} Correct it, or move it away.") from error
    file = TunedFile(path, name, identity, [], [], [])
    for index, item in enumerate(plain["entries"]):
        try:
            file.entries.append(Entry.from_plain(item))
        except FlashgenError as error:
            where = f"{path}, entries[{index}] ({label_of(item)})"
            file.complaints.append(f"{where}: {error} Correct or delete this entry; the others are used.")
            file.unread.append(item)
    return file


@functools.lru_cache(maxsize=64)
def _cached(path: Path, mtime_ns: int, size: int, inode: int) -> TunedFile | str:
    """`read`, or why the file cannot be used. The inode tells two writes within one tick of the clock apart."""
    try:
        return read(path)
    except StoreError as error:
        warnings.warn(f"{error} Until then it counts as empty.", stacklevel=2)
        return str(error)


def _files_for(gpu: Gpu, notes: list[str]) -> list[TunedFile]:
    files = []
    for place in dict.fromkeys(tuned_dirs()):
        path = place
        try:
            path = place / f"{gpu.name}.yaml" if place.is_dir() else place
            stat = path.stat()
        except OSError as error:
            notes.append(f"{path}: not read ({error.strerror}).")
            continue
        file = _cached(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if isinstance(file, str):
            notes.append(file)
        elif (file.gpu_name, file.identity) != (gpu.name, gpu.identity):
            notes.append(f"{path}: skipped, it is for {file.gpu_name} {file.identity}, not {gpu.name} {gpu.identity}.")
        else:
            notes.extend([f"{path}: read, {len(file.entries)} entries.", *file.complaints])
            files.append(file)
    return files


def entries_of(gpu: Gpu) -> list[tuple[Path, Entry]]:
    """Every usable entry for a GPU with the file it stands in, first look-up first."""
    return [(file.path, entry) for file in _files_for(gpu, []) for entry in file.entries]


def lookup(
    spec: Spec,
    bucket: Bucket,
    gpu: Gpu,
    families: Collection[str] | None = None,
    current: Mapping[str, Versions] | None = None,
) -> Lookup:
    """Find the best entry in `$FLASHGEN_TUNED`, the user's folder and the shipped one; arguments as in `choose`.

    A file that cannot be read warns once and counts as empty.
    """
    notes: list[str] = []
    tuned = [(file.path, entry) for file in _files_for(gpu, notes) for entry in file.entries]
    result = choose(tuned, spec, bucket, gpu, families, current)
    return replace(result, notes=[*notes, *result.notes])


def merge(path: Path, gpu: Gpu, entries: Iterable[Entry]) -> None:
    """Add entries to a file under its lock and replace it in one step; a file that is missing is created.

    An entry replaces the one of the same key, a measured one also the estimated one; all others stay, even those
    that cannot be read.

    Args:
        path: the file; its folder must exist. The lock `<path>.lock` is left beside it.
        gpu: the GPU that the entries are for.

    Raises:
        StoreError: what is there cannot be read or is for another GPU, or the folder cannot be written.
    """
    path = path.resolve()
    if not path.parent.is_dir():
        raise StoreError(f"{path} cannot be written: {path.parent} is not a folder. Create it, or write elsewhere.")
    try:
        with FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
            _write(path, _merged(path, gpu, entries))
    except (OSError, NotImplementedError) as error:  # filelock's Timeout is an OSError; the latter: no locks here
        raise StoreError(f"{path} cannot be written and stays as it was: {error}. Write elsewhere.") from error


def _merged(path: Path, gpu: Gpu, entries: Iterable[Entry]) -> str:
    old = read(path, gpu.name) if path.exists() else TunedFile(path, gpu.name, gpu.identity, [], [], [])
    if old.identity != gpu.identity:
        raise StoreError(f"{path} is for {old.identity}, this {gpu.name} is {gpu.identity}. Write to another file.")
    new = list(entries)
    merged = {entry.key: entry for entry in [*old.entries, *new]}
    for entry in new:
        if entry.method == "measured":
            merged.pop((*entry.key[:3], "estimated"), None)
    ordered = sorted(merged.values(), key=lambda each: (each.family, astuple(each.spec), each.bucket, each.method))
    plain = [entry.to_plain() for entry in ordered]
    keys = [[each[name] for name in _KEY] for each in plain]
    unread = [
        item for item in old.unread if not isinstance(item, dict) or [item.get(name) for name in _KEY] not in keys
    ]
    body: dict[str, object] = {"entries": [*plain, *unread]}
    return f"schema: {SCHEMA}\ngpu: {_dump(gpu_to_plain(gpu), True)}{_dump(body, None)}"


def _dump(plain: dict[str, object], flow: bool | None) -> str:
    return str(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, width=10000))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        for _ in range(_REPLACE_RETRIES):
            try:
                return os.replace(temporary, path)
            except PermissionError:  # Windows, while a reader has the old file open
                time.sleep(0.05)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
