"""Conformance of every decode family on a real GPU: each sequence against float64, caches bit by bit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.check import Accuracy
from flashgen.check_decode import check_decode
from flashgen.compile import compile_resources
from flashgen.decode_cases import DECODE_CASES, DecodeCase
from flashgen.decode_inputs import served_inputs
from flashgen.evaluate import evaluate
from flashgen.families import Family, Variant, families_of
from flashgen.hardware import current_gpu
from flashgen.launch import arguments_of, bind, laid_out, launcher, scratch_for, split_for
from flashgen.problem import Problem
from flashgen.space import Config
from flashgen.spec import Spec

DECODE = families_of("decode")
every_family = pytest.mark.parametrize("family", DECODE, ids=lambda family: family.name)
PAGE_SIZES = (16, 64, 100, 256)
FEATURES: dict[str, dict[str, Any]] = {
    **{name: {name: True} for name in ("softcap", "alibi", "window", "sinks")},
    "all": dict.fromkeys(("softcap", "alibi", "window", "sinks"), True),
}


def _variant(family: Family, spec: Spec, **config: int) -> Variant:
    gpu = current_gpu()
    chosen = Config(**{**family.default(spec, gpu), **config})
    rejection = family.refuses(spec, chosen, gpu)
    if rejection is not None:
        pytest.skip(f"{family.name} refuses {spec.slug}: {rejection.reason}")
    return Variant(family, spec, chosen)


def _assert_accurate(variant: Variant, cases: tuple[DecodeCase, ...] = DECODE_CASES) -> None:
    result = check_decode(launcher(variant), variant.spec, "cuda", cases)
    assert isinstance(result, Accuracy), result


@every_family
@pytest.mark.parametrize(
    ("dtype", "widths", "causal", "paged"),
    [
        *itertools.product(
            ["bf16"], [(64, 64), (128, 128), (256, 256), (72, 40)], ["none", "bottom_right"], [False, True]
        ),
        *itertools.product(["bf16"], [(96, 96), (192, 128), (1, 5), (576, 512), (320, 288)], ["bottom_right"], [True]),
        *itertools.product(["fp16", "fp32"], [(128, 128), (72, 40)], ["bottom_right"], [True]),
        ("fp32", (576, 512), "bottom_right", False),
    ],
    ids=str,
)
def test_every_spec_agrees_with_float64(
    family: Family, dtype: str, widths: tuple[int, int], causal: str, paged: bool
) -> None:
    spec = Spec("decode", *widths, dtype, causal, paged=paged)  # type: ignore[arg-type]
    _assert_accurate(_variant(family, spec))


@every_family
@pytest.mark.parametrize("where", [{}, {"paged": True, "appended": True, "varlen": True}], ids=str)
@pytest.mark.parametrize(
    ("features", "causal"), [*itertools.product(FEATURES, ["bottom_right"]), ("window", "none"), ("all", "none")]
)
def test_every_feature(family: Family, features: str, causal: str, where: dict[str, Any]) -> None:
    spec = Spec("decode", dtype="bf16", causal=causal, **FEATURES[features], **where)  # type: ignore[arg-type]
    _assert_accurate(_variant(family, spec))


@every_family
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("widths", [(128, 128), (72, 40)], ids=str)
def test_new_keys(family: Family, widths: tuple[int, int], paged: bool, varlen: bool) -> None:
    spec = Spec("decode", *widths, "fp16", "bottom_right", appended=True, paged=paged, varlen=varlen)
    _assert_accurate(_variant(family, spec))
    beyond = DecodeCase("beyond", Problem(3, 6, 2, 4, 320), (320, 318, 0), page_size=64, num_splits=3)
    _assert_accurate(_variant(family, spec), (beyond,))


@every_family
@pytest.mark.parametrize("where", [{}, {"paged": True}, {"paged": True, "appended": True}], ids=str)
@pytest.mark.parametrize("descale", ["tensor", "head", "token"])
@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_caches_of_8_bits(family: Family, cache: str, descale: str, where: dict[str, Any]) -> None:
    dtype = "fp16" if descale == "head" else "bf16"
    fields: dict[str, Any] = {"dtype": dtype, "causal": "bottom_right", "cache": cache, "descale": descale, **where}
    _assert_accurate(_variant(family, Spec("decode", **fields)))


@every_family
@pytest.mark.parametrize(
    ("group", "page_size"), [*itertools.product([4], [None, *PAGE_SIZES]), *itertools.product([1, 3, 7, 8], [64])]
)
def test_every_group_length_and_split(family: Family, group: int, page_size: int | None) -> None:
    spec = Spec("decode", dtype="bf16", causal="bottom_right", paged=page_size is not None, appended=True)
    capacity = 700
    cases = tuple(
        DecodeCase(
            f"{seq_q} rows, {num_splits} splits",
            Problem(4, 2 * group, 2, seq_q, capacity),
            (0, 1, 333, capacity - seq_q),
            page_size=page_size or 16,
            num_splits=num_splits,
        )
        for seq_q, num_splits in itertools.product((1, 2, 5, 16, 64), (None, 1, 7, 32))
    )
    _assert_accurate(_variant(family, spec), cases)


@every_family
@pytest.mark.parametrize("seed", range(12))
def test_configs_of_the_space(family: Family, seed: int) -> None:
    spec = Spec("decode", dtype="bf16", causal="bottom_right", appended=True)
    variant = Variant(family, spec, random.Random(seed).choice(family.space(spec, current_gpu()).usable))
    used = max(each.shared for each in compile_resources(variant, current_gpu()))
    if used > current_gpu().shared_per_block:
        pytest.skip(f"{variant.slug} needs {used} bytes of shared memory")
    _assert_accurate(variant, DECODE_CASES[:4])


@every_family
@pytest.mark.parametrize("fields", [{}, {"paged": True}, {"cache": "int8", "descale": "token"}], ids=str)
def test_what_the_tuner_does_with_a_candidate(family: Family, fields: dict[str, Any]) -> None:
    spec = Spec("decode", dtype="bf16", causal="bottom_right", **fields)
    outcome = evaluate(_variant(family, spec), (Problem(2, 32, 8, 1, 4096),), 5)
    assert not hasattr(outcome, "reason") and outcome.times[0].median_us > 0  # type: ignore[union-attr]


def _memory(tensor: Tensor) -> Tensor:
    """All of it, of which ragged queries have views that overlap."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


class Call:
    """A bound call with its own workspace, full of NaN, and results."""

    def __init__(self, variant: Variant, given: dict[str, Any], num_splits: int | None = None) -> None:
        spec = variant.spec
        views = [given[name] for name in laid_out(spec)]
        self.split = split_for(variant, *views, num_splits=num_splits)
        self.bound = bind(variant, *views, num_splits=self.split.splits)
        workspace, counters = scratch_for(self.split, views[0].device)
        self.given = {**given, "workspace": workspace.fill_(torch.nan), "counters": counters}
        self.names = arguments_of(spec)

    def __call__(self) -> tuple[Tensor, Tensor]:
        for name in ("o", "lse"):
            _memory(self.given[name]).fill_(torch.nan)
        self.bound(*(self.given[name] for name in self.names))
        return self.given["o"].clone(), self.given["lse"].clone()


PLAIN = Spec("decode", dtype="bf16", causal="bottom_right", paged=True)


@every_family
@pytest.mark.parametrize("problem", [Problem(3, 32, 8, 1, 5000), Problem(1, 28, 4, 7, 3000)], ids=str)
def test_a_thousand_runs_are_the_same(family: Family, problem: Problem) -> None:
    call = Call(_variant(family, PLAIN), served_inputs(PLAIN, problem, "cuda"))
    assert call.split.splits > 4
    o, lse = call()
    assert o.isfinite().all() and lse.isfinite().all()
    for _ in range(1000):
        again, its_lse = call()
        assert torch.equal(o, again) and torch.equal(lse, its_lse)
    assert not call.given["counters"].any()


@every_family
@pytest.mark.parametrize("fields", [{}, {"appended": True}, {"varlen": True}], ids=str)
def test_graphs_with_other_lengths(family: Family, fields: dict[str, Any]) -> None:
    """One captured call serves all lengths; eager ones in between share nothing with it."""
    spec = Spec("decode", dtype="bf16", causal="bottom_right", paged=True, **fields)
    given = served_inputs(spec, Problem(4, 16, 4, 2, 2048), "cuda")
    variant = _variant(family, spec)
    eager = Call(variant, given)
    eager()
    own = {
        **given,
        **{
            name: _memory(given[name]).clone().as_strided(given[name].shape, given[name].stride())
            for name in ("o", "lse")
        },
    }
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = Call(variant, own)
        captured.bound(*(captured.given[name] for name in captured.names))
    for lengths in ((2046, 0, 1, 700), (0, 0, 0, 0), (64, 63, 65, 2000)):
        given["cache_seqlens"].copy_(torch.tensor(lengths))
        eager()
        for name in ("o", "lse"):
            _memory(own[name]).fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        for name in ("o", "lse"):
            found, expected = (_memory(each[name]).nan_to_num() for each in (own, given))
            assert torch.equal(found, expected), (name, lengths)
    assert not captured.given["counters"].any()


@every_family
@pytest.mark.parametrize("num_splits", [1, 5, 32])
@pytest.mark.parametrize("seq_q", [1, 5])
def test_rows_do_not_depend_on_their_batch(family: Family, seq_q: int, num_splits: int) -> None:
    given = served_inputs(PLAIN, Problem(7, 12, 4, seq_q, 1500), "cuda")
    given["cache_seqlens"].copy_(torch.tensor([1500, 7, 900, 0, 1, 333, 1499]))
    variant = _variant(family, PLAIN)
    o, lse = Call(variant, given, num_splits)()
    for index in (0, 2, 5, 6):
        one = {name: value for name, value in given.items() if name not in ("k", "v")}
        one = {
            name: value[index : index + 1].clone() if isinstance(value, Tensor) else value
            for name, value in one.items()
        }
        its_o, its_lse = Call(variant, {**one, "k": given["k"], "v": given["v"]}, num_splits)()
        assert torch.equal(its_o[0], o[index]) and torch.equal(its_lse[0], lse[index]), index


@every_family
def test_more_sequences_than_a_grid_has_rows(family: Family) -> None:
    spec = Spec("decode", 16, 16, "fp16", "bottom_right")
    lengths = tuple(index % 17 for index in range(70000))
    case = DecodeCase("many", Problem(70000, 1, 1, 1, 16), tuple(min(each, 16) for each in lengths), num_splits=1)
    given = served_inputs(spec, case.problem, "cuda")
    given["cache_seqlens"].copy_(torch.tensor(case.lengths))
    o, lse = Call(_variant(family, spec), given)()
    scores = (given["q"].double() @ given["k"].double().transpose(2, 3)) * 0.25
    hidden = torch.arange(16, device="cuda") >= given["cache_seqlens"][:, None, None, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    expected = torch.softmax(scores, 3).nan_to_num(0.0) @ given["v"].double()
    assert (o.double() - expected).abs().max() < 4e-3
    assert torch.equal(lse.isinf(), scores.logsumexp(3).isinf())


@every_family
def test_pages_far_apart(family: Family) -> None:
    """Offsets of more than 2**31 elements."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of memory")
    pages, shape = 2**31 // (64 * 4 * 128) + 40, (4, 64, 128)
    given = served_inputs(PLAIN, Problem(2, 8, 4, 1, 640), "cuda")
    variant = _variant(family, PLAIN)
    o, lse = Call(variant, given)()
    far = {name: torch.full((pages, 64, 4, 128), torch.nan, dtype=torch.bfloat16, device="cuda") for name in "kv"}
    far = {name: each.transpose(1, 2) for name, each in far.items()}
    assert far["k"].shape[1:] == shape
    for name in ("k", "v"):
        far[name][-20:] = given[name]
    table = given["block_table"] + pages - 20
    its_o, its_lse = Call(variant, {**given, **far, "block_table": table})()
    assert torch.equal(o, its_o) and torch.equal(lse, its_lse)


@every_family
def test_streams_side_by_side(family: Family) -> None:
    variant = _variant(family, PLAIN)
    given = served_inputs(PLAIN, Problem(1, 32, 8, 1, 8192), "cuda")
    expected, _ = Call(variant, given)()
    streams = [torch.cuda.Stream() for _ in range(3)]
    outputs = []
    torch.cuda.synchronize()
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                own = {**given, "o": torch.empty_like(given["o"]), "lse": torch.empty_like(given["lse"])}
                outputs.append(Call(variant, own)()[0])
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in outputs)
