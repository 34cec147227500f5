"""Variant -> source text. The only file that knows Jinja."""

from __future__ import annotations

import functools
import hashlib
import textwrap
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.meta

from flashgen.errors import RenderError
from flashgen.families import Variant
from flashgen.paths import data_dir
from flashgen.spec import TORCH_DTYPES
from flashgen.version import VERSION

# Config names reach Triton as constexpr parameters in capitals, these, of one kernel or of several, as launch options.
LAUNCH_OPTIONS = ("num_warps", "num_stages")
# Of generated files.
MAX_LINE = 120


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["listed"] = _listed
    return environment


def kernel_options(config: Mapping[str, int]) -> dict[str, int]:
    """The CONFIG line of a generated file: `{"BLOCK_Q": 128, ..., "num_warps": 8}`."""
    return {name if name.endswith(LAUNCH_OPTIONS) else name.upper(): value for name, value in config.items()}


@functools.cache
def template_hash(family: str) -> str:
    """First 12 hex digits of the sha256 over a family's template and everything it includes."""
    environment = _environment()
    digest = hashlib.sha256()
    pending = [f"{family}.py.jinja"]
    seen: set[str] = set()
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        assert environment.loader is not None
        text = environment.loader.get_source(environment, name)[0]
        digest.update(text.encode())
        # Includes are literal names in our templates; a computed one would be None and is refused.
        for found in jinja2.meta.find_referenced_templates(environment.parse(text)):
            if found is None:
                raise RenderError(f"templates/{name} includes a template by a computed name; write it out.")
            pending.append(found)
    return digest.hexdigest()[:12]


def render(variant: Variant, *, interpreter: bool = False, standalone: bool = False) -> str:
    """The complete source text of a variant; equal inputs give equal bytes.

    Args:
        variant: what to render.
        interpreter: multiply in fp32 where Triton's interpreter has no bf16 arithmetic.
        standalone: add an `attention()` function and a self-check under `__main__`.

    Raises:
        RenderError: the template is missing, or names something that the variant does not say.
    """
    spec = variant.spec
    family = variant.family.name
    try:
        named = dict(sorted(spec.stated.items()))
        context = {
            "spec": spec,
            "config": variant.config,
            "family": family,
            "title": spec.op,
            "version": VERSION,
            "template_hash": template_hash(family),
            "spec_line": _wrapped(", ".join(f"{name}={value}" for name, value in named.items())),
            "config_line": _wrapped(", ".join(f"{name}={value}" for name, value in variant.config.items())),
            "config_literal": _literal(kernel_options(variant.config)),
            "interpreter": interpreter,
            "standalone": standalone,
            "aligned": variant.family.aligned,
            **variant.family.derived(spec),
            "torch_dtype": str(TORCH_DTYPES[spec.dtype]),
            "bias_dtype": str(TORCH_DTYPES.get(spec.bias, TORCH_DTYPES["fp32"])),
            # What the products round to: the dtype itself, or TF32's ten bits of mantissa, which are fp16's.
            "rounding_dtype": "torch.float16" if spec.precision == "tf32" else str(TORCH_DTYPES[spec.dtype]),
            "causal_words": {"none": "", "bottom_right": ", causal (bottom-right)", "top_left": ", causal (top-left)"}[
                spec.causal
            ],
        }
        text = _environment().get_template(f"{family}.py.jinja").render(context)
        if standalone:
            text += "\n\n" + _environment().get_template("lib/standalone.py.jinja").render(context)
    except jinja2.TemplateError as error:
        raise RenderError(f"templates/{family}.py.jinja cannot be rendered for {variant.slug}: {error}") from error
    return text


def _listed(names: Sequence[str], indent: int) -> str:
    """Names separated by commas, on as many lines as they need, the first of which is indented already."""
    margin = " " * indent
    whole = ", ".join(name.replace(" ", "\0") for name in names)
    lines = textwrap.fill(whole, MAX_LINE - 1, initial_indent=margin, subsequent_indent=margin)
    return lines.replace("\0", " ").lstrip()


def _wrapped(text: str) -> str:
    """A line of the header, continued under itself."""
    margin = " " * len("config: ")
    return textwrap.fill(text, MAX_LINE - len(margin), subsequent_indent=margin)


def _literal(options: Mapping[str, int]) -> str:
    """A dict, formatted as ruff does: on one line where it fits behind `CONFIG = `."""
    items = [f'"{name}": {value!r}' for name, value in options.items()]
    line = "{" + ", ".join(items) + "}"
    return line if len(line) <= MAX_LINE - len("CONFIG = ") else "{\n    " + ",\n    ".join(items) + ",\n}"
