"""Attention of fp8 inputs on the CPU: descales, what is refused, what kernels would be given and compile to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mods import features
from rendered import assert_formatted_and_clean
from torch import Tensor

import flashgen
from flashgen import modified, plans
from flashgen.benchmark import inputs, usual_modifiers
from flashgen.cases import strided_like
from flashgen.check import max_error
from flashgen.compile import compile_kernel, load_module
from flashgen.descales import BLOCK, FP8, Descales, dequantised, descales_from
from flashgen.errors import InputError, UnsupportedError
from flashgen.export import write
from flashgen.expressions.given import written
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import Gpu
from flashgen.launch import arguments_of, laid_out
from flashgen.modifiers import Options, modifiers_from
from flashgen.problem import Problem
from flashgen.reference import plain_attention, rounded_to_e4m3, summed_in_14_bits
from flashgen.resources import resources_of
from flashgen.select import Selection, select
from flashgen.space import Config
from flashgen.spec import Causal, Descale, Spec
from flashgen.tensors import with_features

SEQ_Q, SEQ_KV = 150, 300
H100, L4 = Gpu.named("h100"), Gpu.named("l4")


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Heads 4/2 in two of a batch, head_dim 16, head_dim_v 8."""
    shapes = ((2, 4, SEQ_Q, 16), (2, 2, SEQ_KV, 16), (2, 2, SEQ_KV, 8))
    q, k, v = (_random(*shape, seed=seed).to(FP8) for seed, shape in enumerate(shapes))
    return q, k, v


def _numbers(*shape: int, seed: int) -> Tensor:
    return _random(*shape, seed=seed).exp2()


FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "numbers": {"descale_q": 0.5, "descale_k": 3, "descale_v": 2.0},
    "scalars": {"descale_q": torch.tensor(0.5), "descale_v": torch.tensor([1.5])},
    "heads": {"descale_q": _numbers(4, seed=1), "descale_k": _numbers(2, seed=2), "descale_v": 2.0},
    "batch": {"descale_k": _numbers(2, 1, seed=2), "descale_v": _numbers(2, 2, seed=3)},
    "blocks": {
        "descale_q": _numbers(2, 4, 2, seed=1), "descale_k": _numbers(1, 2, 3, seed=2), "descale_v": _numbers(2, seed=3)
    },
}  # fmt: skip


def _times(tensor: Tensor, descale: Any) -> Tensor:
    """In float64, written out."""
    wide = tensor.double()
    if descale is None:
        return wide
    numbers = torch.as_tensor(descale, dtype=torch.float64)
    if numbers.dim() == 3:
        places = torch.arange(tensor.shape[2]) // BLOCK
        return wide * numbers[:, :, places, None]
    return wide * (numbers[..., None, None] if numbers.dim() else numbers)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_descales(form: str, causal: bool) -> None:
    tensors = _inputs()
    given = FORMS[form]
    o, lse = flashgen.attention(*tensors, causal=causal, return_lse=True, **given)
    wide = [_times(each, given.get(f"descale_{name}")) for name, each in zip("qkv", tensors, strict=True)]
    exact, exact_lse = plain_attention(*wide, causal="bottom_right" if causal else "none")
    assert o.dtype == torch.bfloat16 and o.shape == (2, 4, SEQ_Q, 8) and lse.dtype == torch.float32
    # bf16 keeps eight bits.
    assert max_error(o, exact) <= 2.0**-8 * exact.abs().max().item()
    assert max_error(lse, exact_lse) <= 1e-4
    turned = [strided_like(each.transpose(1, 2), (0, 2, 1, 3)) for each in tensors]
    other = flashgen.attention(*turned, causal=causal, layout="bshd", **given)
    assert isinstance(other, Tensor) and torch.equal(other.transpose(1, 2), o)


def test_options_go_with_descales() -> None:
    q, k, v = _inputs()
    options = {"softcap": 2.0, "bias": _random(SEQ_Q, SEQ_KV, seed=4).bfloat16(), "sinks": _random(4, seed=5)}
    o = flashgen.attention(q, k, v, descale_q=2.0, scale=-0.3, **options)
    modifiers = modifiers_from((2, 4, SEQ_Q, SEQ_KV), q, Options(**options)).to(Tensor.double)
    exact, _ = plain_attention(q.double() * 2, k.double(), v.double(), scale=-0.3, modifiers=modifiers)
    assert isinstance(o, Tensor) and max_error(o, exact) <= 2.0**-8 * exact.abs().max().item()


def test_mods_see_descaled_scores_and_dropout_follows_its_seed() -> None:
    q, k, v = _inputs()
    table = _random(SEQ_Q, seed=4)
    options: dict[str, Any] = {
        "score_mod": "where(abs(score) < 0.5, 2.0 * score, score) + table[q_idx]",
        "mask_mod": "(kv_idx + q_idx) % 3 > 0", "mod_tensors": {"table": table}, "dropout_p": 0.3,
    }  # fmt: skip

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, seed: Any) -> Any:
        given = {**options, "mod_tensors": {"table": table}, "dropout_seed": seed}
        return flashgen.attention(q, k, v, descale_q=2.0, descale_v=0.5, **given)

    seed = torch.tensor([3, 4])
    o = call(q, k, v, table, seed)
    judged = Options(
        dropout_p=0.3, dropout_seed=seed,
        **dict(zip(("score_mod", "mask_mod", "mod_tensors"), written(*list(options.values())[:3]), strict=True)),
    )  # fmt: skip
    modifiers = modifiers_from((2, 4, SEQ_Q, SEQ_KV), q, judged).to(Tensor.double)
    exact, _ = plain_attention(q.double() * 2, k.double(), v.double() / 2, modifiers=modifiers)
    assert max_error(o, exact) <= 2.0**-8 * exact.abs().max().item()
    assert torch.equal(call(q, k, v, table, (3, 4)), o) and not torch.equal(call(q, k, v, table, (3, 5)), o)
    # Without a seed one is drawn.
    torch.manual_seed(1)
    drawn = call(q, k, v, table, None)
    assert not torch.equal(call(q, k, v, table, None), drawn)
    torch.manual_seed(1)
    assert torch.equal(call(q, k, v, table, None), drawn)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, table, seed), o)
    with pytest.raises(UnsupportedError, match="no backward"):
        call(q, k, v, table.clone().requires_grad_(), seed)


def test_dropout_of_sequences_behind_each_other() -> None:
    q, k, v = (each[0].transpose(0, 1)[:SEQ_Q] for each in _inputs())
    starts = torch.tensor([0, SEQ_Q], dtype=torch.int32)
    given: dict[str, Any] = {"descale_q": 2.0, "dropout_p": 0.4, "dropout_seed": (8, 9)}
    o = flashgen.attention_varlen(q, k, v, starts, starts, SEQ_Q, SEQ_Q, **given)
    alone = flashgen.attention(*(each.transpose(0, 1)[None] for each in (q, k, v)), **given)
    assert isinstance(o, Tensor) and isinstance(alone, Tensor) and torch.equal(alone[0].transpose(0, 1), o)
    assert not torch.equal(flashgen.attention_varlen(q, k, v, starts, starts, SEQ_Q, SEQ_Q, descale_q=2.0), o)  # type: ignore[arg-type]


def test_sequences_behind_each_other() -> None:
    q, k, v = (each[0].transpose(0, 1)[:SEQ_Q] for each in _inputs())
    starts = torch.tensor([0, 100, 100, SEQ_Q], dtype=torch.int32)
    numbers = _numbers(3, 4, seed=1)
    o = flashgen.attention_varlen(q, k, v, starts, starts, 100, 100, causal=True, descale_q=numbers, descale_v=2.0)
    assert isinstance(o, Tensor) and o.dtype == torch.bfloat16
    for index in (0, 2):
        part = slice(int(starts[index]), int(starts[index + 1]))
        one = (each[part].transpose(0, 1)[None] for each in (q, k, v))
        alone = flashgen.attention(*one, causal=True, descale_q=numbers[index], descale_v=2.0)
        assert isinstance(alone, Tensor) and torch.equal(alone[0].transpose(0, 1), o[part])
    with pytest.raises(
        InputError, match=r"descale_k must broadcast to one of \[\], \[2\], \[3, 2\], but got \[3, 2, 1\]"
    ):
        flashgen.attention_varlen(q, k, v, starts, starts, 100, 100, descale_k=torch.ones(3, 2, 1))
    with pytest.raises(UnsupportedError, match="no backward"):
        flashgen.attention_varlen(q, k, v, starts, starts, 100, 100, sinks=torch.ones(4, requires_grad=True))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"descale_q": -1.0}, "a number from 0 to 1.2e.18, but got -1.0"),
        ({"descale_k": float("nan")}, "descale_k must be None, an fp32 tensor or a number"),
        ({"descale_v": True}, "but got True"),
        ({"descale_v": "1"}, "but got '1'"),
        ({"descale_q": torch.ones(3)}, r"one of \[\], \[4\], \[2, 4\], \[2, 4, 2\], but got \[3\]"),
        ({"descale_k": torch.ones(2, 4)}, r"one of \[\], \[2\], \[2, 2\], \[2, 2, 3\], but got \[2, 4\]"),
        ({"descale_v": torch.ones(2, 2, 2)}, r"but got \[2, 2, 2\]"),
        ({"descale_v": torch.ones(1, 2, 2, 3)}, r"but got \[1, 2, 2, 3\]"),
        ({"descale_q": torch.ones(4, dtype=torch.float64)}, "must be float32 on q's device cpu, but got torch.float64"),
        ({"descale_q": torch.ones(4, device="meta")}, "on meta"),
        ({"bias": torch.ones(SEQ_KV, dtype=torch.float16)}, "bias must be torch.bfloat16, as the output"),
    ],
)
def test_descales_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        flashgen.attention(*_inputs(), **given)


def test_descales_are_for_fp8() -> None:
    q, k, v = _inputs()
    with pytest.raises(InputError, match=r"for float8_e4m3fn inputs, but got torch\.bfloat16\. Multiply"):
        flashgen.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), descale_v=1.0)
    with pytest.raises(InputError, match="share one dtype"):
        flashgen.attention(q, k, v.bfloat16())
    for values in ({"descale": "head"}, {"dtype": "fp8", "descale": "block", "varlen": True}):
        with pytest.raises(InputError, match="is for fp8 inputs, and blocks for those that are not varlen"):
            Spec(**values)  # type: ignore[arg-type]
    for wide in ({"head_dim": 257}, {"head_dim_v": 320}):
        with pytest.raises(InputError, match="fp8 inputs have heads of at most 256, but got"):
            Spec(dtype="fp8", **wide)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"descale_q": 2.0}, {"window": (3, 3)}])
def test_there_is_no_backward(given: dict[str, Any]) -> None:
    q, k, v = _inputs()
    k.requires_grad_()
    with pytest.raises(UnsupportedError, match="fp8 inputs has no backward"):
        flashgen.attention(q, k, v, **given)
    with torch.no_grad():
        assert isinstance(flashgen.attention(q, k, v, **given), Tensor)
    with pytest.raises(InputError, match="no backward of fp8 inputs"):
        Spec("backward", dtype="fp8")


def test_tracing_and_autocast() -> None:
    q, k, v = _inputs()
    numbers = _numbers(4, seed=1)
    expected = flashgen.attention(q, k, v, descale_q=numbers, descale_v=2.0)

    def call(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Any:
        return flashgen.attention(q, k, v, descale_q=numbers, descale_v=2.0)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v, numbers)
    assert compiled.dtype == torch.bfloat16 and torch.equal(compiled, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(q, k, v, numbers), expected)
        plain = flashgen.attention(q, k, v)
    assert isinstance(plain, Tensor) and plain.dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="no vmap"):
        torch.func.vmap(lambda each: flashgen.attention(each, k, v))(q[None])


def test_p_is_rounded_relative_to_its_row() -> None:
    p = (
        torch.rand(5, 40, generator=torch.Generator().manual_seed(0)).exp2().square()
        * torch.logspace(-9, 0, 5)[:, None]
    )
    p[2, :] = 0
    rounded = rounded_to_e4m3(p)
    assert ((rounded - p).abs() <= 2.0**-4 * p).all() and not torch.equal(rounded, p)
    torch.testing.assert_close(rounded.amax(-1), p.amax(-1))
    assert rounded_to_e4m3(p[:, :0]).shape == (5, 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [None, -2.0, 0])
def test_kernels_are_given_what_they_name(form: str, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's half on CPU tensors: what a plan is bound to, and what a call passes on."""
    made: list[tuple[Spec, list[Tensor]]] = []
    calls: list[dict[str, Any]] = []

    def bind(
        spec: Spec, problem: Problem, family: str | None, views: list[Tensor], nothing: bool
    ) -> tuple[Selection, Callable[..., None], bool]:
        made.append((spec, views))

        def run(*arguments: Any) -> None:
            calls.append(dict(zip(arguments_of(spec), arguments, strict=True)))

        return select(spec, problem, H100, family), run, True

    monkeypatch.setattr(plans, "select_and_bind", bind)
    modified.forget()
    q, k, v = _inputs()
    given = Descales(*(FORMS[form].get(f"descale_{name}") for name in "qkv"))
    descales = descales_from((2, 4, 2), (SEQ_Q, SEQ_KV), q, given)
    modifiers = modifiers_from((2, 4, SEQ_Q, SEQ_KV), q, Options(softcap=3.0))._replace(descales=descales)
    out, _ = modified.attend_on_gpu(q, k, v, "none", scale, "bhsd", True, None, modifiers)
    modified.forget()
    (spec, views), (call,) = made[0], calls
    kinds: dict[str, Descale] = {"none": "tensor", "numbers": "tensor", "blocks": "block"}
    assert out.dtype == torch.bfloat16 and spec.dtype == "fp8" and spec.descale == kinds.get(form, "head")
    assert len(views) == len(laid_out(spec)) == (4 if spec.descale == "tensor" else 7)
    for name, heads, blocks in (("descale_q", 4, 2), ("descale_k", 2, 3), ("descale_v", 2, 3)):
        if spec.descale == "tensor":
            assert type(call[name]) is float
        else:
            assert call[name].shape == (2, heads, blocks)[: 2 if spec.descale == "head" else 3]
    assert call["softcap"] == 3.0 and call["scale"] > 0
    sign = {None: 1.0, -2.0: -1.0, 0: 0.0}[scale]
    assert torch.equal(call["q"].float(), q.float() * sign)


def test_gpus_without_e4m3_are_refused() -> None:
    family, spec = FAMILIES["triton_fwd"], Spec(dtype="fp8")
    for name in ("t4", "a100", "mi300x"):
        rejection = family.refuses(spec, family.default(spec, Gpu.named(name)), Gpu.named(name))
        assert rejection is not None and ("float8_e4m3fn" in rejection.reason) == (name != "v100"), name
    with pytest.raises(UnsupportedError, match="use bf16 or a GPU of sm_89 or newer"):
        select(spec, Problem(1, 1, 1, 64, 64), Gpu.named("a100"), None)


@pytest.mark.parametrize("name", ["triton_fwd", "hopper_fwd"])
@pytest.mark.parametrize("descale", ["tensor", "head", "block"])
def test_an_exported_file(descale: Descale, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it launches, what it is compared with, and what it refuses; tests/gpu runs it."""
    family, spec = FAMILIES[name], Spec("forward", 32, 32, "fp8", "bottom_right", descale=descale)
    path = tmp_path / "mine.py"
    write(Variant(family, spec, family.default(spec, H100)), path)
    for rule in (("format", "--check"), ("check", "--select", "F,B,E501")):
        command = [sys.executable, "-m", "ruff", *rule, "--isolated", "--no-cache", "--line-length", "120", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    module: Any = load_module(path)
    q, k, v = (_random(2, heads, seq, 32, seed=heads).to(FP8) for heads, seq in ((6, 150), (2, 300), (2, 300)))
    options = module.some_options(q, k)
    given = [each[None] if isinstance(each, Tensor) else each for each in options.values()]
    numbers = descales_from((2, 6, 2), (150, 300), q, Descales(*given))
    wide = [dequantised(*each, torch.float64) for each in zip((q, k, v), numbers, strict=True)]
    calls: list[Any] = []
    monkeypatch.setattr(module, "launch", lambda *given: calls.append(given))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for scale in (None, 0.3, -0.3, 0.0):
        used = 32**-0.5 if scale is None else scale
        expected, _ = plain_attention(*wide, causal="bottom_right", scale=used)
        assert max_error(module.reference(q, k, v, used, **options), expected) < 1e-12
        out, lse = module.attention(q, k, v, scale=scale, return_lse=True, **options)
        assert out.dtype == torch.bfloat16 and out.shape == q.shape and lse.shape == (2, 6, 150)
        launched = dict(zip(arguments_of(spec), calls.pop(), strict=True))
        assert launched["scale"] > 0
        # The same scores, by a positive scale.
        assert torch.equal(launched["q"].float() * launched["scale"], q.float() * used)
        for number, mine in zip(numbers, (launched[f"descale_{each}"] for each in "qkv"), strict=True):
            assert torch.equal(mine, number) if isinstance(number, Tensor) else mine == number
    bad = -1.0 if descale == "tensor" else torch.ones(5)
    with pytest.raises(ValueError, match="descale"):
        module.attention(q, k, v, **{**options, "descale_k": bad})
    with pytest.raises(ValueError, match="expected fp8"):
        module.attention(q.half(), k, v, **options)


def _variants() -> list[tuple[Variant, Gpu]]:
    family = FAMILIES["triton_fwd"]
    causal: Causal = "bottom_right"
    specs = [
        (Spec(head_dim=64, head_dim_v=64, dtype="fp8"), L4),
        (Spec(head_dim=8, head_dim_v=8, dtype="fp8", descale="block"), H100),
        (Spec(dtype="fp8", causal=causal, descale="block"), H100),
        (Spec(head_dim=256, head_dim_v=256, dtype="fp8", descale="head"), H100),
        (Spec(head_dim=80, head_dim_v=48, dtype="fp8", causal=causal, softcap=True, sinks=True, descale="block"), H100),
        (Spec(dtype="fp8", causal=causal, dropout=True, descale="block"), H100),
        (Spec(dtype="fp8", causal=causal, **features("score_mod", "relative bias"), descale="block"), H100),
    ]
    return [(Variant(family, spec, family.default(spec, gpu)), gpu) for spec, gpu in specs]


@pytest.mark.parametrize(("each", "gpu"), _variants(), ids=lambda value: getattr(value, "slug", None))
def test_defaults_compile_for_gpus_that_are_not_here(each: Variant, gpu: Gpu) -> None:
    assert each.family.refuses(each.spec, each.config, gpu) is None
    compiled = compile_kernel(each, gpu)
    resources = resources_of(compiled)
    low, high = each.family.shared_memory(each.spec, each.config, gpu)
    assert low <= resources.shared <= high
    assert resources.stack <= 8 and not resources.loop.get("spill", 0)
    products = "wgmma.mma_async" if gpu is H100 else "mma.sync"
    # Both products in fp8.
    lines = [line for line in compiled.asm["ptx"].splitlines() if products in line]
    assert lines and all(".e4m3.e4m3" in line for line in lines)


def test_text_is_formatted_and_clean(tmp_path: Path) -> None:
    # Expressions stand as their callers wrote them.
    assert_formatted_and_clean([each for each, _ in _variants() if each.spec.score_mod == "none"], tmp_path)


@pytest.mark.parametrize("descale", ["tensor", "head", "block"])
def test_what_is_timed(descale: Descale) -> None:
    spec, problem = (
        Spec(head_dim=16, head_dim_v=8, dtype="fp8", descale=descale, bias="bf16"),
        Problem(2, 4, 2, 20, 150),
    )
    q, k, v = inputs(spec, problem, "cpu")
    assert q.dtype == k.dtype == v.dtype == FP8 and v.shape == (2, 2, 150, 8) and q.float().std() > 0.5
    modifiers = usual_modifiers(spec, problem, q)
    given = dict(zip(spec.modifiers, modifiers.arguments("none"), strict=True))
    assert list(given) == ["descale_q", "descale_k", "descale_v", "bias"] and given["bias"].dtype == torch.bfloat16  # type: ignore[union-attr]
    assert with_features(replace(spec, bias="none", descale="tensor"), modifiers) == spec


def test_fp8_is_tuned_apart() -> None:
    spec, problem = Spec(dtype="fp8", descale="block"), Problem(1, 16, 16, 4096, 4096)
    for each, aligned, family in (
        (spec, True, "hopper_fwd"),
        (spec, False, "triton_fwd"),
        (replace(spec, softcap=True), True, "triton_fwd"),
        (replace(spec, head_dim_v=192), True, "triton_fwd"),
        (replace(spec, head_dim_v=16), True, "triton_fwd"),
    ):
        selection = select(each, problem, H100, None, aligned=aligned)
        assert selection.variant.family.name == family and "--dtype fp8" in selection.why
    assert Spec(dtype="fp8", descale="block").plain == Spec(dtype="fp8")
    assert "descale" not in Spec(dtype="fp8").stated and Spec(dtype="fp8", descale="head").stated["descale"] == "head"
    assert Spec(dtype="fp8").out_dtype == "bf16" and Spec(dtype="fp16").out_dtype == "fp16"


def test_sums_of_14_bits_are_cut_off() -> None:
    one = torch.ones(1, 3)
    # Exponents are those of the factors: 0 and -13 and -14 of the first. What is cut off is cut off towards zero.
    columns = torch.tensor([[1.0, -1.0, 1.0], [2.0**-13, -(2.0**-13), 0.0], [2.0**-14, -(2.0**-14), 2.0**-14]])
    expected = torch.tensor([[1.0 + 2.0**-13, -1.0 - 2.0**-13, 1.0]])
    assert torch.equal(summed_in_14_bits(one, columns), expected)
    # 1.5 * 1.5 has the exponent of 1 * 1.
    rows, columns = torch.tensor([[1.5, 2.0**-13]]), torch.tensor([[1.5], [1.0]])
    assert summed_in_14_bits(rows, columns).item() == 2.25 + 2.0**-13
    # Another 32 products start from what is left of the sum.
    long = torch.zeros(1, 40)
    long[0, 0], long[0, 39] = 1.0, 2.0**-14
    assert summed_in_14_bits(long, torch.ones(40, 1)).item() == 1.0
    assert summed_in_14_bits(one, columns.new_zeros(3, 0)).shape == (1, 0)


def test_narrow_heads_fill_a_product() -> None:
    spec = Spec(head_dim=8, head_dim_v=8, dtype="fp8")
    assert spec.parts == ((0, 32),) and spec.parts_v == ((0, 16),)
    family = FAMILIES["triton_fwd"]
    few = Config(**{**family.default(spec, H100), "block_kv": 16})
    rejection = family.refuses(spec, few, H100)
    assert rejection is not None and "the 32 products of fp8" in rejection.reason
