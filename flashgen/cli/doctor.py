"""`flashgen doctor`: versions, GPU, folders and the plan for one call; where a bug report starts."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys

import click
import torch

from flashgen import store
from flashgen.cli import options
from flashgen.errors import FlashgenError
from flashgen.hardware import current_gpu, driver_version
from flashgen.paths import data_dir, generated_dir, tuned_dirs, user_dir
from flashgen.select import select
from flashgen.spec import Spec
from flashgen.version import VERSION

PACKAGES = ("torch", "triton", "optuna", "jinja2", "pyyaml", "numpy")


@click.command("doctor")
@options.json_option
def doctor_command(as_json: bool) -> None:
    """Print what a bug report needs: versions, GPU, folders, and which kernel one call would launch."""
    facts: dict[str, str] = {
        "flashgen": VERSION,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        **{name: _version(name) for name in PACKAGES},
        "driver": driver_version() or "none",
        "user folder": str(user_dir()),
        "generated files": str(generated_dir()),
        "templates": str(data_dir("templates")),
        "tuned files": ", ".join(str(path) for path in tuned_dirs()),
    }
    if torch.cuda.is_available():
        gpu = current_gpu()
        facts["gpu"] = f"{gpu.label} ({gpu.arch}), known as {gpu.name}"
        facts["tuned for it"] = f"{len(store.entries_of(gpu))} entries"
        try:
            spec = Spec(causal="bottom_right")
            facts["plan for d128 bf16 causal 4096"] = str(select(spec, options.problem_from(4096, None, 128), gpu))
        except FlashgenError as error:
            facts["plan for d128 bf16 causal 4096"] = f"none: {error}"
    else:
        facts["gpu"] = "none that torch sees"
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        click.echo(f"{name:16} {value}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
