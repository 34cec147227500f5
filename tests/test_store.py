"""Files of tuned configs: what is read from them, who wins, and what several writers leave behind."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import yaml
from entries import H200, SPEC, VERSIONS, entry

from flashgen import store
from flashgen.errors import StoreError
from flashgen.families import FAMILIES
from flashgen.hardware import Gpu
from flashgen.problem import Bucket
from flashgen.records import Entry
from flashgen.spec import Spec

CONFIG = FAMILIES["triton_fwd"].default(SPEC, H200)
TEXT = """\
schema: 1
gpu: {name: h200, backend: cuda, capability: [9, 0], num_sms: 132, shared_per_block: 232448}
entries:
- spec: {op: forward, head_dim: 128, head_dim_v: 128, dtype: bf16, causal: bottom_right, precision: ieee}
  bucket: {seq_q: 4096, seq_kv: 4096}
  family: triton_fwd
  config: CONFIG
  method: measured
  problem: {batch: 4, heads: 16, kv_heads: 16, seq_q: 4096, seq_kv: 4096}
  time_us: {median: 123.4, spread: 1.2, samples: 200}
  error: {max_error: 0.0012, allowed: 0.0031}
  versions: {flashgen: 0.1.0, triton: 3.6.0, torch: 2.11.0+cu130, driver: '580.159', template: b90a56f5e65b}
- spec: {op: forward, head_dim: 128, head_dim_v: 128, dtype: bf16, causal: none, precision: ieee}
  bucket: {seq_q: 1024, seq_kv: 1024}
  family: triton_fwd
  config: CONFIG
  method: estimated
  problem: {batch: 4, heads: 16, kv_heads: 16, seq_q: 1024, seq_kv: 1024}
  time_us: {median: 130.0}
  error: null
  versions: {flashgen: 0.1.0, triton: 3.6.0, torch: 2.11.0+cu130, driver: null, template: b90a56f5e65b}
""".replace("CONFIG", f"{{{', '.join(f'{name}: {value}' for name, value in CONFIG.items())}}}")
MEASURED = dataclasses.replace(entry(4096), config=CONFIG)
ESTIMATED = dataclasses.replace(
    entry(1024, spec=Spec(causal="none"), measured=False, median_us=130.0),
    config=CONFIG,
    versions=dataclasses.replace(VERSIONS, driver=None),
)
AT_4096 = Bucket(4096, 4096)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The three places of the look-up order, as empty folders."""
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path / "override"))
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("flashgen.paths.data_dir", lambda name: tmp_path / "shipped")
    folders = [tmp_path / "override", tmp_path / "home" / "tuned", tmp_path / "shipped"]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def _found(spec: Spec = SPEC, bucket: Bucket = AT_4096, gpu: Gpu = H200) -> Entry | None:
    found = store.lookup(spec, bucket, gpu).found
    return found and found.entry


def test_the_file_is_exactly_this(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    store.merge(path, H200, [ESTIMATED, MEASURED])
    assert path.read_bytes() == TEXT.encode()


def test_read_gives_back_every_field(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    path.write_text(TEXT)
    file = store.read(path, "h200")
    assert (file.path, file.gpu_name, file.identity) == (path, H200.name, H200.identity)
    assert file.entries == [MEASURED, ESTIMATED]
    assert file.complaints == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the file must be a mapping"),
        (b"\x00\x01\x02\xff", "is not valid YAML"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is not valid YAML"),
        (b"- schema: 1\n", "the file must be a mapping"),
        (b"schema: 1\n", "key 'gpu' is missing"),
        (b"gpu: {}\nentries: []\n", "reads schema 1, but it says None"),
        (TEXT.replace("schema: 1", "schema: 2").encode(), "reads schema 1, but it says 2"),
        (TEXT.replace("schema: 1", "schema: true").encode(), "reads schema 1, but it says True"),
        (TEXT.replace("schema: 1", "schema: 0x1" + 9000 * "0").encode(), "is not valid YAML"),
        (TEXT.replace("num_sms: 132", "num_sms: 9" + 9000 * "9").encode(), "is not valid YAML"),
        (TEXT.replace("num_sms", "num_sm").encode(), r"unknown key 'num_sm' in gpu. Did you mean 'num_sms'\?"),
        (TEXT.replace("entries:", "entry:").encode(), r"unknown key 'entry' in the file. Did you mean 'entries'\?"),
        (TEXT[: TEXT.index("- spec")].encode(), "entries must be a list"),
        (TEXT.encode() + b"entries: []\n", "stands twice"),
        (TEXT.replace("method: measured", "method: 2001-99-99").encode(), "is not valid YAML"),
        (TEXT.encode() + b"---\nschema: 1\n", "is not valid YAML"),
        (b"[" * 100_000, "is not valid YAML"),
    ],
)
def test_bad_file(text: bytes, message: str, places: list[Path]) -> None:
    path = places[0] / "h200.yaml"
    path.write_bytes(text)
    with pytest.raises(StoreError, match=message) as raised:
        store.read(path)
    assert str(path) in str(raised.value)
    assert "move it away" in str(raised.value)
    with pytest.raises(StoreError, match=message):
        store.merge(path, H200, [MEASURED])
    assert path.read_bytes() == text

    store.merge(places[2] / "h200.yaml", H200, [MEASURED])
    with pytest.warns(UserWarning, match="counts as empty"):
        result = store.lookup(SPEC, AT_4096, H200)
    assert result.found is not None
    assert result.found.path == places[2] / "h200.yaml"
    assert any(str(path) in note for note in result.notes)
    assert _found() == MEASURED  # a second warning would be an error


def test_a_bad_file_warns_again_when_it_has_changed(places: list[Path]) -> None:
    path = places[1] / "h200.yaml"
    for text in ("schema: 2", "schema: 33"):
        path.write_text(text)
        with pytest.warns(UserWarning, match=f"it says {text[-1]}"):
            assert _found() is None


def test_truncated_at_every_byte(places: list[Path]) -> None:
    path = places[0] / "h200.yaml"
    whole = TEXT.encode()
    outcomes = set()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            entries = store.read(path).entries
            outcomes.add(len(entries))
            assert entries == [MEASURED, ESTIMATED][: len(entries)]
        except StoreError:
            outcomes.add("error")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert _found() in (None, MEASURED)
    assert outcomes == {"error", 0, 1, 2}  # 2: all but the last line's end


def test_a_bad_entry_takes_no_other_with_it(places: list[Path]) -> None:
    path = places[0] / "h200.yaml"
    path.write_text(TEXT.replace("num_warps", "num_warp", 1))
    file = store.read(path)
    assert file.entries == [ESTIMATED]
    (complaint,) = file.complaints
    assert complaint == (
        f"{path}, entries[0] (d128_bf16_causal): unknown config key 'num_warp'. Did you mean 'num_warps'? "
        "Correct or delete this entry; the others are used."
    )
    assert complaint in store.lookup(SPEC, AT_4096, H200).notes
    assert _found(Spec(causal="none"), Bucket(1024, 1024)) == ESTIMATED


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    path, trace = tmp_path / "h200.yaml", tmp_path / "trace"
    tagged = f"!!python/object/apply:os.mkdir ['{trace}']"
    path.write_text(TEXT.replace("median: 123.4", f"median: {tagged}"))
    file = store.read(path)
    assert file.entries == [ESTIMATED]
    assert "entries[0] (d128_bf16_causal): time_us.median must be a single value" in file.complaints[0]
    store.merge(path, H200, [entry(512)])
    assert "python/object/apply:os.mkdir" in path.read_text()
    assert len(store.read(path).complaints) == 1
    assert not trace.exists()


def test_numpy_scalars_are_refused_by_name(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    plain = yaml.safe_load(TEXT)
    plain["entries"][0]["time_us"]["median"] = numpy.float64(1.5)
    path = tmp_path / "h200.yaml"
    path.write_text(yaml.dump(plain))
    file = store.read(path)
    assert file.entries == [ESTIMATED]
    assert "tagged tag:yaml.org,2002:python/object/apply:numpy" in file.complaints[0]


def test_aliases_cannot_blow_up_a_message(tmp_path: Path) -> None:
    levels = [f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)]
    path = tmp_path / "h200.yaml"
    path.write_text("a0: &a0 [x]\n" + "".join(levels) + "schema: *a9\n")
    with pytest.raises(StoreError, match="reads schema 1") as raised:
        store.read(path)
    assert len(str(raised.value)) < 1000


def test_a_file_that_is_not_there(tmp_path: Path, places: list[Path]) -> None:
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        store.read(tmp_path / "h200.yaml")
    result = store.lookup(SPEC, AT_4096, H200)
    assert result.found is None
    for place in places:
        assert f"{place / 'h200.yaml'}: not read (No such file or directory)." in result.notes


def test_a_folder_in_place_of_the_file(places: list[Path]) -> None:
    (places[0] / "h200.yaml").mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert _found() is None


def test_read_for_a_named_gpu(tmp_path: Path) -> None:
    path = tmp_path / "h200.yaml"
    path.write_text(TEXT)
    with pytest.raises(StoreError, match="it is for h200, not for h100"):
        store.read(path, "h100")


def test_override_before_user_before_shipped(places: list[Path]) -> None:
    for place in reversed(places):
        store.merge(place / "h200.yaml", H200, [entry()])
        found = store.lookup(SPEC, AT_4096, H200).found
        assert found is not None
        assert found.path == place / "h200.yaml"
    assert [path.parent for path, _ in store.entries_of(H200)] == places


def test_measured_before_estimated_across_places(places: list[Path]) -> None:
    store.merge(places[0] / "h200.yaml", H200, [entry(measured=False)])
    assert _found() == entry(measured=False)
    store.merge(places[2] / "h200.yaml", H200, [entry()])
    assert _found() == entry()


def test_override_may_be_a_file_of_any_name(
    tmp_path: Path, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.merge(places[1] / "h200.yaml", H200, [entry(config=1)])
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path / "mine.yaml"))
    assert _found() == entry(config=1)
    store.merge(tmp_path / "mine.yaml", H200, [entry(config=2)])
    assert _found() == entry(config=2)


def test_a_new_merge_is_seen_at_once(places: list[Path]) -> None:
    for config in range(20):
        store.merge(places[1] / "h200.yaml", H200, [entry(config=config)])
        assert _found() == entry(config=config)


@pytest.mark.parametrize("other", ["h100", "a100"])
def test_a_file_copied_to_another_gpus_name_is_a_miss(other: str, places: list[Path]) -> None:
    store.merge(places[0] / "h200.yaml", H200, [entry()])
    copy = places[0] / f"{other}.yaml"
    copy.write_bytes((places[0] / "h200.yaml").read_bytes())
    gpu = Gpu.named(other)
    result = store.lookup(SPEC, AT_4096, gpu)
    assert result.found is None
    assert any(note.startswith(f"{copy}: skipped, it is for h200") for note in result.notes)
    assert store.entries_of(gpu) == []
    assert _found() == entry()


def test_a_gpu_of_this_name_with_other_silicon_is_a_miss(places: list[Path]) -> None:
    store.merge(places[0] / "h200.yaml", H200, [entry()])
    assert _found(gpu=dataclasses.replace(H200, num_sms=66)) is None


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_bf16_winner_never_answers_another_dtype(dtype: str, places: list[Path]) -> None:
    store.merge(places[0] / "h200.yaml", H200, [entry()])
    assert _found(dataclasses.replace(SPEC, dtype=dtype)) is None
    assert _found() == entry()


def test_notes_of_a_hit_say_what_was_read(places: list[Path]) -> None:
    store.merge(places[0] / "h200.yaml", H200, [entry(), entry(512), entry(spec=Spec())])
    result = store.lookup(SPEC, AT_4096, H200, current={"triton_fwd": dataclasses.replace(VERSIONS, triton="9")})
    assert f"{places[0] / 'h200.yaml'}: read, 3 entries." in result.notes
    assert "2 of 3 entries for h200 are for d128_bf16_causal." in result.notes
    assert result.found is not None
    assert "triton went from 3.6.0 to 9" in str(result.found.stale)
