"""Variant -> text: what a template may name, and what its hash covers."""

from __future__ import annotations

import ast
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from variants import TRITON_FWD, variant

from flashgen import render as render_module
from flashgen.errors import RenderError
from flashgen.families import Variant
from flashgen.features import FEATURES
from flashgen.paths import data_dir
from flashgen.render import kernel_options, render, template_hash
from flashgen.space import Config
from flashgen.spec import Spec
from flashgen.version import VERSION

SMALL = variant(Spec(head_dim=64, head_dim_v=64, dtype="fp16", causal="bottom_right"))


def _forget() -> None:
    render_module._environment.cache_clear()
    template_hash.cache_clear()


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the templates that a test may change."""
    folder = tmp_path / "templates"
    shutil.copytree(data_dir("templates"), folder)
    monkeypatch.setattr(render_module, "data_dir", lambda name: tmp_path / name)
    _forget()
    yield folder
    _forget()


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)
    _forget()


def test_header_tells_where_the_text_comes_from() -> None:
    docstring = ast.get_docstring(ast.parse(render(SMALL)))
    assert docstring is not None
    lines = docstring.splitlines()
    assert lines[0] == "Flash attention: forward."
    assert f"flashgen {VERSION} from templates/triton_fwd.py.jinja (sha256 {template_hash('triton_fwd')})" in docstring
    spec = next(line for line in lines if line.startswith("spec:"))
    for field, value in SMALL.spec.stated.items():
        assert f"{field}={value}" in spec
    # What it does not have is not worth a word.
    assert not any(name in spec for name in FEATURES)
    config = next(line for line in lines if line.startswith("config:"))
    for name, number in SMALL.config.items():
        assert f"{name}={number}" in config


def test_config_line_is_what_the_kernel_is_launched_with() -> None:
    assigned = [node for node in ast.parse(render(SMALL)).body if isinstance(node, ast.Assign)]
    values = {ast.unparse(node.targets[0]): node.value for node in assigned}
    assert ast.literal_eval(values["CONFIG"]) == kernel_options(SMALL.config)
    assert kernel_options(Config(block_q=64, num_warps=4, advance=1)) == {"BLOCK_Q": 64, "num_warps": 4, "ADVANCE": 1}


def test_equal_inputs_give_equal_text() -> None:
    twin = Variant(TRITON_FWD, dataclasses.replace(SMALL.spec), Config(**SMALL.config))
    assert render(twin) == render(SMALL)


def test_only_the_interpreters_flavour_widens_the_products() -> None:
    compiled, interpreted = render(SMALL), render(SMALL, interpreter=True)
    assert compiled != interpreted
    assert "interpreter" not in compiled
    assert render(SMALL) == compiled


@pytest.mark.parametrize(("precision", "said"), [("ieee", '"ieee"'), ("tf32", '"tf32"')])
def test_fp32_products_say_their_precision(precision: str, said: str) -> None:
    text = render(variant(Spec(dtype="fp32", precision=precision)))  # type: ignore[arg-type]
    assert f"input_precision={said}" in text
    assert "input_precision" not in render(variant(Spec(dtype="bf16")))


def test_noncausal_text_has_no_trace_of_causal() -> None:
    assert "diagonal" in render(SMALL)
    assert "diagonal" not in render(variant(Spec()))


def test_missing_template() -> None:
    nowhere = Variant(dataclasses.replace(TRITON_FWD, name="nowhere"), SMALL.spec, SMALL.config)
    with pytest.raises(RenderError, match="nowhere"):
        render(nowhere)


@pytest.mark.parametrize("expression", ["nothing", "spec.nothing", "config.nothing"])
def test_a_name_that_the_variant_does_not_say(templates: Path, expression: str) -> None:
    _append(templates / "triton_fwd.py.jinja", f"# {{{{ {expression} }}}}\n")
    with pytest.raises(RenderError, match=f"triton_fwd.*{SMALL.slug}.*nothing"):
        render(SMALL)


def test_a_template_that_does_not_parse(templates: Path) -> None:
    _append(templates / "triton_fwd.py.jinja", "{% if %}\n")
    with pytest.raises(RenderError, match=SMALL.slug):
        render(SMALL)


def test_hash_follows_includes(templates: Path) -> None:
    before = template_hash("triton_fwd")
    assert len(before) == 12 and int(before, 16) >= 0
    hashes = {before}
    for name in ("triton_fwd.py.jinja", "lib/dot.py.jinja", "lib/online_softmax.py.jinja", "lib/header.py.jinja"):
        _append(templates / name, "# another line\n")
        hashes.add(template_hash("triton_fwd"))
    assert len(hashes) == 5
    _append(templates / "lib" / "header.py.jinja", '{% include "lib/deeper.py.jinja" %}\n')
    (templates / "lib" / "deeper.py.jinja").write_text("# one\n")
    deep = template_hash("triton_fwd")
    _append(templates / "lib" / "deeper.py.jinja", "# two\n")
    assert template_hash("triton_fwd") not in {deep, *hashes}


def test_hash_ignores_other_templates(templates: Path) -> None:
    before = template_hash("triton_fwd")
    (templates / "lib" / "unrelated.py.jinja").write_text("# nobody includes this\n")
    _forget()
    assert template_hash("triton_fwd") == before


def test_hash_refuses_computed_includes(templates: Path) -> None:
    _append(templates / "triton_fwd.py.jinja", "{% include spec.dtype %}\n")
    with pytest.raises(RenderError, match="computed name"):
        template_hash("triton_fwd")
