"""The decode family without a GPU: its specs, its files, what they compile to, how calls are split."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from rendered import assert_formatted_and_clean, assert_golden
from torch import Tensor
from variants import DECODE_GOLDEN, SERVED, TRITON_DECODE, compiled_hash, decode

from flashgen.compile import compile_resources, kernel_resources, launches
from flashgen.decode_inputs import as_split, served_inputs
from flashgen.errors import InputError, UnsupportedError
from flashgen.export import write
from flashgen.families import Variant
from flashgen.gate import MAX_STACK
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.launch import arguments_of, laid_out, split_for
from flashgen.model import predict_us
from flashgen.problem import Problem
from flashgen.serving import MAX_SPLITS
from flashgen.spec import Spec
from flashgen.workers import Workers

GPUS = (Gpu.named("a100"), Gpu.named("h100"))
PATIENCE = 300
every_golden = pytest.mark.parametrize("golden", DECODE_GOLDEN, ids=lambda golden: golden.slug)
every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)


@every_golden
def test_text_is_the_golden_file(golden: Variant, request: pytest.FixtureRequest) -> None:
    assert_golden(golden, request)


def test_every_text_is_formatted_and_clean(tmp_path: Any) -> None:
    widths = ((128, 128), (72, 40), (320, 288))
    fields = [
        {"causal": causal, "paged": paged, "appended": appended, "varlen": varlen}
        for causal, paged, appended, varlen in itertools.product(("none", "bottom_right"), *[(False, True)] * 3)
    ]
    specs = [Spec("decode", *width, **each) for width, each in itertools.product(widths, fields)]  # type: ignore[arg-type]
    specs += [Spec("decode", **{**SERVED, "softcap": softcap}) for softcap in (False, True)]
    specs += [
        Spec("decode", cache=cache, descale=descale, paged=paged)  # type: ignore[arg-type]
        for cache, descale, paged in itertools.product(("fp8", "int8"), ("tensor", "head", "token"), (False, True))
    ]
    assert_formatted_and_clean([*DECODE_GOLDEN, *(decode(spec, 64, 64, 4, 3, 1) for spec in specs)], tmp_path)


@pytest.fixture(scope="module")
def compiled(workers: Workers) -> dict[tuple[str, str], object]:
    """What every golden file compiles to, by slug and architecture."""
    futures = {
        (golden.slug, gpu.arch): workers.submit(PATIENCE, compile_resources, golden, gpu)
        for golden, gpu in itertools.product(DECODE_GOLDEN, GPUS)
    }
    return {key: workers.outcome(future) for key, future in futures.items()}


@every_gpu
@every_golden
def test_golden_file_compiles(golden: Variant, gpu: Gpu, compiled: dict[tuple[str, str], object]) -> None:
    assert golden.family.refuses(golden.spec, golden.config, gpu) is None
    outcome = compiled[golden.slug, gpu.arch]
    assert isinstance(outcome, tuple), outcome
    (resources,) = outcome
    low, high = golden.family.shared_memory(golden.spec, golden.config, gpu)
    if golden.spec.appended and tuple(map(int, version("triton").split(".")[:2])) >= (3, 8):
        # From 3.8 on Triton knows nothing of addresses that tl.where chose, as those of new keys are: nothing is copied
        # ahead, and addresses spill.
        assert resources.shared <= high and resources.stack <= 1024
        return
    assert low <= resources.shared <= high
    assert resources.shared <= gpu.shared_per_block
    assert resources.stack <= MAX_STACK["decode"]
    if golden.spec.dtype != "fp32":
        # Keys and values are copied 16 bytes at a time, behind the back of what computes.
        config, spec = golden.config, golden.spec
        bytes_ = config["block_kv"] * (spec.block_d + spec.block_dv) * (1 if spec.cache != "none" else 2)
        # Some Tritons copy the numbers of tokens ahead as well.
        more = 4 if spec.descale == "token" else 0
        assert 0 < resources.loop["cp_async"] <= 2 * bytes_ // (16 * 32 * config["num_warps"]) + more


def test_every_option_reaches_the_compiler(workers: Workers) -> None:
    spec = Spec("decode", 64, 64, "fp16")
    numbers = ((64, 64, 4, 2, 1), (32, 64, 4, 2, 1), (64, 32, 4, 2, 1), (64, 64, 8, 2, 1), (64, 64, 4, 3, 1))
    futures = [workers.submit(PATIENCE, compiled_hash, decode(spec, *each), GPUS[0]) for each in numbers]
    hashes = [workers.outcome(future) for future in futures]
    assert all(isinstance(each, str) for each in hashes), hashes
    assert len(set(hashes)) == len(numbers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"paged": True}, "paged is for op='decode'"),
        ({"appended": True}, "appended is for op='decode'"),
        ({"cache": "int8"}, "cache is for op='decode'"),
        ({"descale": "token", "dtype": "fp8"}, "descale='token' is for op='decode'"),
        ({"op": "decode", "mask": True}, "op='decode' goes with softcap, alibi, window, sinks, varlen, but got mask"),
        ({"op": "decode", "dropout": True}, "but got dropout"),
        ({"op": "decode", "dtype": "fp8"}, "takes q in 16 or 32 bits"),
        ({"op": "decode", "causal": "top_left"}, "but got causal='top_left'"),
        ({"op": "decode", "cache": "fp8", "head_dim": 320}, "caches of 8 bits have heads of at most 256"),
        ({"op": "decode", "descale": "head"}, "descale must be tensor where op='decode' has cache='none'"),
        ({"op": "decode", "cache": "int8", "descale": "block"}, "descale must be tensor or head or token"),
        ({"op": "decode", "cache": "int4"}, "cache='int4' is not known"),
        ({"op": "decode", "paged": 1}, "paged must be true or false"),
    ],
    ids=str,
)
def test_specs_that_mean_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Spec(**fields)


def test_a_spec_says_what_it_has() -> None:
    spec = Spec("decode", causal="bottom_right", **SERVED)
    assert spec.slug == "d128_bf16_causal_softcap_alibi_window_sinks_varlen_paged_appended"
    assert spec.label == f"decode {spec.slug}"
    assert spec.plain == Spec("decode", causal="bottom_right")
    cached = Spec("decode", cache="fp8", descale="token", paged=True)
    assert cached.slug == "d128_bf16_descale_token_paged_cache_fp8"
    assert arguments_of(cached) == (
        "q", "k", "v", "o", "lse", "workspace", "counters", "cache_seqlens", "block_table", "descale_k", "descale_v",
        "scale",
    )  # fmt: skip
    assert laid_out(cached) == ("q", "k", "v", "o", "block_table", "descale_k", "descale_v")
    assert "paged" not in Spec().stated and "paged" in cached.stated


@pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=KNOWN_GPUS.keys())
def test_default_obeys_the_rules_or_the_gpu_cannot(gpu: Gpu) -> None:
    for head_dim, dtype, cache in itertools.product((1, 64, 128, 256, 576), ("fp16", "fp32"), ("none", "int8")):
        # 64 KiB hold no keys beside wide rows of fp32.
        if head_dim > 256 and (cache == "int8" or (dtype == "fp32" and gpu.backend == "hip")):
            continue
        spec = Spec("decode", head_dim, head_dim, dtype, cache=cache)  # type: ignore[arg-type]
        config = TRITON_DECODE.default(spec, gpu)
        rejection = TRITON_DECODE.refuses(spec, config, gpu)
        if rejection is None:
            assert TRITON_DECODE.shared_memory(spec, config, gpu)[1] <= gpu.shared_per_block, spec.slug
        else:
            assert rejection.kind == "capability" and gpu.sm < 80, (spec.slug, rejection)


def test_fp8_caches_need_a_gpu_that_knows_them() -> None:
    spec = Spec("decode", cache="fp8")
    rejection = TRITON_DECODE.refuses(spec, TRITON_DECODE.default(spec, GPUS[0]), GPUS[0])
    assert rejection is not None and rejection.kind == "cache" and "sm_89" in rejection.reason
    assert TRITON_DECODE.refuses(spec, TRITON_DECODE.default(spec, GPUS[1]), GPUS[1]) is None


def _views(problem: Problem, spec: Spec, page_size: int = 64) -> list[Tensor]:
    given = served_inputs(spec, replace(problem, page_size=page_size), "cpu")
    return [given[name] for name in laid_out(spec)]


@pytest.mark.parametrize(
    ("problem", "blocks_per_sm", "splits"),
    [
        # 132 multiprocessors with 8 heads of one sequence.
        (Problem(1, 32, 8, 1, 4096), 1, 16),
        (Problem(1, 32, 8, 1, 4096), 2, 32),
        # Never more splits than blocks of keys.
        (Problem(1, 32, 8, 1, 300), 4, 5),
        (Problem(1, 4, 1, 1, 100), 1, 2),
        # One round of programs needs no splits, a round and a bit does, up to four rounds of them.
        (Problem(32, 8, 8, 1, 512), 2, 1),
        (Problem(17, 16, 16, 1, 512), 2, 4),
    ],
)
def test_splits_fill_the_gpu(problem: Problem, blocks_per_sm: int, splits: int) -> None:
    spec = Spec("decode", 16, 16)
    views = _views(problem, spec)
    found = split_for(decode(spec, 64, 64, 4, 3, blocks_per_sm), *views, multiprocessors=132)
    assert found.splits == splits
    tiles = problem.batch * problem.kv_heads
    rows = max(16, problem.heads // problem.kv_heads)
    assert (found.workspace, found.counters) == ((0, 0) if splits == 1 else (tiles * splits * rows * 18, tiles))


def test_a_caller_may_say_how_many_splits() -> None:
    spec = Spec("decode", 16, 16, paged=True)
    views = _views(Problem(2, 4, 2, 1, 256), spec)
    for splits in (1, 5, MAX_SPLITS):
        assert split_for(decode(spec, 64, 64, 4, 3, 1), *views, num_splits=splits).splits == splits
    for splits in (0, MAX_SPLITS + 1, True, 2.0):
        with pytest.raises(InputError, match=f"num_splits must be from 1 to {MAX_SPLITS}"):
            split_for(decode(spec, 64, 64, 4, 3, 1), *views, num_splits=splits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seq_q", "heads", "block", "blocks"), [(1, 8, 16, 1), (5, 8, 32, 1), (40, 6, 64, 2)])
def test_blocks_have_no_more_rows_than_calls(seq_q: int, heads: int, block: int, blocks: int) -> None:
    spec = Spec("decode", 16, 16, paged=True)
    (planned,) = launches(
        decode(spec, 64, 64, 4, 3, 1), *_views(Problem(3, heads, 2, seq_q, 256), spec, 20), num_splits=2
    )
    assert planned.options["BLOCK_Q"] == block and planned.options["PAGE_SIZE"] == 20
    assert planned.grid == (3 * 2 * blocks * 2, 1, 1)


def test_searching_leaves_out_blocks_of_more_rows() -> None:
    problems = (Problem(1, 8, 2, 1, 1024),)
    usable = TRITON_DECODE.worth_trying(problems).space(Spec("decode"), GPUS[1]).usable
    assert {config["block_q"] for config in usable} == {64}
    many = (Problem(1, 8, 2, 100, 1024),)
    assert {config["block_q"] for config in TRITON_DECODE.worth_trying(many).space(Spec("decode"), GPUS[1]).usable} == {
        16, 32, 64, 128,
    }  # fmt: skip


def test_estimates_grow_with_the_cache(workers: Workers) -> None:
    variant, gpu = DECODE_GOLDEN[0], GPUS[1]
    outcome = workers.outcome(workers.submit(PATIENCE, kernel_resources, variant, gpu, "kernel"))
    problems = [Problem(batch, 32, 8, 1, keys) for batch, keys in ((1, 4096), (1, 65536), (16, 65536))]
    times = [predict_us(variant, (outcome,), problem, gpu) for problem in problems]  # type: ignore[arg-type]
    assert times == sorted(times) and times[0] < 40
    # K and V at the memory's bandwidth are a bound.
    assert times[2] >= 16 * 65536 * 8 * 256 * 2 / gpu.dram_gbs / 1e3
    assert as_split(variant, problems[0], gpu).seq_kv <= 4096 // 16


def test_an_exported_file_takes_no_cache(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedError, match="takes no cache yet"):
        write(DECODE_GOLDEN[0], tmp_path / "kernel.py")
