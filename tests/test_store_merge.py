"""What one or many writers leave behind in a file of tuned configs."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from entries import H200, SPEC, entry

from flashgen import store
from flashgen.errors import StoreError
from flashgen.families import FAMILIES
from flashgen.hardware import Gpu
from flashgen.records import Entry
from flashgen.spec import Spec

# Imports torch once for all the processes that a test starts.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["flashgen.store"])


def _run(*jobs: tuple[Callable[..., None], tuple[object, ...]]) -> list[multiprocessing.process.BaseProcess]:
    processes = [PROCESSES.Process(target=function, args=arguments) for function, arguments in jobs]
    for process in processes:
        process.start()
    return processes


def _finish(processes: list[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def _merge_one_by_one(path: Path, entries: list[Entry]) -> None:
    for one in entries:
        store.merge(path, H200, [one])


def _merge_together(path: Path, rounds: list[list[Entry]]) -> None:
    for entries in rounds:
        store.merge(path, H200, entries)


def test_eight_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    shares = [
        [entry(2**power, config=writer, spec=Spec(head_dim=64 + writer)) for power in range(5)] for writer in range(8)
    ]
    _finish(_run(*((_merge_one_by_one, (path, share)) for share in shares)))
    file = store.read(path)
    assert file.complaints == []
    assert len(file.entries) == 40
    assert set(file.entries) == {one for share in shares for one in share}
    assert sorted(os.listdir(tmp_path)) == ["h200.yaml", "h200.yaml.lock"]


def test_two_writers_of_one_key_leave_one_whole_entry(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    ours, theirs = entry(config=0, median_us=1.0), entry(config=1, median_us=2.0)
    _finish(_run((_merge_one_by_one, (path, [ours] * 10)), (_merge_one_by_one, (path, [theirs] * 10))))
    (left,) = store.read(path).entries
    assert left in (ours, theirs)


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    rounds = [[entry(seq, median_us=1.0 + number) for seq in (512, 1024, 2048)] for number in range(40)]
    store.merge(path, H200, rounds[0])
    (writer,) = processes = _run((_merge_together, (path, rounds)))
    seen = []
    while writer.exitcode is None:
        entries = store.read(path).entries
        assert entries in rounds
        seen.append(rounds.index(entries))
    _finish(processes)
    assert seen == sorted(seen)
    assert store.read(path).entries == rounds[-1]


def test_rewriting_is_byte_identical(tmp_path: Path) -> None:
    many = [entry(seq, config=index) for index, seq in enumerate((4096, 512, 8192, 1, 2048))]
    store.merge(tmp_path / "a.yaml", H200, many)
    for one in reversed(many):
        store.merge(tmp_path / "b.yaml", H200, [one])
    store.merge(tmp_path / "b.yaml", H200, [])
    assert (tmp_path / "a.yaml").read_bytes() == (tmp_path / "b.yaml").read_bytes()
    assert [each.bucket.seq_q for each in store.read(tmp_path / "a.yaml").entries] == [1, 512, 2048, 4096, 8192]


def test_the_same_key_is_replaced_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "other_fwd", dataclasses.replace(FAMILIES["triton_fwd"], name="other_fwd"))
    path = tmp_path / "h200.yaml"
    others = [entry(512), entry(spec=Spec()), entry(family="other_fwd"), entry(family="other_fwd", measured=False)]
    store.merge(path, H200, [entry(config=1), *others[:3]])
    store.merge(path, H200, [entry(config=2)])
    assert set(store.read(path).entries) == {entry(config=2), *others[:3]}


def test_a_measurement_removes_the_estimate_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    estimates = [entry(measured=False), entry(512, measured=False), entry(spec=Spec(), measured=False)]
    store.merge(path, H200, estimates)
    store.merge(path, H200, [entry()])
    assert set(store.read(path).entries) == {entry(), *estimates[1:]}
    store.merge(path, H200, [entry(512), entry(512, measured=False)])
    assert set(store.read(path).entries) == {entry(), entry(512), estimates[2]}


def test_top_left_replaces_bottom_right(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    store.merge(path, H200, [entry(config=1)])
    store.merge(path, H200, [entry(config=2, spec=dataclasses.replace(SPEC, causal="top_left"))])
    (left,) = store.read(path).entries
    assert left.config == entry(config=2).config


def test_merging_keeps_entries_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    store.merge(path, H200, [entry(512), entry(4096)])
    text = path.read_text()
    path.write_text(text.replace("family: triton_fwd", "family: from_the_future", 1))
    store.merge(path, H200, [entry(1024)])
    file = store.read(path)
    assert file.entries == [entry(1024), entry(4096)]
    assert len(file.complaints) == 1
    path.write_text(path.read_text().replace("from_the_future", "triton_fwd"))
    assert set(store.read(path).entries) == {entry(512), entry(1024), entry(4096)}


def test_tuning_again_heals_an_entry_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    store.merge(path, H200, [entry(512), entry(4096)])
    path.write_text(path.read_text().replace("num_warps", "old_name", 1))
    assert len(store.read(path).complaints) == 1
    store.merge(path, H200, [entry(512, config=1)])
    file = store.read(path)
    assert (file.complaints, file.entries) == ([], [entry(512, config=1), entry(4096)])


@pytest.mark.parametrize("gpu", [Gpu.named("h100"), dataclasses.replace(H200, num_sms=66)])
def test_a_file_of_another_gpu_is_left_alone(gpu: Gpu, tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    store.merge(path, H200, [entry()])
    before = path.read_bytes()
    with pytest.raises(StoreError, match="is for"):
        store.merge(path, gpu, [entry()])
    assert path.read_bytes() == before


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"missing is not a folder\. Create it"):
        store.merge(tmp_path / "missing" / "h200.yaml", H200, [entry()])
    assert os.listdir(tmp_path) == []


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("")
    with pytest.raises(StoreError, match="tuned is not a folder"):
        store.merge(tmp_path / "tuned" / "h200.yaml", H200, [entry()])


def test_a_folder_in_place_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "h200.yaml.lock").mkdir()
    with pytest.raises(StoreError, match="cannot be written and stays as it was"):
        store.merge(tmp_path / "h200.yaml", H200, [entry()])
    assert os.listdir(tmp_path) == ["h200.yaml.lock"]


def test_unwritable_folder(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    store.merge(path, H200, [entry()])
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user, probably root, may write to every folder")
        with pytest.raises(StoreError, match="cannot be written and stays as it was"):
            store.merge(path, H200, [entry(512)])
    finally:
        tmp_path.chmod(0o755)
    assert store.read(path).entries == [entry()]


def test_replacing_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h200.yaml"
    replace, refusals = os.replace, iter([PermissionError(13, "in use")] * 3)

    def refuse_at_first(source: Path, target: Path) -> None:
        for error in refusals:
            raise error
        replace(source, target)

    monkeypatch.setattr("flashgen.store.os.replace", refuse_at_first)
    store.merge(path, H200, [entry()])
    assert store.read(path).entries == [entry()]


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h200.yaml"
    store.merge(path, H200, [entry()])

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(13, "in use")

    monkeypatch.setattr("flashgen.store.os.replace", refuse)
    with pytest.raises(StoreError, match=r"stays as it was: .*in use"):
        store.merge(path, H200, [entry(512)])
    assert store.read(path).entries == [entry()]
    assert sorted(os.listdir(tmp_path)) == ["h200.yaml", "h200.yaml.lock"]


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    store.merge(tmp_path / "h200.yaml", H200, [entry()])
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("h200.yaml", "plain")}
    assert len(modes) == 1


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    link = tmp_path / "h200.yaml"
    link.symlink_to(tmp_path / "target" / "real.yaml")
    store.merge(link, H200, [entry()])
    assert link.is_symlink()
    assert store.read(tmp_path / "target" / "real.yaml").entries == [entry()]
