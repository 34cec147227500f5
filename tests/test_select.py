"""Which variant serves a call: tuned files in their order, the nearest length, the default, and the reasons given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from entries import H200, SPEC, USABLE, entry

from flashgen import store
from flashgen.errors import UnknownNameError, UnsupportedError
from flashgen.families import FAMILIES, Variant
from flashgen.families.hopper_fwd import HOPPER_FWD
from flashgen.hardware import KNOWN_GPUS, Gpu
from flashgen.problem import Problem
from flashgen.records import Entry
from flashgen.select import Selection, current_versions, forget_selections, select
from flashgen.space import Config
from flashgen.spec import Spec

FAMILY = FAMILIES["triton_fwd"]
# Nobody ships winners for these widths.
ODD = replace(SPEC, head_dim=72, head_dim_v=40)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    forget_selections()
    return tmp_path / "home"


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write entries to the file that $FLASHGEN_TUNED names."""
    path = tmp_path / "tuned.yaml"
    monkeypatch.setenv("FLASHGEN_TUNED", str(path))

    def write(*entries: Entry, gpu: Gpu = H200) -> Path:
        store.merge(path, gpu, entries)
        forget_selections()
        return path

    return write


def _square(seq: int) -> Problem:
    return Problem(1, 16, 16, seq, seq)


def _select(spec: Spec = SPEC, seq: int = 4096, gpu: Gpu = H200, **options: object) -> Selection:
    return select(spec, _square(seq), gpu, **options)  # type: ignore[arg-type]


def test_exactly_this_bucket(tuned: Callable[..., Path]) -> None:
    path = tuned(entry(4096, config=5), entry(1024, config=2))
    for seq in (2049, 3000, 4096):
        selection = _select(seq=seq)
        assert selection.variant.config == USABLE[5]
        assert (selection.method, selection.source) == ("measured", str(path))
        assert selection.why == "exactly this bucket (seq_q 4096, seq_kv 4096), 123.4 us measured"
        assert selection.variant.spec == SPEC and selection.gpu == H200
    assert _select(seq=1024).variant.config == USABLE[2]


def test_the_nearest_bucket_between_tuned_ones(tuned: Callable[..., Path]) -> None:
    tuned(entry(16384, spec=ODD, config=5), entry(1024, spec=ODD, config=2))
    near = _select(ODD, 2048)
    assert near.variant.config == USABLE[2]
    assert near.why == "the nearest tuned bucket (seq_q 1024, seq_kv 1024), 123.4 us measured"
    assert _select(ODD, 8192).variant.config == USABLE[5]


@pytest.mark.parametrize("seq", [512, 32768])
def test_beyond_the_tuned_lengths_the_default(tuned: Callable[..., Path], seq: int) -> None:
    path = tuned(entry(1024, spec=ODD, config=2), entry(16384, spec=ODD, config=5))
    selection = _select(ODD, seq)
    assert (selection.method, selection.source) == ("default", None)
    assert selection.variant == Variant(HOPPER_FWD, ODD, HOPPER_FWD.default(ODD, H200))
    assert "nobody tuned d72v40_bf16_causal for this bucket of h200" in selection.why
    assert "flashgen tune" in selection.why
    notes = "\n".join(selection.notes)
    assert f"{path}: read, 2 entries." in notes and f"{seq}x{seq} lies outside the lengths" in notes


def test_measured_before_estimated(tuned: Callable[..., Path]) -> None:
    tuned(entry(4096, spec=ODD, config=5, measured=False, median_us=1.0))
    assert _select(ODD).method == "estimated" and _select(ODD).variant.config == USABLE[5]
    # Farther away and slower, but somebody ran it.
    tuned(*(entry(seq, spec=ODD, config=2, median_us=999.0) for seq in (1024, 16384)))
    assert _select(ODD).method == "measured" and _select(ODD).variant.config == USABLE[2]


def test_the_file_that_the_user_names_comes_before_the_shipped_one(tuned: Callable[..., Path], home: Path) -> None:
    path = tuned(entry(4096, config=5, median_us=9e9))
    (home / "tuned").mkdir(parents=True)
    store.merge(home / "tuned" / "h200.yaml", H200, [entry(4096, config=2, median_us=1.0)])
    forget_selections()
    assert _select().source == str(path)
    path.unlink()
    forget_selections()
    own = _select()
    assert own.source == str(home / "tuned" / "h200.yaml") and own.variant.config == USABLE[2]
    assert f"{path}: not read (No such file or directory)." in own.notes


def test_the_folder_that_the_user_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_TUNED", str(tmp_path))
    store.merge(tmp_path / "h200.yaml", H200, [entry(4096, spec=ODD, config=5)])
    assert _select(ODD).source == str(tmp_path / "h200.yaml")
    assert _select(ODD, gpu=Gpu.named("h100")).method == "default"


def test_what_changed_since_is_said(tuned: Callable[..., Path]) -> None:
    tuned(replace(entry(4096), versions=current_versions("triton_fwd")))
    assert not [note for note in _select().notes if "Since it was tuned" in note]
    old = replace(current_versions("triton_fwd"), triton="3.0.0", template="000000000000")
    tuned(replace(entry(4096), versions=old))
    (note,) = [note for note in _select().notes if "Since it was tuned" in note]
    assert "template went from 000000000000 to" in note and "triton went from 3.0.0 to" in note
    assert note in str(_select())


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, head_dim=64, head_dim_v=64),
        replace(SPEC, head_dim_v=64),
        replace(SPEC, dtype="fp16"),
        replace(SPEC, causal="none"),
    ],
)
def test_a_winner_of_another_spec_is_never_used(tuned: Callable[..., Path], other: Spec) -> None:
    path = tuned(entry(4096, spec=replace(other, head_dim=other.head_dim - 1), config=5))
    selection = _select(replace(SPEC, head_dim=SPEC.head_dim - 1))
    assert selection.source != str(path) and selection.method == "default"
    assert _select(replace(other, head_dim=other.head_dim - 1)).source == str(path)


def test_both_causal_alignments_use_one_winner(tuned: Callable[..., Path]) -> None:
    path = tuned(entry(4096, config=5))
    selection = _select(replace(SPEC, causal="top_left"))
    assert selection.source == str(path) and selection.variant.spec.causal == "top_left"


def test_other_silicon_of_the_same_name(tuned: Callable[..., Path]) -> None:
    path = tuned(entry(4096, spec=ODD))
    slice_of_it = replace(H200, num_sms=66)
    selection = _select(ODD, gpu=slice_of_it)
    assert selection.method == "default"
    assert any(note.startswith(f"{path}: skipped, it is for h200") for note in selection.notes)


def test_a_winner_that_cannot_run_here_is_passed_over(tuned: Callable[..., Path]) -> None:
    """As when a rule was learnt after it was stored: by hand, a tile that spills."""
    large = Config(**{**USABLE[0], "block_q": 256, "block_kv": 128, "num_warps": 4})
    assert FAMILY.refuses(ODD, large, H200) is not None
    tuned(replace(entry(4096, spec=ODD), config=large))
    selection = _select(ODD)
    assert selection.method == "default"
    assert any("passed over: keeps" in note for note in selection.notes)


def test_a_corrupt_file_warns_once_and_the_default_serves(tuned: Callable[..., Path]) -> None:
    path = tuned()
    path.write_text("schema: 1\ngpu: [")
    with pytest.warns(UserWarning, match="is not valid YAML"):
        selection = _select(ODD)
    assert selection.method == "default" and any("not valid YAML" in note for note in selection.notes)
    # A second warning would be an error here.
    forget_selections()
    assert _select(ODD).method == "default"


def test_unknown_families() -> None:
    with pytest.raises(UnknownNameError, match="no kernel family is called 'triton_bw'"):
        _select(family="triton_bw")


def test_families_of_another_op() -> None:
    with pytest.raises(UnsupportedError, match="'triton_bwd' computes op='backward', but 'forward' is needed"):
        _select(family="triton_bwd")


def test_an_explicit_family(tuned: Callable[..., Path]) -> None:
    tuned(entry(4096, config=5))
    assert _select(family="triton_fwd").variant == _select().variant


@pytest.mark.parametrize("family", [None, "triton_fwd"])
@pytest.mark.parametrize(
    ("gpu", "spec", "reason"),
    [
        ("v100", Spec(dtype="fp16"), "triton_fwd: v100 has capability sm_70; Triton supports sm_75 and newer"),
        ("t4", Spec(dtype="bf16"), "triton_fwd: t4 (sm_75) has no bf16 arithmetic; use fp16 or a GPU of sm_80"),
    ],
)
def test_no_family_runs_there(gpu: str, spec: Spec, reason: str, family: str | None) -> None:
    with pytest.raises(UnsupportedError) as error:
        _select(spec, gpu=Gpu.named(gpu), family=family)
    assert f"no kernel computes {spec.slug} on {Gpu.named(gpu).label}" in str(error.value)
    assert reason in str(error.value)
    # Nothing is remembered of it.
    with pytest.raises(UnsupportedError):
        _select(spec, gpu=Gpu.named(gpu), family=family)


@pytest.mark.parametrize("gpu", [name for name in KNOWN_GPUS if name != "v100"])
def test_every_gpu_has_a_kernel(gpu: str) -> None:
    target = Gpu.named(gpu)
    for head_dim in (1, 64, 72, 128, 256):
        for dtype in ("fp16", "fp32"):
            spec = Spec(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)  # type: ignore[arg-type]
            selection = _select(spec, gpu=target)
            assert selection.variant.family.refuses(spec, selection.variant.config, target) is None


def test_without_reading_files_nothing_is_remembered(tuned: Callable[..., Path]) -> None:
    path = tuned(entry(4096, config=5))
    blind = _select(read_files=False)
    assert blind.method == "default" and blind.variant == Variant(HOPPER_FWD, SPEC, HOPPER_FWD.default(SPEC, H200))
    assert "tuned files are not read while a CUDA graph is captured" in blind.notes
    seeing = _select()
    assert seeing.source == str(path)
    # What is known already needs no file.
    assert _select(read_files=False) is seeing
    forget_selections()
    assert _select(read_files=False).method == "default"


def test_a_selection_is_remembered_until_it_is_forgotten(tuned: Callable[..., Path]) -> None:
    tuned(entry(4096, config=5))
    first = _select()
    assert _select(seq=2500) is first
    store.merge(Path(str(first.source)), H200, [entry(4096, config=2)])
    assert _select() is first
    forget_selections()
    assert _select().variant.config == USABLE[2]


def test_a_selection_reads_well(tuned: Callable[..., Path]) -> None:
    path = tuned(entry(4096, config=5))
    first, chosen, source, *notes = str(_select()).splitlines()
    assert first == f"{_select().variant.slug} on NVIDIA H200 (sm_90)"
    assert chosen.strip() == "chosen: measured: exactly this bucket (seq_q 4096, seq_kv 4096), 123.4 us measured"
    assert source.strip() == f"source: {path}"
    assert notes and all(note.startswith("  note:   ") for note in notes)
    assert "source: built into the family" in str(_select(ODD))


def test_layouts_that_a_family_cannot_copy_go_to_another() -> None:
    """TMA takes rows on 16-byte boundaries only."""
    spec, problem = Spec(), Problem(2, 16, 16, 4096, 4096)
    assert select(spec, problem, H200, "hopper_fwd").variant.family is HOPPER_FWD
    with pytest.raises(UnsupportedError, match=r"needs rows that start on 16-byte boundaries.*contiguous\(\)"):
        select(spec, problem, H200, "hopper_fwd", aligned=False)
    assert select(spec, problem, H200, aligned=False).variant.family.name == "triton_fwd"


def test_short_sequences_default_to_the_kernel_that_is_launched_faster() -> None:
    """Four descriptors cost more CPU time than a few rows do on the GPU; by name it serves them too."""
    assert _select(ODD, 128).variant.family.name == "triton_fwd"
    assert _select(ODD, 256).variant.family is HOPPER_FWD
    assert select(ODD, Problem(1, 1, 1, 16, 16), H200, "hopper_fwd").variant.family is HOPPER_FWD


def test_features_that_nobody_tuned_take_what_was_tuned_without_them(tuned: Callable[..., Path]) -> None:
    path = tuned(entry(4096, config=5))
    spec = replace(SPEC, window=True, bias="fp32")
    selection = _select(spec, family="triton_fwd")
    assert selection.variant == Variant(FAMILY, spec, USABLE[5])
    assert (selection.method, selection.source) == ("measured", str(path))
    assert selection.why == (
        "exactly this bucket (seq_q 4096, seq_kv 4096), tuned for d128_bf16_causal, without its bias and window"
    )
    tuned(entry(4096, spec=spec, config=2))
    assert _select(spec, family="triton_fwd").why.endswith("123.4 us measured")
    assert _select(spec, family="triton_fwd").variant.config == USABLE[2]
    odd = replace(ODD, softcap=True)
    assert _select(odd, family="triton_fwd").method == "default"


def test_a_decode_is_told_what_it_was_tuned_without(tuned: Callable[..., Path]) -> None:
    spec = Spec("decode", 72, 72, causal="bottom_right", paged=True, cache="int8")
    decode = FAMILIES["triton_decode"]
    tuned(replace(entry(4096), spec=spec, family=decode.name, config=decode.default(spec, H200)))
    why = _select(replace(spec, appended=True, sinks=True, descale="token")).why
    assert why.endswith(f"tuned for {spec.label}, without its sinks and appended and descales of each token")
