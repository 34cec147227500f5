"""Which entry answers a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from entries import H200, SPEC, VERSIONS, entry

from flashgen.choice import choose
from flashgen.families import FAMILIES
from flashgen.hardware import Gpu
from flashgen.problem import Bucket
from flashgen.records import Entry
from flashgen.space import Rule
from flashgen.spec import Spec

FIRST, SECOND = Path("first.yaml"), Path("second.yaml")
AT_4096 = Bucket(4096, 4096)


def _chosen(*tuned: tuple[Path, Entry], bucket: Bucket = AT_4096, **options: object) -> Entry | None:
    found = choose(tuned, SPEC, bucket, H200, **options).found
    return found and found.entry


def test_measured_before_estimated_whatever_the_place() -> None:
    measured = entry(median_us=200.0)
    assert _chosen((FIRST, entry(measured=False, median_us=100.0)), (SECOND, measured)) is measured


def test_measured_nearby_before_estimated_here() -> None:
    low, high = entry(1024), entry(8192)
    assert _chosen((FIRST, entry(measured=False)), (FIRST, low), (FIRST, high)) is high


def test_exact_before_nearest_whatever_the_place() -> None:
    exact = entry(4096)
    result = choose([(FIRST, entry(2048)), (FIRST, entry(8192)), (SECOND, exact)], SPEC, AT_4096, H200)
    assert result.found is not None
    assert (result.found.entry, result.found.path, result.found.how) == (exact, SECOND, "exact")


def test_earlier_place_before_faster() -> None:
    slow = entry(median_us=300.0)
    assert _chosen((FIRST, slow), (SECOND, entry(config=1, median_us=100.0))) is slow


def test_faster_among_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "other_fwd", replace(FAMILIES["triton_fwd"], name="other_fwd"))
    slow, fast = entry(median_us=300.0), entry(family="other_fwd", median_us=100.0)
    assert _chosen((FIRST, slow), (FIRST, fast)) is fast
    assert _chosen((FIRST, slow), (FIRST, fast), families=["triton_fwd"]) is slow
    assert _chosen((FIRST, fast), families=["triton_fwd"]) is None


@pytest.mark.parametrize(("seq", "nearest"), [(1024, 512), (512, 512), (4096, 8192), (8192, 8192)])
def test_nearest_inside_the_tuned_range(seq: int, nearest: int) -> None:
    tuned = [(FIRST, entry(512)), (FIRST, entry(8192, config=1))]
    found = choose(tuned, SPEC, Bucket(seq, seq), H200).found
    assert found is not None
    assert found.entry.bucket == Bucket(nearest, nearest)
    assert found.how == ("exact" if seq == nearest else "nearest")


@pytest.mark.parametrize("bucket", [Bucket(256, 256), Bucket(16384, 16384), Bucket(256, 4096), Bucket(4096, 16384)])
def test_nothing_outside_the_tuned_range(bucket: Bucket) -> None:
    result = choose([(FIRST, entry(512)), (FIRST, entry(8192))], SPEC, bucket, H200)
    assert result.found is None
    assert result.notes[-1] == f"{bucket.seq_q}x{bucket.seq_kv} lies outside the lengths of the measured entries."


def test_estimate_where_the_measured_ones_do_not_reach() -> None:
    estimated = entry(8192, measured=False)
    assert _chosen((FIRST, entry(4096)), (FIRST, estimated), bucket=Bucket(8192, 8192)) is estimated


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, dtype="fp16"), replace(SPEC, dtype="fp32"), replace(SPEC, causal="none"),
        replace(SPEC, head_dim=64), replace(SPEC, head_dim_v=64),
    ],
)  # fmt: skip
def test_another_spec_is_never_answered(other: Spec) -> None:
    assert choose([(FIRST, entry())], other, AT_4096, H200).found is None
    assert choose([(FIRST, entry())], SPEC, AT_4096, H200).found is not None


def test_ieee_winner_never_answers_tf32() -> None:
    ieee = Spec(dtype="fp32")
    config = FAMILIES["triton_fwd"].default(ieee, H200)
    tuned = [(FIRST, replace(entry(spec=ieee), config=config))]
    assert choose(tuned, ieee, AT_4096, H200).found is not None
    assert choose(tuned, replace(ieee, precision="tf32"), AT_4096, H200).found is None


def test_top_left_uses_what_bottom_right_tuned() -> None:
    assert choose([(FIRST, entry())], replace(SPEC, causal="top_left"), AT_4096, H200).found is not None


WINDOWED = replace(SPEC, window=True, softcap=True)


def test_entries_without_the_features_answer_where_none_has_them() -> None:
    plain, own = entry(config=5, median_us=1.0), entry(spec=WINDOWED, measured=False)
    result = choose([(FIRST, plain)], WINDOWED, AT_4096, H200)
    assert result.found is not None and result.found.entry is plain
    assert result.notes == [
        "0 of 1 entries for h200 are for d128_bf16_causal_softcap_window.",
        "1 of 1 entries for h200 are for d128_bf16_causal.",
    ]
    # Slower, estimated and of the last file, but of the very spec.
    assert choose([(FIRST, plain), (SECOND, own)], WINDOWED, AT_4096, H200).found.entry is own  # type: ignore[union-attr]
    # Outside the lengths of its own entries those without the features are asked as well.
    assert choose([(FIRST, entry(512, spec=WINDOWED)), (FIRST, plain)], WINDOWED, AT_4096, H200).found.entry is plain  # type: ignore[union-attr]


def test_entries_with_features_never_answer_other_specs() -> None:
    tuned = [(FIRST, entry(spec=WINDOWED))]
    for other in (SPEC, replace(WINDOWED, softcap=False), replace(WINDOWED, mask=True)):
        assert choose(tuned, other, AT_4096, H200).found is None


def test_decodes_ask_for_less_and_less() -> None:
    """Nobody tunes appending, ragged rows or numbers of their own; pages and a cache's type go last."""
    plain = Spec("decode", causal="bottom_right")
    stored = replace(plain, paged=True, cache="int8")
    read = replace(stored, window=True)
    asked = replace(read, appended=True, varlen=True, descale="head")
    config = FAMILIES["triton_decode"].default(plain, H200)
    tuned = [
        (FIRST, replace(entry(), spec=spec, family="triton_decode", config=config))
        for spec in (asked, read, stored, plain)
    ]
    for place, (_, best) in enumerate(tuned):
        found = choose(tuned[place:][::-1], asked, AT_4096, H200).found
        assert found is not None and found.entry is best
    assert choose(tuned[:3], plain, AT_4096, H200).found is None


def test_a_family_that_refuses_the_features_lends_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule("features", lambda spec, config, gpu: "has no windows" if spec.window else None)
    other = replace(FAMILIES["triton_fwd"], name="other_fwd", rules=(rule, *FAMILIES["triton_fwd"].rules))
    monkeypatch.setitem(FAMILIES, "other_fwd", other)
    fast, slow = entry(family="other_fwd", median_us=1.0), entry(config=1, median_us=900.0)
    tuned = [(FIRST, fast), (FIRST, slow)]
    assert choose(tuned, SPEC, AT_4096, H200).found.entry is fast  # type: ignore[union-attr]
    result = choose(tuned, WINDOWED, AT_4096, H200)
    assert result.found is not None and result.found.entry is slow
    assert any("other_fwd" in note and note.endswith("passed over: has no windows.") for note in result.notes)
    assert choose(tuned[:1], WINDOWED, AT_4096, H200).found is None


def test_refused_config_falls_through_with_the_reason() -> None:
    config, rejection = FAMILIES["triton_fwd"].space(SPEC, H200).rejected[0]
    refused, next_best = replace(entry(), config=config), entry(measured=False)
    result = choose([(FIRST, refused), (SECOND, next_best)], SPEC, AT_4096, H200)
    assert result.found is not None
    assert result.found.entry is next_best
    assert any(str(FIRST) in note and rejection.reason in note for note in result.notes)


def test_config_too_large_for_a_smaller_gpu_is_refused_there() -> None:
    small = Gpu.named("rtx4090")
    for config in FAMILIES["triton_fwd"].space(SPEC, H200).usable:
        found = choose([(FIRST, replace(entry(), config=config))], SPEC, AT_4096, small).found
        assert (found is None) == (FAMILIES["triton_fwd"].refuses(SPEC, config, small) is not None)


def test_stale_says_what_changed() -> None:
    tuned = [(FIRST, entry())]

    def stale(**changes: str) -> str | None:
        found = choose(tuned, SPEC, AT_4096, H200, current={"triton_fwd": replace(VERSIONS, **changes)}).found
        assert found is not None
        return found.stale

    assert stale() is None
    assert stale(torch="9.9", driver="1.0", flashgen="2.0") is None
    assert stale(triton="3.7.1") == "Since it was tuned, triton went from 3.6.0 to 3.7.1. Tune again."
    assert "template went from b90a56f5e65b to 000000000000" in str(stale(template="000000000000"))
    found = choose(tuned, SPEC, AT_4096, H200).found
    assert found is not None
    assert found.stale is None


def test_other_expressions_come_before_none() -> None:
    rel, far = (replace(SPEC, score_mod=f"(score + {text})") for text in ("q_idx", "kv_idx"))
    entries = [(FIRST, entry(spec=spec, median_us=us)) for spec, us in ((SPEC, 1.0), (rel, 5.0))]
    for spec, expected in ((rel, rel), (far, rel), (replace(SPEC, mask_mod="(kv_idx < 4)"), SPEC)):
        found = choose(entries, spec, AT_4096, H200).found
        assert found is not None and found.entry.spec == expected
    notes = choose(entries, far, AT_4096, H200).notes
    assert any(note.startswith("1 of 2 entries") and "other expressions" in note for note in notes)
