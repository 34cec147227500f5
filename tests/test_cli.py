"""The commands that need no search: what they print, and how they refuse wrong use."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import click
import pytest
import torch
from command_line import Ended, run
from entries import H200, entry

import flashgen
from flashgen import store
from flashgen.benchmark import Measurement
from flashgen.cli import bench, cli
from flashgen.compare import Row
from flashgen.families import FAMILIES
from flashgen.hardware import KNOWN_GPUS
from flashgen.mods import Mod
from flashgen.peers import OPTIONAL, PEERS
from flashgen.problem import Problem
from flashgen.spec import Spec

TUNE = ("tune", "--gpu", "a100", "--head-dim", "64")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    flashgen.forget()
    return tmp_path / "home"


def _refused(*arguments: str | Path) -> str:
    ended = run(*arguments)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert "Traceback" not in ended.err
    return ended.complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--gpu", "a101"), "no GPU is known as 'a101'. Did you mean 'a10'?"),
        (("--gpu", "x"), "no GPU is known as 'x'. Known: a10, a100, a100-40gb, a30, b200,"),
        (("--gpu", "auto"), "torch sees no GPU in this machine. Name a target to estimate for it, e.g. --gpu a100"),
        (("--head-dim", "0"), "'--head-dim': 0 is not in the range 1<=x<=576"),
        (("--head-dim", "577"), "'--head-dim': 577 is not in the range 1<=x<=576"),
        (("--head-dim-v", "577"), "'--head-dim-v': 577 is not in the range 1<=x<=576"),
        (("--heads", "32/5"), "heads must be a positive multiple of kv_heads, but got 32/5"),
        (("--heads", "0/0"), "heads must be a positive multiple of kv_heads, but got 0/0"),
        (("--with", "windo"), "'windo' is not known. Did you mean 'window'?"),
        (("--with", "varlen"), "'varlen' is not known."),
        (("--heads", "x"), "'x' is not a number of heads such as 32, or 32/8 for 8 key heads"),
        (("--heads", "99999999999"), "must hold, but got heads=99999999999"),
        (("--trials", "0"), "'--trials': 0 is not in the range x>=1"),
        (("--budget", "0"), "'--budget': 0.0 is not in the range x>=1"),
        (("--seed", "-1"), "'--seed': -1 is not in the range 0<=x<=4294967295"),
        (("--seq", "0"), "every number must be at least 1, but got '0'"),
        (("--seq", "a,b"), "'a,b' is not a list of integers such as 1024,4096"),
        (("--seq", ""), "'' is not a list of integers such as 1024,4096"),
        (("--seq", "99999999"), "--seq must be at most 16777216, but got 99999999"),
        (("--dtype", "int8"), "'int8' is not one of fp16, bf16, fp32, fp8"),
        (("--dtype", "fp16,"), "'' is not one of fp16, bf16, fp32"),
        (("--causal", "maybe"), "'maybe' is not one of 'true', 'false', 'both'"),
        (("--family", "triton_fw"), "no kernel family is called 'triton_fw'. Did you mean 'triton_fwd'?"),
    ],
)
def test_tune_refuses(arguments: tuple[str, ...], complaint: str, tmp_path: Path, home: Path) -> None:
    """One sentence that names the way out, before anything is searched or written."""
    assert complaint in _refused(*TUNE, "--output", tmp_path / "a100.yaml", *arguments)
    assert not (tmp_path / "a100.yaml").exists() and not home.exists()


def test_tune_refuses_a_family_of_another_op(tmp_path: Path) -> None:
    refused = _refused(*TUNE, "--op", "backward", "--family", "triton_fwd", "--output", tmp_path / "tuned.yaml")
    assert "family 'triton_fwd' computes the forward: pass --op forward, or leave --family out" in refused


def test_tune_refuses_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, complaint in (
        (tmp_path / "missing" / "a100.yaml", "is not a folder. Create it, or write elsewhere."),
        (tmp_path / "file" / "a100.yaml", "is not a folder. Create it, or write elsewhere."),
        (tmp_path, "is a directory"),
        # Not even root makes a file here.
        (Path("/sys/a100.yaml"), "Permission denied: '/sys/a100.yaml.lock'. Write elsewhere."),
    ):
        said = _refused(*TUNE, "--output", place)
        assert complaint in said and str(place) in said


def test_tune_refuses_a_home_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "file"))
    assert _refused(*TUNE).endswith("Name a file with --output.")


@pytest.mark.parametrize("text", ["", "entries: [", "schema: 2\n", "schema: 1\ngpu: {}\nentries: []\n", "\x00\x01"])
def test_tune_leaves_a_corrupt_file_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a100.yaml"
    path.write_text(text)
    said = _refused(*TUNE, "--output", path)
    assert str(path) in said and "Correct it, or move it away." in said
    assert path.read_text() == text


def test_tune_leaves_the_file_of_another_gpu_alone(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    store.merge(path, H200, [entry()])
    before = path.read_bytes()
    assert "it is for h200, not for a100" in _refused(*TUNE, "--output", path)
    other = replace(H200, name="a100")
    store.merge(tmp_path / "other.yaml", other, [])
    assert "Write to another file" in _refused(*TUNE, "--output", tmp_path / "other.yaml")
    assert path.read_bytes() == before


def test_commands_without_what_they_need(tmp_path: Path) -> None:
    for command in (("bench",), ("show", "--gpu", "auto", "--head-dim", "64"), ("list", "--gpu", "auto")):
        assert "torch sees no GPU in this machine" in _refused(*command)
    assert "picture" not in _refused("bench", "--plot", tmp_path / "plot.png")
    assert "must end in .png, .svg or .pdf, but got 'plot.txt'" in _refused("bench", "--plot", tmp_path / "plot.txt")
    assert "is not a folder" in _refused("bench", "--plot", tmp_path / "missing" / "plot.png")
    assert "Missing option '--head-dim'" in _refused("tune", "--gpu", "a100")
    assert "Missing option '-o' / '--output'" in _refused("export", "--gpu", "a100", "--head-dim", "64")
    assert "No such command 'tuna'" in _refused("tuna")


def test_without_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wanted = ("--gpu", "a100", "--head-dim", "64")
    for command in (("tune", *wanted), ("show", *wanted), ("export", *wanted, "-o", tmp_path / "kernel.py")):
        assert "needs the package triton" in _refused(*command)


def test_help_of_every_command() -> None:
    names = set(cli.commands)
    assert names == {"tune", "list", "show", "export", "bench", "analyze", "doctor"}
    overview = run("--help").out
    for name in names:
        ended = run(name, "--help")
        assert ended.code == 0 and f"flashgen {name} [OPTIONS]" in ended.out.splitlines()[0]
        options = [each for each in cli.commands[name].params if isinstance(each, click.Option)]
        assert all(opt in ended.out for each in options for opt in each.opts)
        assert f"\n  {name}" in overview
    assert run("--version").out == f"flashgen, version {flashgen.__version__}\n"


def _json(ended: Ended) -> object:
    assert ended.code == 0 and ended.err == "", ended
    return json.loads(ended.out)


def test_list(home: Path) -> None:
    folder = home / "tuned"
    folder.mkdir(parents=True)
    store.merge(folder / "h200.yaml", H200, [entry(median_us=4321.0), entry(8192, measured=False)])
    listed = _json(run("list", "--gpu", "h200", "--json"))
    assert isinstance(listed, list)
    own = [each for each in listed if each["file"] == str(folder / "h200.yaml")]
    assert [(each["gpu"], each["bucket"]["seq_q"], each["method"]) for each in own] == [
        ("h200", 4096, "measured"),
        ("h200", 8192, "estimated"),
    ]
    assert own[0]["config"] == dict(entry().config) and own[0]["time"]["median_us"] == 4321.0
    everything = _json(run("list", "--json"))
    assert isinstance(everything, list) and all(each in everything for each in listed)
    assert {each["gpu"] for each in everything} <= set(KNOWN_GPUS)
    plain = run("list", "--gpu", "h200")
    assert plain.code == 0 and "4321.0" in plain.out and "estimated" in plain.out
    # In one line each, so that grep finds them.
    assert any(
        "d128_bf16_causal" in line and "block_q=" in line and "4321.0" in line for line in plain.out.splitlines()
    )


def test_list_of_a_gpu_that_nobody_tuned() -> None:
    assert _json(run("list", "--gpu", "t4", "--json")) == []
    assert run("list", "--gpu", "t4").code == 0


def test_show_says_which_kernel_and_why(home: Path) -> None:
    (home / "tuned").mkdir(parents=True)
    path = home / "tuned" / "h200.yaml"
    store.merge(path, H200, [entry()])
    command = ("show", "--gpu", "h200", "--head-dim", "128", "--causal")
    plain = run(*command, "--seq", "4096")
    assert plain.code == 0 and plain.err == ""
    assert str(path) in plain.out and "exactly this bucket" in plain.out and "123.4 us measured" in plain.out
    assert "CONFIG" not in plain.out
    (shown,) = _json(run(*command, "--seq", "4096", "--json"))  # type: ignore[misc]
    assert shown["config"] == dict(entry().config) and shown["method"] == "measured" and shown["file"] == str(path)
    assert shown["source"] is None
    (narrow,) = _json(run("show", "--gpu", "t4", "--head-dim", "40", "--json"))  # type: ignore[misc]
    assert narrow["method"] == "default" and narrow["file"] is None and "flashgen tune" in narrow["why"]


def test_show_the_kernel_of_gradients(home: Path) -> None:
    shown = run("show", "--gpu", "h200", "--head-dim", "128", "--op", "backward", "--seq", "2048")
    assert shown.code == 0 and shown.out.startswith("hopper_bwd_fused_d128_bf16_"), shown
    assert "measured: exactly this bucket (seq_q 2048, seq_kv 2048)" in shown.out
    untuned = run("show", "--gpu", "a10", "--head-dim", "128", "--op", "backward")
    assert "nobody tuned backward d128_bf16" in untuned.out
    assert "flashgen tune --gpu auto --head-dim 128 --op backward" in untuned.out


def test_show_source(home: Path) -> None:
    command = ("show", "--gpu", "a100", "--head-dim", "64", "--source")
    shown = run(*command)
    assert shown.code == 0 and "\nCONFIG = {" in shown.out and "def launch(" in shown.out
    two = _json(run(*command, "--dtype", "fp16,fp32", "--json"))
    assert isinstance(two, list)
    assert ["d64_fp16" in each["variant"] for each in two] == [True, False]
    for each in two:
        assert "\nCONFIG = {" in each["source"]
        compile(each["source"], "shown", "exec")


def test_show_with_features() -> None:
    ended = run("show", "--gpu", "h200", "--head-dim", "128", "--causal", "--with", "window,sinks")
    assert ended.code == 0, ended
    assert ended.out.startswith("triton_fwd_d128_bf16_causal_window_sinks_"), ended.out
    assert "tuned for d128_bf16_causal, without its window and sinks" in ended.out
    assert "computes no window, sinks: triton_fwd does" in ended.out
    backward = run("show", "--gpu", "h200", "--head-dim", "128", "--op", "backward", "--with", "sinks")
    assert "without its" not in backward.out, "a backward finds sinks in the log-sum-exp"


def test_show_refuses() -> None:
    wanted = ("--gpu", "a100", "--head-dim", "64")
    assert "Did you mean 'triton_fwd'?" in _refused("show", *wanted, "--family", "triton")
    assert "'--seq': 0 is not in the range" in _refused("show", *wanted, "--seq", "0")
    assert "v100 has capability sm_70" in _refused("show", "--gpu", "v100", "--head-dim", "64")


def test_analyze() -> None:
    command = ("analyze", "--gpu", "a100", "--head-dim", "64", "--causal", "--batch", "2", "--heads", "8/2")
    told = _json(run(*command, "--seq", "512", "--json"))
    assert isinstance(told, dict)
    # 2 batches of 8 heads, 512 * 513 / 2 pairs, 2 * 64 FLOPs for either product.
    assert told["visible_pairs"] == 16 * 512 * 513 // 2
    assert told["flash"]["flops"] == told["visible_pairs"] * 256
    assert told["problem"] == {"batch": 2, "heads": 8, "kv_heads": 2, "seq_q": 512, "seq_kv": 512}
    tiles = {(row["block_q"], row["block_kv"]) for row in told["budget"]}
    choices = FAMILIES["triton_fwd"].choices
    assert tiles == {(q, kv) for q in choices["block_q"] for kv in choices["block_kv"]}
    plain = run(*command, "--seq", "512")
    assert plain.code == 0 and "tensor cores" in plain.out and "166912 bytes" in plain.out
    decoding = _json(run(*command, "--seq", "512", "--seq-q", "1", "--json"))
    assert isinstance(decoding, dict) and decoding["visible_pairs"] == 16 * 512


@pytest.mark.parametrize("gpu", KNOWN_GPUS)
def test_analyze_on_every_gpu(gpu: str) -> None:
    told = _json(run("analyze", "--gpu", gpu, "--head-dim", "128", "--json"))
    assert isinstance(told, dict) and told["gpu"] == gpu
    assert min(limit["us"] for limit in told["flash"]["limits"]) > 0
    assert (gpu == "v100") == all(row["refused"] for row in told["budget"])


def test_analyze_refuses() -> None:
    wanted = ("analyze", "--gpu", "a100", "--head-dim", "64")
    assert "pass a single --dtype" in _refused(*wanted, "--dtype", "fp16,fp32")
    assert "must hold, but got batch=99999999999" in _refused(*wanted, "--batch", "99999999999")
    assert "'--batch': 0" in _refused(*wanted, "--batch", "0")
    assert "Did you mean 'a100'?" in _refused("analyze", "--gpu", "a1000", "--head-dim", "64")


def test_doctor(home: Path) -> None:
    facts = _json(run("doctor", "--json"))
    assert isinstance(facts, dict)
    assert facts["flashgen"] == flashgen.__version__ and facts["user folder"] == str(home)
    assert facts["gpu"] == "none that torch sees"
    plain = run("doctor")
    assert plain.code == 0 and plain.err == ""
    for name, value in facts.items():
        assert f"{name:16} {value}" in plain.out


def test_export(tmp_path: Path) -> None:
    path = tmp_path / "my_attention.py"
    ended = run("export", "--gpu", "h200", "--head-dim", "128", "--causal", "-o", path)
    assert ended.code == 0 and ended.err == ""
    assert "hopper_fwd_d128_bf16_causal" in ended.out and f"Written to {path}" in ended.out
    text = path.read_text()
    assert "causal=bottom_right" in text and "\nCONFIG = {" in text and "def self_check():" in text
    assert [each.name for each in tmp_path.iterdir()] == ["my_attention.py"]


def test_export_refuses(tmp_path: Path) -> None:
    wanted = ("export", "--gpu", "a100", "--head-dim", "64", "-o")
    for place, complaint in (
        (tmp_path / "missing" / "kernel.py", "Name a file in a folder that exists."),
        (tmp_path, "is a directory"),
        (Path("/sys/kernel.py"), "Permission denied. Name a file in a folder that exists."),
    ):
        assert complaint in _refused(*wanted, place)
    path = tmp_path / "kernel.py"
    assert "pass a single --dtype" in _refused(*wanted, path, "--dtype", "fp16,bf16")
    assert "no kernel family is called 'x'" in _refused(*wanted, path, "--family", "x")
    assert "v100 has capability sm_70" in _refused("export", "--gpu", "v100", "--head-dim", "64", "-o", path)
    assert list(tmp_path.iterdir()) == []


def _rows(names: tuple[str, ...], failing: str) -> list[Row]:
    spec, problem = Spec(), Problem(1, 1, 1, 64, 64)
    good = (Measurement(10.0, 0.1, 9), 2.5, 100, None, 2.5e7)
    bad = (None, None, None, "[/x] no", 2.5e7)
    return [Row(spec, problem, "forward", name, *(bad if name == failing else good)) for name in names]


def _bench(monkeypatch: pytest.MonkeyPatch, failing: str, *arguments: str) -> Ended:
    """`bench` on a GPU that is not here: rows are given, what is made of them is real."""
    monkeypatch.setattr(bench, "current_gpu", lambda: H200)
    monkeypatch.setattr(bench, "compare", lambda spec, problem, names, *_: _rows(names, failing))
    return run("bench", "--head-dim", "128", "--causal", "false", "--seq", "64", *arguments)


def test_bench_prints_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = _bench(monkeypatch, "cudnn", "--peers", "flashgen,cudnn")
    # What a peer says is printed as it is, whatever brackets it has.
    assert ended.code == 0 and "[/x] no" in ended.out and "2 (10)" in ended.out
    told = json.loads(_bench(monkeypatch, "", "--peers", "fa2", "--json").out)
    assert [row["name"] for row in told["rows"]] == ["fa2"] and told["rows"][0]["measurement"]["median_us"] == 10.0


def test_bench_fails_only_when_flashgen_was_asked_for_and_ran_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = _bench(monkeypatch, "flashgen")
    assert failed.code == 2 and "flashgen ran none of these problems" in failed.err
    assert _bench(monkeypatch, "", "--peers", "fa2").code == 0


def test_bench_keeps_what_is_measured_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def measure(spec: Spec, problem: Problem, names: tuple[str, ...], *_: object) -> list[Row]:
        lengths.append(problem.seq_q)
        if len(lengths) == 2:
            raise KeyboardInterrupt
        return _rows(names, "")

    monkeypatch.setattr(bench, "current_gpu", lambda: H200)
    monkeypatch.setattr(bench, "compare", measure)
    command = ("bench", "--head-dim", "128", "--causal", "false", "--seq", "64,128,256", "--peers", "fa2", "--json")
    ended = run(*command)
    assert ended.code == 0 and "Interrupted" in ended.err and lengths == [64, 128]
    assert len(json.loads(ended.out)["rows"]) == 1


def test_bench_judges_everything_before_the_first_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    monkeypatch.setattr(bench, "current_gpu", lambda: H200)
    monkeypatch.setattr(bench, "compare", lambda spec, *_: measured.append(spec.slug))
    assert "1 <= head_dim <= 576 must hold" in _refused("bench", "--head-dim", "64,600")
    assert "--seq must be at most" in _refused("bench", "--head-dim", "64", "--seq", "64,99999999")
    assert measured == []


def _work(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[tuple[str, str | None]]:
    """What `bench` would measure: specs, and the names of modifications."""
    work: list[tuple[str, str | None]] = []

    def measure(
        spec: Spec, problem: Problem, names: tuple[str, ...], rounds: object, op: str, mod: Mod | None
    ) -> list[Row]:
        work.append((spec.slug, None if mod is None else mod.name))
        return [replace(row, mod=None if mod is None else mod.name) for row in _rows(names, "")]

    monkeypatch.setattr(bench, "current_gpu", lambda: H200)
    monkeypatch.setattr(bench, "compare", measure)
    ended = run("bench", "--head-dim", "64", "--seq", "64", *arguments)
    assert ended.code == 0, ended
    assert all(name is None or name in ended.out for _, name in work)
    return work


def test_bench_with_features_and_with_modifications(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _work(monkeypatch, "--with", "window,softcap") == [
        ("d64_bf16_softcap_window", None),
        ("d64_bf16_causal_softcap_window", None),
    ]
    assert _work(monkeypatch, "--mods", "--dtype", "fp16") == [
        ("d64_fp16", "noop"),
        ("d64_fp16_causal", "causal"),
        ("d64_fp16_causal_alibi", "ALiBi"),
        ("d64_fp16_causal_window", "sliding window"),
        ("d64_fp16", "prefix-LM"),
        ("d64_fp16_causal_softcap", "softcap"),
        ("d64_fp16_causal_segments", "documents"),
        ("d64_fp16", "relative bias"),
    ]
    told = json.loads(_bench(monkeypatch, "", "--with", "bias", "--peers", "fa2", "--json").out)
    assert told["rows"][0]["flops"] == 2.5e7 and told["rows"][0]["mod"] is None


@pytest.mark.parametrize("option", [("--causal", "both"), ("--with", "window")])
def test_modifications_say_themselves_what_scores_go_through(
    monkeypatch: pytest.MonkeyPatch, option: tuple[str, str]
) -> None:
    monkeypatch.setattr(bench, "current_gpu", lambda: H200)
    assert f"leave out {option[0]}, or --mods" in _refused("bench", "--mods", *option)
    assert "'windo' is not known. Did you mean 'window'?" in _refused("bench", "--with", "windo")


@pytest.mark.parametrize(
    ("name", "modules"), [("fa3", ("fa3_fwd_interface", "flash_attn_interface")), ("fa4", ("flash_attn.cute",))]
)
def test_a_peer_that_is_not_installed_says_so(name: str, modules: tuple[str, ...]) -> None:
    assert name in OPTIONAL
    q = torch.zeros(1, 1, 1, 8)
    with (
        patch.dict(sys.modules, dict.fromkeys(modules)),
        pytest.raises(RuntimeError, match=f"not installed: {' or '.join(modules)}"),
    ):
        PEERS[name](q, q, q, False, {})


def test_a_peer_gets_the_layout_that_it_wants_and_may_return_more_than_the_output() -> None:
    q = torch.rand(2, 3, 5, 8)
    seen: dict[str, object] = {}

    def flash_attn_func(*tensors: torch.Tensor, causal: bool) -> tuple[torch.Tensor, None]:
        seen.update(shape=tuple(tensors[0].shape), causal=causal)
        return tensors[0], None

    with patch.dict(sys.modules, {"fa3_fwd_interface": SimpleNamespace(flash_attn_func=flash_attn_func)}):
        o = PEERS["fa3"](q, q, q, True, {})()
    assert seen == {"shape": (2, 5, 3, 8), "causal": True}
    assert torch.equal(o, q)


def test_expressions_of_scores_are_options_of_show() -> None:
    ended = run(
        "show", "--gpu", "a100", "--head-dim", "64", "--source", "--score-mod", "score + (q_idx - kv_idx)",
        "--mask-mod", "(kv_idx <= q_idx) | (kv_idx < 256)",
    )  # fmt: skip
    assert ended.code == 0 and "def score_mod(" in ended.out and "(kv_first <= q_last) | (kv_first < 256)" in ended.out
    for option, text, words in (
        ("--score-mod", "score + slopes[head]", "`slopes` is no tensor"),
        ("--mask-mod", "kv_idx - q_idx", "must be a condition"),
    ):
        ended = run("show", "--gpu", "a100", "--head-dim", "64", option, text)
        assert ended.code == 2 and words in ended.err
