"""What may stand in an entry, and what is refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from entries import H200, VERSIONS, entry

from flashgen.errors import FlashgenError, InputError
from flashgen.problem import Bucket, Problem
from flashgen.records import Accuracy, Entry, Timing, gpu_from_plain, gpu_to_plain
from flashgen.spec import Spec


@pytest.mark.parametrize("measured", [True, False])
def test_plain_form_gives_back_every_field(measured: bool) -> None:
    before = entry(measured=measured)
    after = Entry.from_plain(before.to_plain())
    for field in dataclasses.fields(Entry):
        assert getattr(after, field.name) == getattr(before, field.name)


def test_missing_driver_is_kept() -> None:
    before = dataclasses.replace(entry(), versions=dataclasses.replace(VERSIONS, driver=None))
    assert Entry.from_plain(before.to_plain()) == before


def test_subclasses_become_plain() -> None:
    versions = dataclasses.replace(VERSIONS, torch=torch.__version__)
    plain = dataclasses.replace(entry(median_us=np.float64(2.5)), versions=versions).to_plain()
    assert type(plain["time_us"]["median"]) is float
    assert type(plain["versions"]["torch"]) is str


def _set(*path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(plain: dict[str, Any]) -> None:
        for key in path[:-1]:
            plain = plain[key]
        plain[path[-1]] = value

    return change


def _delete(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(plain: dict[str, Any]) -> None:
        for key in path[:-1]:
            plain = plain[key]
        del plain[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("config", "num_warp", value=8), r"'num_warp'. Did you mean 'num_warps'\?"),
        (_set("configs", value={}), r"unknown key 'configs' in the entry. Did you mean 'config'\?"),
        (_set("spec", "head_dims", value=64), r"unknown key 'head_dims' in spec. Did you mean 'head_dim'\?"),
        (_set("config", "self", value=1), "unknown config key 'self'"),
        (_delete("versions"), "key 'versions' is missing in the entry"),
        (_delete("spec", "causal"), "key 'causal' is missing in spec"),
        (_delete("config", "block_q"), "'block_q' is missing"),
        (_set("config", "block_q", value=-64), "block_q=-64"),
        (_set("config", "block_q", value=2**40), "block_q=1099511627776"),
        (_set("config", "block_q", value=True), "block_q=True"),
        (_set("config", "block_q", value=128.0), "block_q=128.0"),
        (_set("config", "block_q", value=[128]), r"config.block_q must be a single value, but got \[128\]"),
        (_set("config", value=[["block_q", 128]]), "config must be a mapping"),
        (_set("config", 1, value=2), "config must be a mapping with names as keys"),
        (_set("spec", "dtype", value="bf61"), r"dtype='bf61' is not known. Did you mean 'bf16'\?"),
        (_set("spec", "head_dim", value=True), "head_dim=True"),
        (_set("spec", value=None), "spec must be a mapping"),
        (_set("bucket", "seq_q", value=0), "bucket.seq_q must be"),
        (_set("bucket", "seq_q", value=3000), "bucket.seq_q must be a power of two"),
        (_set("bucket", "seq_kv", value=True), "bucket.seq_kv must be a whole number"),
        (_set("problem", "batch", value="4"), "batch='4'"),
        (_set("problem", "batch", value=0), "a problem without any work"),
        (_set("family", value="triton_fwdd"), r"Did you mean 'triton_fwd'\?"),
        (_set("family", value=3), "family must be a string"),
        (_set("method", value="measure"), r"method='measure' is not known. Did you mean 'measured'\?"),
        (_set("method", value=["measured"]), "method must be a single value"),
        (_set("method", value="estimated"), "'estimated' has none"),
        (_set("time_us", value={"median": 1.0}), "'measured' needs time_us.spread"),
        (_set("error", value=None), "'measured' needs"),
        (_set("time_us", "median", value=math.nan), "time_us.median must be a number .*, but got nan"),
        (_set("time_us", "median", value=math.inf), "but got inf"),
        (_set("time_us", "median", value=-1.0), "but got -1.0"),
        (_set("time_us", "median", value=0), "but got 0"),
        (_set("time_us", "median", value=10**400), "but got 1000"),
        (_set("time_us", "median", value="fast"), "but got 'fast'"),
        (_set("time_us", "median", value=True), "but got True"),
        (_set("time_us", "spread", value=-0.1), "time_us.spread must be a number from 0"),
        (_set("time_us", "samples", value=0), "time_us.samples must be a whole number from 1"),
        (_set("time_us", "samples", value=1.5), "time_us.samples must be a whole number"),
        (_set("error", "max_error", value=math.nan), "error.max_error must be a number"),
        (_set("error", "max_error", value=0.5), "above what is allowed"),
        (_set("versions", "triton", value=3.6), "versions.triton must be a string, but got 3.6. Put it in quotes."),
        (_set("versions", "triton", value=None), "versions.triton must be a string"),
        (_set("versions", "driver", value=580), "versions.driver must be a string"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(change: Callable[[dict[str, Any]], None], message: str) -> None:
    plain = entry().to_plain()
    change(plain)
    with pytest.raises(FlashgenError, match=message):
        Entry.from_plain(plain)


@pytest.mark.parametrize("value", [None, [], "entry", 3, {}])
def test_an_entry_must_be_a_mapping_with_its_keys(value: object) -> None:
    with pytest.raises(InputError, match="the entry"):
        Entry.from_plain(value)


def test_an_entry_made_in_python_is_held_to_the_same() -> None:
    good = entry()
    for name, value in (
        ("bucket", Bucket(4097, 4096)),
        ("problem", Problem(0, 16, 16, 4096, 4096)),
        ("accuracy", None),
        ("accuracy", Accuracy(2.0, 1.0)),
        ("time", Timing(1.0, None, None)),
        ("family", "nobody"),
    ):
        with pytest.raises(FlashgenError):
            dataclasses.replace(good, **{name: value})


def test_both_causal_alignments_have_one_key() -> None:
    assert entry(spec=Spec(causal="top_left")).key == entry(spec=Spec(causal="bottom_right")).key
    assert entry(spec=Spec(causal="none")).key != entry(spec=Spec(causal="bottom_right")).key


def test_times_at_different_sizes_compare_by_work() -> None:
    assert entry(4096, median_us=100.0).us_per_score < entry(2048, median_us=50.0).us_per_score


def test_gpu_round_trip() -> None:
    assert gpu_from_plain(gpu_to_plain(H200)) == (H200.name, H200.identity)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", 200), ("name", ""), ("backend", None), ("capability", [9]), ("capability", "9.0"),
        ("capability", [9, True]), ("num_sms", 132.0), ("shared_per_block", -1),
    ],
)  # fmt: skip
def test_gpu_values_that_cannot_be_right(key: str, value: object) -> None:
    with pytest.raises(InputError, match=f"gpu.{key}"):
        gpu_from_plain({**gpu_to_plain(H200), key: value})


def test_features_stand_in_a_file_only_where_there_are_any() -> None:
    plain = entry()
    featured = replace(plain, spec=replace(plain.spec, window=True, bias="fp32"))
    assert not {"window", "bias", "mask"} & dict(plain.to_plain()["spec"]).keys()  # type: ignore[call-overload]
    written = featured.to_plain()
    assert written["spec"] == plain.to_plain()["spec"] | {"window": True, "bias": "fp32"}  # type: ignore[operator]
    assert Entry.from_plain(written) == featured and featured.key != plain.key
    wrong = {**written, "spec": {**written["spec"], "window": "yes"}}  # type: ignore[dict-item]
    with pytest.raises(InputError, match="window must be true or false, but got 'yes'"):
        Entry.from_plain(wrong)


def test_pages_and_eager_times_stand_in_a_file_only_where_there_are_any() -> None:
    plain = entry()
    assert "page_size" not in str(plain.to_plain()) and "eager" not in str(plain.to_plain())
    served = replace(plain, problem=replace(plain.problem, page_size=64), time=Timing(9.5, 0.1, 50, eager_us=14.25))
    assert served.to_plain()["problem"]["page_size"] == 64  # type: ignore[index]
    assert served.to_plain()["time_us"] == {"median": 9.5, "spread": 0.1, "eager": 14.25, "samples": 50}
    assert Entry.from_plain(served.to_plain()) == served
    with pytest.raises(InputError, match=r"time_us\.eager must be a number from 1e-09"):
        Timing(9.5, 0.1, 50, eager_us=0.0)
