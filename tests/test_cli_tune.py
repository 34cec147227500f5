"""`flashgen tune` in real processes: what it stores and prints, and what Ctrl-C and kill -9 leave behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
from command_line import Ended, end, processes_of, run, start, wait_until
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from flashgen import store
from flashgen.hardware import Gpu

A100 = Gpu.named("a100")
# Kernels of this width compile in about a second.
NARROW = ("tune", "--gpu", "a100", "--head-dim", "16", "--dtype", "fp16", "--seq", "1024")
# Kernels of this one take ten times as long.
SLOW = ("tune", "--gpu", "t4", "--head-dim", "128", "--seq", "1024", "--causal", "true")
LONG = ("--budget", "600")


def _journal(home: Path) -> Path:
    return home / "studies" / "a100.journal"


def _told(home: Path) -> int:
    """How many candidates' outcomes the journal holds; cheap enough to look while the search runs."""
    path = _journal(home)
    return path.read_text().count('"outcome"') if path.exists() else 0


def _trials(home: Path) -> list[optuna.trial.FrozenTrial]:
    """The trials of all studies in the journal."""
    storage = JournalStorage(JournalFileBackend(str(_journal(home))))
    names = optuna.get_all_study_names(storage)
    return [trial for name in names for trial in optuna.load_study(study_name=name, storage=storage).trials]


def _tried(home: Path) -> list[str]:
    return [json.dumps(trial.params) for trial in _trials(home) if "outcome" in trial.user_attrs]


def _stored(path: Path) -> list[tuple[str, int]]:
    file = store.read(path, "a100")
    assert file.complaints == []
    return [(entry.spec.slug, entry.bucket.seq_q) for entry in file.entries if entry.method == "estimated"]


def _nothing_runs(home: Path) -> None:
    wait_until(lambda: not processes_of(home), f"the end of {processes_of(home)}")


def test_tune_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    path, home = tmp_path / "a100.yaml", tmp_path / "home"
    arguments = ("--causal", "false", "--seq", "1024", "--trials", "3", "--budget", "30", "--output", path)
    ended = end(start(home, "tune", "--gpu", "a100", "--head-dim", "64", *arguments))
    assert ended.code == 0, ended.err
    assert ended.out == ""
    assert "estimated" in ended.err and "Nothing ran: a100 is not in this machine." in ended.err
    assert f"Stored in {path}\n" in ended.err and "Traceback" not in ended.err
    (entry,) = store.read(path, "a100").entries
    assert entry.method == "estimated" and entry.accuracy is None and entry.versions.driver is None
    assert entry.spec.slug == "d64_bf16" and (entry.bucket.seq_q, entry.bucket.seq_kv) == (1024, 1024)
    assert len(_tried(home)) <= 3
    _nothing_runs(home)


def test_tune_with_features(tmp_path: Path) -> None:
    """Forward and backward, which knows no sinks; what is stored is found by calls with these features, and shown."""
    path, home = tmp_path / "a100.yaml", tmp_path / "home"
    features = ("--with", "window,softcap,sinks")
    arguments = ("--op", "training", "--causal", "true", "--trials", "2", "--budget", "60", "--output", path)
    ended = end(start(home, *NARROW, *features, *arguments))
    assert ended.code == 0, ended.err
    assert _stored(path) == [
        ("d16_fp16_causal_softcap_window", 1024),
        ("d16_fp16_causal_softcap_window_sinks", 1024),
    ]


def test_training_tunes_both_ways(tmp_path: Path) -> None:
    path, home = tmp_path / "a100.yaml", tmp_path / "home"
    arguments = ("--op", "training", "--causal", "false", "--trials", "2", "--budget", "60", "--output", path)
    ended = end(start(home, *NARROW, *arguments))
    assert ended.code == 0, ended.err
    assert "d16_fp16: winners (estimated)" in ended.err and "backward d16_fp16: winners (estimated)" in ended.err
    entries = store.read(path, "a100").entries
    assert [(entry.spec.op, entry.family) for entry in entries] == [
        ("backward", "triton_bwd"), ("forward", "triton_fwd")
    ]  # fmt: skip
    backward, forward = (entry.time.median_us for entry in entries)
    assert "Training: forward + backward" in ended.err and f"{forward + backward:.1f}" in ended.err
    # 2 * 16 wide products of 1024 x 1024 pairs cost two forwards and a half, and more products are recomputed.
    assert 1.5 * forward < backward < 6 * forward


def _winners(ended: Ended) -> list[Any]:
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert isinstance(told, list) and told
    return told


def test_json_and_nothing_else_on_stdout_and_a_second_run_that_compiles_nothing(tmp_path: Path) -> None:
    path, home = tmp_path / "a100.yaml", tmp_path / "home"
    command = (*NARROW, "--seq", "512,4096", "--trials", "2", *LONG, "--json", "--output", path)
    told = _winners(end(start(home, *command)))
    assert [each["spec"]["causal"] for each in told] == ["none", "bottom_right"]
    for each in told:
        assert (each["gpu"], each["method"], each["interrupted"]) == ("a100", "estimated", False)
        assert [winner["problem"]["seq_q"] for winner in each["winners"]] == [512, 4096]
        assert all(winner["us"] == winner["predicted_us"] > 0 and winner["tflops"] > 0 for winner in each["winners"])
        assert each["refused"]["rule: small tile"] > 0
    assert _stored(path) == [("d16_fp16_causal", 512), ("d16_fp16_causal", 4096), ("d16_fp16", 512), ("d16_fp16", 4096)]
    first, before = _tried(home), path.read_bytes()
    assert len(first) == 4
    assert _winners(end(start(home, *command))) == told
    assert _tried(home) == first and path.read_bytes() == before


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    path, home = tmp_path / "a100.yaml", tmp_path / "home"
    process = start(home, *NARROW, "--trials", "500", *LONG, "--output", path)
    wait_until(lambda: _told(home) >= 3, "three candidates")
    # As a terminal does: to every process of the command.
    os.killpg(process.pid, signal.SIGINT)
    ended = end(process)
    assert ended.code == 0, ended.err
    assert "Interrupted: what was found until now is stored." in ended.err
    assert "Traceback" not in ended.err and "KeyboardInterrupt" not in ended.err
    assert _stored(path) == [("d16_fp16", 1024)]
    _nothing_runs(home)
    _continue(home, path)


def test_kill_9_loses_nothing(tmp_path: Path) -> None:
    path, home = tmp_path / "a100.yaml", tmp_path / "home"
    process = start(home, *NARROW, "--trials", "500", *LONG, "--output", path)
    wait_until(lambda: _told(home) >= 3, "three candidates")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    _nothing_runs(home)
    assert _stored(path) == []
    _continue(home, path)


def _continue(home: Path, path: Path) -> None:
    """A later run with one trial more than were done tries one more, and ranks them all."""
    before = _tried(home)
    trials = ("--causal", "false", "--trials", str(len(before) + 1))
    told = _winners(end(start(home, *NARROW, *trials, *LONG, "--json", "--output", path)))
    after = _tried(home)
    assert after[: len(before)] == before and len(after) == len(before) + 1
    assert len(set(after)) == len(after)
    assert [each["spec"]["causal"] for each in told] == ["none"]
    (entry,) = store.read(path, "a100").entries
    assert told[0]["winners"][0]["config"] == dict(entry.config)


def test_ctrl_c_before_anything_is_done(tmp_path: Path) -> None:
    path, home = tmp_path / "t4.yaml", tmp_path / "home"
    process = start(home, *SLOW, *LONG, "--output", path)
    wait_until(lambda: any((home / "generated").glob("*.py")), "a compilation")
    os.killpg(process.pid, signal.SIGINT)
    ended = end(process)
    assert ended.code == 1, ended.err
    assert ended.err.endswith(
        "Error: no candidate is usable for d128_fp16_causal on t4: "
        "the search ended before a candidate was done; give it more time with --budget.\n"
    )
    assert "Traceback" not in ended.err
    assert store.read(path, "t4").entries == []
    _nothing_runs(home)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_nothing_usable(home: Path, tmp_path: Path) -> None:
    for gpu, dtype, reason in (
        ("v100", "fp16", "v100 has capability sm_70; Triton supports sm_75 and newer."),
        ("t4", "bf16", "t4 (sm_75) has no bf16 arithmetic; use fp16 or a GPU of sm_80 or newer."),
    ):
        path, target = tmp_path / f"{gpu}.yaml", Gpu.named(gpu)
        ended = run("tune", "--gpu", gpu, "--head-dim", "64", "--dtype", dtype, "--output", path)
        assert ended.code == 1 and ended.out == ""
        last = ended.err.strip().splitlines()[-1]
        assert last.startswith(f"Error: no candidate is usable for d64_{dtype}, d64_{dtype}_causal on {gpu}: ")
        assert reason.rstrip(".") in last and f"{target.arch}; this kernel is written for sm_90" in last
        assert store.read(path, gpu).entries == []


def test_one_of_two_dtypes_is_usable(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "t4.yaml"
    command = ("tune", "--gpu", "t4", "--head-dim", "16", "--dtype", "bf16,fp16", "--causal", "false", "--seq", "512")
    ended = run(*command, "--trials", "1", *LONG, "--output", path)
    assert ended.code == 0, ended.err
    assert "no candidate is usable for d16_bf16 on t4: t4 (sm_75) has no bf16 arithmetic" in ended.err
    assert [entry.spec.slug for entry in store.read(path, "t4").entries] == ["d16_fp16"]


def test_tune_for_amd(home: Path) -> None:
    command = ("tune", "--gpu", "mi300x", "--head-dim", "64", "--causal", "false", "--seq", "1024")
    ended = run(*command, "--trials", "2", *LONG)
    assert ended.code == 0, ended.err
    # Without --output, winners go where look-ups find them.
    (entry,) = store.read(home / "tuned" / "mi300x.yaml", "mi300x").entries
    assert entry.method == "estimated" and entry.spec.slug == "d64_bf16"
    shown = json.loads(run("show", "--gpu", "mi300x", "--head-dim", "64", "--seq", "1024", "--json").out)
    assert shown[0]["method"] == "estimated" and shown[0]["config"] == dict(entry.config)
