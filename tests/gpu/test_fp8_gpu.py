"""Attention of fp8 inputs on this machine's GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mods import features
from torch import Tensor

import flashgen
from flashgen.check import Accuracy, max_error
from flashgen.descales import BLOCK, FP8
from flashgen.evaluate import checked
from flashgen.export import write
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import current_gpu
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Causal, Descale, Spec

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with e4m3"
)

FORWARD, HOPPER = FAMILIES["triton_fwd"], FAMILIES["hopper_fwd"]
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
DESCALES: tuple[Descale, ...] = ("tensor", "head", "block")
FEATURES: tuple[dict[str, Any], ...] = (
    {}, {"softcap": True, "window": True}, {"bias": "bf16"}, {"mask": True, "sinks": True},
    {"alibi": True, "segments": True}, {"dropout": True}, {"softcap": True, **features("score_mod", "table")},
    {"dropout": True, **features("mask_mod", "documents")},
)  # fmt: skip


@pytest.fixture(params=["triton_fwd", "hopper_fwd"])
def family(request: pytest.FixtureRequest) -> str:
    """Each that this GPU has."""
    name = str(request.param)
    if name == "hopper_fwd" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper_fwd is for sm_90")
    return name


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features) or "plain")
@pytest.mark.parametrize("descale", DESCALES)
@pytest.mark.parametrize("causal", CAUSAL)
def test_conformance(causal: Causal, descale: Descale, features: dict[str, Any]) -> None:
    # Each combination in one width, so that all of them are met; rows of 40 bytes start on no 16-byte boundary.
    width = (64, 128, 40)[(CAUSAL.index(causal) + len(features)) % 3]
    spec = Spec("forward", width, width, "fp8", causal, descale=descale, **features)
    result = checked(Variant(FORWARD, spec, FORWARD.default(spec, current_gpu())))
    assert isinstance(result, Accuracy), result


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 16), (80, 48), (192, 128), (200, 200), (256, 256)])
def test_widths(head_dim: int, head_dim_v: int) -> None:
    spec = Spec("forward", head_dim, head_dim_v, "fp8", "bottom_right", descale="block")
    result = checked(Variant(FORWARD, spec, FORWARD.default(spec, current_gpu())))
    assert isinstance(result, Accuracy), result


@pytest.mark.parametrize("tile", [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3), (32, 32, 4, 2)])
def test_tiles(tile: tuple[int, int, int, int]) -> None:
    for descale, advance in itertools.product(DESCALES, (0, 1)):
        spec = Spec("forward", 128, 128, "fp8", "bottom_right", descale=descale)
        config = Config(**dict(zip(FORWARD.choices, (*tile, 32, advance), strict=True)))
        result = checked(Variant(FORWARD, spec, config))
        assert isinstance(result, Accuracy), result


@pytest.mark.parametrize("family", ["hopper_fwd"], indirect=True)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 32), (64, 64), (80, 48), (128, 128), (192, 128), (256, 128)])
@pytest.mark.parametrize("causal", CAUSAL)
def test_hopper_conformance(causal: Causal, head_dim: int, head_dim_v: int, family: str) -> None:
    for descale in DESCALES:
        spec = Spec("forward", head_dim, head_dim_v, "fp8", causal, descale=descale)
        result = checked(Variant(HOPPER, spec, HOPPER.default(spec, current_gpu())))
        assert isinstance(result, Accuracy), result


@pytest.mark.parametrize("family", ["hopper_fwd"], indirect=True)
@pytest.mark.parametrize(("width", "descale"), [(64, "block"), (64, "tensor"), (128, "head")])
def test_hopper_choices(width: int, descale: Descale, family: str) -> None:
    spec = Spec("forward", width, width, "fp8", "bottom_right", descale=descale)
    usable = HOPPER.space(spec, current_gpu()).usable
    for config in usable[:: max(1, len(usable) // 12)]:
        result = checked(Variant(HOPPER, spec, config))
        assert isinstance(result, Accuracy), (config, result)


@pytest.mark.parametrize("family", ["hopper_fwd"], indirect=True)
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize(("head_dim", "kv_heads", "seq"), [(64, 16, 1900), (128, 4, 1920)])
def test_many_launches_give_the_same_bits(head_dim: int, kv_heads: int, seq: int, causal: Causal, family: str) -> None:
    """At sizes that fill the GPU: a race of the warps that turn V shows where blocks compete."""
    q, k, v = (_quantised(2, heads, seq, head_dim, seed=seed)[0] for seed, heads in enumerate((16, kv_heads, kv_heads)))

    def call() -> Tensor:
        o = flashgen.attention(q, k, v, causal=causal != "none", family=family)
        assert isinstance(o, Tensor)
        return o

    first, differing = call(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        differing += (call() != first).sum()
    assert differing.item() == 0 and first.isfinite().all()


def _quantised(*shape: int, seed: int, magnitude: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Random values by blocks in fp8, their descales, and the values themselves; bf16."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randn(shape, device="cuda", generator=generator) * magnitude
    batch, heads, seq, _ = shape
    numbers = torch.empty(batch, heads, -(-seq // BLOCK), device="cuda")
    quantised = torch.empty(shape, device="cuda", dtype=FP8)
    for block in range(numbers.shape[2]):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        numbers[:, :, block] = values[:, :, rows].abs().amax((2, 3)) / 448
        quantised[:, :, rows] = (values[:, :, rows] / numbers[:, :, block, None, None]).to(FP8)
    return quantised, numbers, values.bfloat16()


def _wide(tensor: Tensor, numbers: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return tensor.to(dtype) * numbers.to(dtype).repeat_interleave(BLOCK, 2)[:, :, : tensor.shape[2], None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("magnitude", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 200), (200, 77), (333, 1000), (512, 4096)])
def test_blocks_of_any_magnitude(
    seq_q: int, seq_kv: int, magnitude: float, causal: bool, family: str, record_property: Any
) -> None:
    """Beside float64 on what the inputs stand for, and beside the kernel for bf16 on the same; both are reported."""
    (q, dq, _), (k, dk, _), (v, dv, _) = (
        _quantised(2, heads, seq, 64, seed=seed, magnitude=size)
        for seed, (heads, seq, size) in enumerate([(6, seq_q, magnitude), (2, seq_kv, 1.0), (2, seq_kv, magnitude)])
    )
    o, lse = flashgen.attention(
        q, k, v, causal=causal, descale_q=dq, descale_k=dk, descale_v=dv, return_lse=True, family=family
    )
    how = {"causal": "bottom_right" if causal else "none"}
    wide = [_wide(*each) for each in ((q, dq), (k, dk), (v, dv))]
    exact, exact_lse = plain_attention(*wide, **how)
    plain, _ = plain_attention(*(each.float() for each in wide), **how, fp8=True)
    # Few rows meet few roundings: what the largest value loses by one of them counts, too.
    slack = 2.0**-5 * exact.abs().max().item()
    assert o.dtype == torch.bfloat16
    error = max_error(o, exact)
    assert error <= 2 * max(max_error(plain.bfloat16(), exact), slack)
    finite = exact_lse[exact_lse.isfinite()]
    # Scores come from sums of about 14 bits.
    assert max_error(lse, exact_lse) <= 1e-3 + 2.0**-10 * finite.abs().max().item()
    other = flashgen.attention(*(each.bfloat16() for each in wide), causal=causal)
    assert isinstance(other, Tensor)
    record_property("error_fp8", error)
    record_property("error_bf16", max_error(other, exact))
    record_property("largest", exact.abs().max().item())


def test_many_keys_lose_nothing(family: str) -> None:
    """All keys weigh alike: what a sum of 14 bits drops at every step would show in 65,536 of them."""
    q = torch.zeros(1, 1, 64, 64, device="cuda").to(FP8)
    k, v = (torch.ones(1, 1, 65536, 64, device="cuda").to(FP8) for _ in range(2))
    o, lse = flashgen.attention(q, k, v, descale_v=0.75, return_lse=True, family=family)
    assert max_error(o, torch.full_like(o, 0.75)) <= 0.75 * 2.0**-8
    assert max_error(lse, torch.full_like(lse, 65536.0).log()) <= 1e-4


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_memory_between_and_behind_is_not_read(layout: str, family: str) -> None:
    """0x7f is NaN: in gaps between rows, behind the last key and behind the last descale."""
    shapes = ((2, 6, 130, 64), (2, 2, 190, 64), (2, 2, 190, 64))
    clean, poisoned = [], []
    for seed, shape in enumerate(shapes):
        values, numbers, _ = _quantised(*shape, seed=seed)
        whole = torch.full((shape[0], shape[1], shape[2] + 70, 96), 0x7F, dtype=torch.uint8, device="cuda").view(FP8)
        view = whole[:, :, : shape[2], 16:80]
        view.copy_(values)
        more = torch.full((*numbers.shape[:2], numbers.shape[2] + 3), torch.nan, device="cuda")
        more[..., : numbers.shape[2]] = numbers
        turned = [each if layout == "bhsd" else each.transpose(1, 2) for each in (values, view)]
        clean.append((turned[0], numbers))
        poisoned.append((turned[1], more[..., : numbers.shape[2]]))
    results = [
        flashgen.attention(
            *(each for each, _ in given), causal=True, layout=layout, family=family,
            **{f"descale_{name}": numbers for name, (_, numbers) in zip("qkv", given, strict=True)},
        )
        for given in (clean, poisoned)
    ]  # fmt: skip
    assert isinstance(results[0], Tensor) and isinstance(results[1], Tensor)
    assert results[1].isfinite().all() and torch.equal(*results)


def test_forms_of_the_same_numbers_agree(family: str) -> None:
    q, k, v = (_quantised(2, heads, 150, 64, seed=seed)[0] for seed, heads in enumerate((6, 2, 2)))
    results = []
    for give in (float, lambda number: torch.full((), number, device="cuda"),
                 lambda number: torch.full((2, 1), number, device="cuda"),
                 lambda number: torch.full((2, 1, 2), number, device="cuda")):  # fmt: skip
        numbers: list[Any] = [give(number) for number in (0.01, 0.02, 0.5)]
        given = dict(zip(("descale_q", "descale_k", "descale_v"), numbers, strict=True))
        results.append(flashgen.attention(q, k, v, causal=True, family=family, **given))
    for each in results[1:]:
        # Multiplied in another order.
        assert max_error(each, results[0]) <= 2.0**-6 * results[0].abs().max().item()
    without = flashgen.attention(q, k, v, family=family)
    assert torch.equal(without, flashgen.attention(q, k, v, descale_q=1.0, descale_v=1, family=family))
    negated = q.view(torch.uint8).bitwise_xor(128).view(FP8)
    turned = flashgen.attention(negated, k, v, scale=0.1, family=family)
    assert torch.equal(flashgen.attention(q, k, v, scale=-0.1, family=family), turned)


def test_sequences_behind_each_other() -> None:
    lengths = [5, 0, 333, 64]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    q, k, v = (
        _quantised(1, heads, sum(lengths), 64, seed=seed)[0][0].transpose(0, 1) for seed, heads in enumerate((6, 2, 2))
    )
    numbers = torch.rand(len(lengths), 2, device="cuda") + 0.5
    o = flashgen.attention_varlen(
        q, k, v, starts, starts, 333, 333, causal=True, descale_q=0.01, descale_k=numbers, descale_v=numbers
    )
    assert isinstance(o, Tensor) and o.dtype == torch.bfloat16
    for index, length in enumerate(lengths):
        part = slice(int(starts[index]), int(starts[index]) + length)
        one = (each[part].transpose(0, 1)[None] for each in (q, k, v))
        alone = flashgen.attention(
            *one, causal=True, descale_q=0.01, descale_k=numbers[index], descale_v=numbers[index]
        )
        assert isinstance(alone, Tensor)
        if length:
            assert max_error(alone[0].transpose(0, 1), o[part]) <= 2.0**-7 * alone.abs().max().item()


@pytest.mark.parametrize("descale", DESCALES)
def test_an_exported_file_runs(tmp_path: Path, family: str, descale: Descale) -> None:
    spec = Spec("forward", 64, 64, "fp8", "bottom_right", descale=descale)
    path = tmp_path / "my_attention.py"
    write(Variant(FAMILIES[family], spec, FAMILIES[family].default(spec, current_gpu())), path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("max error") == 3


def test_captured_and_compiled(family: str) -> None:
    q, k, v = (_quantised(2, heads, 256, 64, seed=seed)[0] for seed, heads in enumerate((6, 2, 2)))
    numbers = torch.rand(6, device="cuda")

    def call(q: Tensor, numbers: Tensor) -> Any:
        return flashgen.attention(q, k, v, descale_q=numbers, descale_k=0.05, descale_v=2.0, causal=True, family=family)

    expected = call(q, numbers)
    assert torch.equal(torch.compile(call, fullgraph=True)(q, numbers), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(q, numbers)
    o.zero_()
    graph.replay()
    assert torch.equal(o, expected)
    with pytest.raises(flashgen.FlashgenError, match="no backward"):
        flashgen.attention(q.clone().requires_grad_(), k, v)
    variant = flashgen.explain(q, k, v, descale_q=numbers, family=family).variant
    assert variant.spec.descale == "head" and variant.family.name == family
