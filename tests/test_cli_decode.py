"""`--op decode` on the command line: what is compared and tuned, printed and stored, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Ended, run
from entries import H200

import flashgen
from flashgen import bandwidth, store
from flashgen.benchmark import Measurement, kv_bytes
from flashgen.cli import bench_decode, tune
from flashgen.compare_decode import TABLE, DecodeRow
from flashgen.decode_peers import DECODE_PEERS
from flashgen.errors import InputError
from flashgen.hardware import Gpu
from flashgen.problem import Bucket, Problem
from flashgen.select import select
from flashgen.spec import Spec
from flashgen.tune import Outcome, Request

NARROW = ("tune", "--gpu", "a100", "--op", "decode", "--head-dim", "16", "--dtype", "fp16")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    flashgen.forget()
    return tmp_path / "home"


Work = list[tuple[Spec, Problem, tuple[str, ...]]]


def _bench(monkeypatch: pytest.MonkeyPatch, *arguments: str, failing: str = "", most: int = 99) -> tuple[Work, Ended]:
    """`bench` on a GPU that is not here: rows are given, what is made of them is real."""
    work: Work = []

    def measure(
        spec: Spec, problem: Problem, names: tuple[str, ...], read: float, rounds: int | None
    ) -> list[DecodeRow]:
        if len(work) == most:
            raise KeyboardInterrupt
        work.append((spec, problem, names))
        gbs = kv_bytes(spec, problem) / 1e4
        good = (Measurement(10.0, 0.1, 9, 15.0), gbs, gbs / read, 1000, None, 2)
        bad = (None, None, None, None, "[/x] no", 2)
        return [DecodeRow(spec, problem, name, *(bad if name in failing else good)) for name in names]

    monkeypatch.setattr(bench_decode, "current_gpu", lambda: H200)
    monkeypatch.setattr(bench_decode, "compare_decode", measure)
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda: 4500.0)
    return work, run("bench", "--op", "decode", *arguments)


def test_the_table_is_what_is_compared_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    work, ended = _bench(monkeypatch)
    assert ended.code == 0, ended
    sizes = [(p.heads, p.kv_heads, spec.head_dim, p.batch, p.seq_kv) for spec, p, _ in work]
    assert sizes == list(TABLE)
    for spec, problem, names in work:
        assert spec == Spec("decode", spec.head_dim, spec.head_dim, "bf16", "bottom_right")
        assert (problem.seq_q, problem.page_size) == (1, 64) and names == tuple(DECODE_PEERS)
    assert "read bandwidth 4500 GB/s" in ended.out and "16 x 32768" in ended.out and "32/32" in ended.out


def test_sizes_and_peers_that_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ("--batch", "2,3", "--seq-kv", "100,200", "--seq-q", "4", "--page-size", "48", "--peers", "flashgen,paged")
    work, _ = _bench(
        monkeypatch, *said, "--heads", "12/3", "--head-dim", "64,96", "--dtype", "fp16", "--causal", "false"
    )
    problems = [Problem(batch, 12, 3, 4, seq_kv, 48) for seq_kv in (100, 200) for batch in (2, 3)]
    assert [problem for _, problem, _ in work] == problems * 2
    assert [spec.slug for spec, *_ in work] == ["d64_fp16"] * 4 + ["d96_fp16"] * 4
    assert {names for *_, names in work} == {("flashgen", "paged")}
    work, _ = _bench(monkeypatch, "--seq-kv", "512")
    assert [(spec.head_dim, p.batch, p.seq_kv) for spec, p, _ in work] == [(128, batch, 512) for batch in (1, 16, 64)]


def test_what_is_printed_is_also_there_for_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ended = _bench(monkeypatch, "--batch", "1", "--seq-kv", "4096", "--memory", failing="cudnn")
    assert ended.code == 0 and "[/x] no" in ended.out and "Peak memory" in ended.out
    assert "best other / flashgen: 1.000" in ended.out and "(10.0)" in ended.out and "15.0" in ended.out
    told = json.loads(_bench(monkeypatch, "--batch", "1", "--seq-kv", "4096", "--json", failing="cudnn")[1].out)
    assert told["machine"]["read_gbs"] == 4500.0
    first = told["rows"][0]
    assert (first["name"], first["measurement"]["eager_us"], first["problem"]["page_size"]) == ("flashgen", 15.0, 64)


def test_an_interrupted_comparison_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ended = _bench(monkeypatch, "--json", most=2)
    assert ended.code == 0 and "Interrupted" in ended.err
    assert len(json.loads(ended.out)["rows"]) == 2 * len(DECODE_PEERS)


def test_it_fails_only_when_flashgen_ran_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = _bench(monkeypatch, failing="flashgen paged")[1]
    assert failed.code == 2 and "flashgen ran none of these problems" in failed.err
    assert _bench(monkeypatch, "--peers", "fa2")[1].code == 0


@pytest.mark.parametrize(
    "arguments", [("--seq", "64"), ("--tokens", "9"), ("--mods",), ("--with", "window"), ("--host",)]
)
def test_what_says_nothing_about_a_decode(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    work, ended = _bench(monkeypatch, *arguments)
    assert ended.complaint == f"{arguments[0]} says nothing about --op decode: leave it out." and work == []


@pytest.mark.parametrize("option", ["--batch", "--seq-kv", "--seq-q", "--page-size", "--cache"])
def test_what_says_nothing_about_anything_else(option: str) -> None:
    value = "int8" if option == "--cache" else "16"
    said = run("tune", "--gpu", "a100", "--head-dim", "64", option, value)
    assert said.complaint == f"{option} says nothing about --op forward: leave it out."
    if option != "--cache":
        said = run("bench", "--op", "backward", option, value)
        assert said.complaint == f"{option} says nothing about --op backward: leave it out."


def test_tune_refuses() -> None:
    assert "--seq says nothing about --op decode" in run(*NARROW, "--seq", "1024").complaint
    assert "'--page-size': 15 is not in the range" in run(*NARROW, "--page-size", "15").complaint
    assert "triton_fwd' computes the forward" in run(*NARROW, "--family", "triton_fwd").complaint


def _requests(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Request]:
    """What `tune` would search."""
    found: list[Request] = []

    def search(requests: list[Request], *_: object) -> list[Outcome]:
        found.extend(requests)
        return [Outcome(request, (), (), (), False) for request in requests]

    monkeypatch.setattr(tune, "_run", search)
    run(*NARROW, *arguments)
    return found


def test_what_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = _requests(monkeypatch)
    assert request.spec == Spec("decode", 16, 16, "fp16", "bottom_right")
    sizes = [(each.batch, each.seq_kv) for each in request.problems]
    assert sizes == [(batch, keys) for keys in (4096, 32768, 131072) for batch in (1, 16, 64)]
    assert {(each.heads, each.kv_heads, each.seq_q, each.page_size) for each in request.problems} == {(32, 8, 1, 0)}
    said = ("--batch", "5", "--seq-kv", "700", "--seq-q", "3,4", "--heads", "6/2", "--page-size", "100")
    more = ("--cache", "int8", "--with", "window,sinks", "--causal", "false")
    (request,) = _requests(monkeypatch, *said, *more)
    shaping = {"window": True, "sinks": True}
    assert request.spec == Spec("decode", 16, 16, "fp16", "none", paged=True, cache="int8", **shaping)  # type: ignore[arg-type]
    assert request.problems == (Problem(5, 6, 2, 3, 700, 100), Problem(5, 6, 2, 4, 700, 100))


def test_caches_that_no_memory_holds_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    spec = Spec("decode", 128, 128, "bf16", "bottom_right")
    # 0.5, 4, 16 and 64 GiB; what is smaller than a GiB takes one, for the copies that are read in turns.
    problems = [Problem(batch, 8, 8, 1, 32768) for batch in (4, 32, 128, 512)]
    gpu = replace(H200, memory_bytes=40 * 2**30)
    assert tune._that_fit(spec, problems, gpu) == tuple(problems[:3])
    assert "Left out, for the GPU's memory: batch 512 with 32768 keys." in capsys.readouterr().err
    assert tune._that_fit(spec, problems, H200) == tuple(problems)
    with pytest.raises(InputError, match="smaller --batch or --seq-kv"):
        tune._that_fit(spec, problems[3:], gpu)


def test_caches_of_the_widest_dtype_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 and 30 GiB in fp16, twice as much in fp32."""
    sizes = ("--batch", "160,480", "--seq-kv", "131072")
    assert [len(each.problems) for each in _requests(monkeypatch, *sizes)] == [2]
    assert [len(each.problems) for each in _requests(monkeypatch, *sizes, "--dtype", "fp16,fp32")] == [1, 1]


def test_tune_for_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real kernels; one winner for both batches of a length, which calls with other batches and in pages get, too."""
    path = tmp_path / "a100.yaml"
    sizes = ("--batch", "1,4", "--seq-kv", "1024,4096", "--trials", "2", "--budget", "60", "--output", str(path))
    ended = run(*NARROW, *sizes)
    assert ended.code == 0, ended
    assert all(text in ended.err for text in ("decode d16_fp16_causal: winners (estimated)", "4 x 1024", "GB/s"))
    entries = store.read(path, "a100").entries
    assert [(entry.bucket, entry.problem.batch) for entry in entries] == [(Bucket(1, 1024), 4), (Bucket(1, 4096), 4)]
    monkeypatch.setenv("FLASHGEN_TUNED", str(path))
    flashgen.forget()
    a100, spec = Gpu.named("a100"), entries[0].spec
    for asked in (spec, replace(spec, paged=True), replace(spec, cache="int8", appended=True)):
        selection = select(asked, Problem(9, 8, 8, 1, 3000), a100)
        assert selection.method == "estimated" and selection.variant.config == entries[1].config
    assert select(spec, Problem(9, 8, 8, 1, 9000), a100).method == "default"


def test_who_is_not_tuned_is_told_how() -> None:
    a100, problem = Gpu.named("a100"), Problem(1, 8, 8, 1, 4096)
    spec = Spec("decode", 64, 64, "bf16", "bottom_right")
    assert "`flashgen tune --gpu auto --head-dim 64 --op decode`" in select(spec, problem, a100).why
    served = replace(spec, causal="none", paged=True, cache="fp8")
    assert "--op decode --causal false --page-size 64 --cache fp8`" in select(served, problem, Gpu.named("h200")).why


def test_show_a_decode() -> None:
    ended = run("show", "--gpu", "h200", "--op", "decode", "--head-dim", "64", "--causal", "--seq", "70000")
    assert ended.code == 0 and ended.out.startswith("triton_decode_d64_bf16_causal_")
