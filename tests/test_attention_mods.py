"""`score_mod` and `mask_mod` of flashgen.attention on CPU tensors, and what files and tracers know of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modified_calls import tensors
from mods import MASKS, SCORES, features
from torch import Tensor

import flashgen
from flashgen.cases import mod_tensors
from flashgen.errors import InputError
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import Gpu
from flashgen.records import Entry
from flashgen.render import render
from flashgen.spec import Spec

SEQ_Q, SEQ_KV = 5, 9


def call(kind: str, name: str) -> dict[str, Any]:
    text, _ = (SCORES if kind == "score_mod" else MASKS)[name]
    spec = Spec(**features(kind, name))
    values = mod_tensors(spec, "cpu", torch.Generator().manual_seed(3))
    return {kind: text, "mod_tensors": {f"mod{index}": each for index, each in enumerate(values)} or None}


def naive(q: Tensor, k: Tensor, v: Tensor, kind: str, name: str, given: dict[str, Any]) -> Tensor:
    """The whole matrix, element by element in Python for what the expression says."""
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * q.shape[3] ** -0.5
    scope = {
        "tanh": torch.tanh, "exp": torch.exp, "abs": torch.abs, "sigmoid": torch.sigmoid, "float": float,
        "where": lambda c, a, b: a if c else torch.tensor(b, dtype=torch.float64), "seq_q": SEQ_Q, "seq_kv": SEQ_KV,
    }  # fmt: skip
    tables = given["mod_tensors"] or {}
    scope |= {key: _Clamped(value) for key, value in tables.items()}
    rows = []
    for place in torch.cartesian_prod(*(torch.arange(size) for size in scores.shape)):
        names = dict(zip(("batch", "head", "q_idx", "kv_idx"), place, strict=True))
        score = scores[tuple(place)]
        value = eval(given[kind], scope | names | {"score": score})
        rows.append(value if kind == "score_mod" else score if value else score * 0 - torch.inf)
    p = torch.softmax(torch.stack([torch.as_tensor(row) for row in rows]).reshape(scores.shape), -1).nan_to_num()
    return p @ v.repeat_interleave(2, 1)


class _Clamped:
    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __getitem__(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        return self._table[tuple(i.clamp(0, size - 1) for i, size in zip(index, self._table.shape, strict=True))]


ALL = [("score_mod", name) for name in SCORES] + [("mask_mod", name) for name in MASKS]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_attention_and_gradients(kind: str, name: str) -> None:
    q, k, v = (each.requires_grad_() for each in tensors(SEQ_Q, SEQ_KV))
    given = call(kind, name)
    out = flashgen.attention(q, k, v, **given)
    expected = naive(q, k, v, kind, name, given)
    torch.testing.assert_close(out, expected)
    do = torch.randn(out.shape, dtype=torch.float64)
    found = torch.autograd.grad(out, (q, k, v), do)
    for actual, true in zip(found, torch.autograd.grad(expected, (q, k, v), do), strict=True):
        torch.testing.assert_close(actual, true.nan_to_num())


def test_gradcheck_beside_everything_else() -> None:
    q, k, v = (each.requires_grad_() for each in tensors(3, 4))
    table = torch.rand(4, 5, dtype=torch.float64)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashgen.attention(
            q, k, v, score_mod="score * (1.0 + t[head, kv_idx]) + sin(score)", mask_mod="kv_idx <= q_idx + 2",
            mod_tensors={"t": table}, softcap=2.0, bias=torch.ones(3, 4, dtype=torch.float64), return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (q, k, v))


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, slopes: Any) -> Any:
    return score - slopes[h] * abs(q_idx - kv_idx)


def test_under_torch_compile() -> None:
    q, k, v = (each.requires_grad_() for each in tensors(4, 6))
    slopes = torch.rand(4, dtype=torch.float64)

    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        out = flashgen.attention(
            q, k, v, score_mod=slanted, mask_mod="kv_idx <= q_idx + 1", mod_tensors={"slopes": slopes}
        )
        assert isinstance(out, Tensor)
        return out.square().sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(
        torch.autograd.grad(compiled(q, k, v, slopes), (q, k, v)),
        torch.autograd.grad(function(q, k, v, slopes), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


def test_captured_numbers_are_refused_where_nobody_sees_them_change() -> None:
    q, k, v = tensors()
    width = 3

    def narrow(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < width

    assert isinstance(flashgen.attention(q, k, v, mask_mod=narrow), Tensor)
    compiled = torch.compile(lambda q: flashgen.attention(q, k, v, mask_mod=narrow), backend="eager")
    with pytest.raises(Exception, match="does not see when width changes"):
        compiled(q)


def test_autocast_and_layouts_and_gqa() -> None:
    q, k, v = tensors(4, 6, torch.float32, "bshd")
    given: dict[str, Any] = {"score_mod": "score + head * q_idx - batch * kv_idx"}
    out = flashgen.attention(q, k, v, layout="bshd", **given)
    turned = (each.transpose(1, 2) for each in (q, k, v))
    other = flashgen.attention(*turned, **given)
    assert isinstance(out, Tensor) and isinstance(other, Tensor)
    torch.testing.assert_close(out, other.transpose(1, 2))


def test_what_has_no_gradient_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(InputError, match="mod_tensors have no gradient"):
        flashgen.attention(
            q, k, v, score_mod="score + t[head]", mod_tensors={"t": torch.ones(4, dtype=torch.float64).requires_grad_()}
        )


def test_a_mapped_calls_batch_is_its_own() -> None:
    q, k, v = (torch.stack([each, each + 1]) for each in tensors())

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = flashgen.attention(q, k, v, score_mod="score * (1.0 + batch)", mask_mod="kv_idx <= q_idx + batch")
        assert isinstance(o, Tensor)
        return o

    torch.testing.assert_close(
        torch.vmap(call)(q, k, v), torch.stack([call(*each) for each in zip(q, k, v, strict=True)])
    )


def test_a_spec_tells_files_a_digest_and_no_more() -> None:
    spec = Spec(**features("score_mod", "table"))
    assert spec.named.score_mod.startswith("#") and "mod0[" not in str(spec.stated) and spec.named.named == spec.named
    assert spec.slug != Spec(**features("score_mod", "cap")).slug and "[" not in spec.slug
    assert spec.tuned_as == spec.named.tuned_as and spec.plain == Spec()


def test_an_expression_in_a_file_is_refused() -> None:
    spec = Spec(**features("mask_mod", "prefix"))
    family = FAMILIES["triton_fwd"]
    plain = {
        "spec": spec.stated, "bucket": {"seq_q": 512, "seq_kv": 512}, "family": family.name,
        "config": dict(family.default(spec, Gpu.named("h200"))), "method": "estimated",
        "problem": {"batch": 1, "heads": 1, "kv_heads": 1, "seq_q": 512, "seq_kv": 512}, "time_us": {"median": 1.0},
        "error": None,
        "versions": {"flashgen": "1", "triton": "3", "torch": "2", "driver": None, "template": "abc"},
    }  # fmt: skip
    entry = Entry.from_plain(plain)
    assert entry.spec == spec.named and Entry.from_plain(entry.to_plain()) == entry
    with pytest.raises(InputError, match="digests"):
        Entry.from_plain(plain | {"spec": spec.stated | {"mask_mod": "(kv_idx < 4)"}})
    with pytest.raises(InputError, match="digest"):
        render(Variant(family, spec.named, entry.config))


def test_the_generated_file_shows_the_expression() -> None:
    family = FAMILIES["triton_bwd"]
    spec = Spec("backward", **features("score_mod", "cap"))
    text = render(Variant(family, spec, family.default(spec, Gpu.named("h200"))))
    assert "tanh_of(score / 4.0)" in text and f"score_mod={spec.named.score_mod}" in text
