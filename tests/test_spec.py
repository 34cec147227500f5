"""What is computed and at which sizes: values that mean nothing are refused, sizes are counted right."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest
import torch

from flashgen.errors import InputError
from flashgen.problem import MAX_SIZE, Bucket, Problem, next_power_of_2
from flashgen.reference import visible_keys
from flashgen.spec import Causal, Spec

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("op", "backwards"),
        ("dtype", "float16"),
        ("dtype", torch.float16),
        ("causal", "upper"),
        ("causal", True),
        ("precision", "tf23"),
        ("head_dim", 0),
        ("head_dim", 577),
        ("head_dim", 64.0),
        ("head_dim", True),
        ("head_dim_v", 0),
        ("head_dim_v", 577),
    ],
)
def test_specs_that_mean_nothing(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        Spec(**{field: value})  # type: ignore[arg-type]


def test_tf32_is_not_for_16_bit() -> None:
    assert Spec(dtype="fp32", precision="tf32").precision == "tf32"
    with pytest.raises(InputError, match="precision='tf32' is for fp32 inputs, but got dtype='bf16'"):
        Spec(dtype="bf16", precision="tf32")


@pytest.mark.parametrize(
    ("head_dim", "block_d"), [(1, 16), (15, 16), (16, 16), (17, 32), (72, 128), (128, 128), (129, 256), (256, 256)]
)
def test_tiles_are_padded_to_powers_of_two(head_dim: int, block_d: int) -> None:
    assert Spec(head_dim=head_dim).block_d == block_d
    assert Spec(head_dim_v=head_dim).block_dv == block_d
    assert not Spec(head_dim=head_dim, head_dim_v=head_dim).wide


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [
        (257, [256, 16]),
        (320, [256, 64]),
        (384, [256, 128]),
        (400, [512]),
        (512, [512]),
        (513, [512, 16]),
        (576, [512, 64]),
    ],
)
def test_wide_heads_take_two_tiles_where_that_saves_columns(head_dim: int, widths: list[int]) -> None:
    spec = Spec(head_dim=head_dim, head_dim_v=16)
    assert [width for _, width in spec.parts] == widths and spec.block_d == sum(widths)
    assert spec.parts_v == ((0, 16),) and spec.wide


def test_powers_of_two() -> None:
    for n in range(1, 1030):
        power = next_power_of_2(n)
        assert power >= n > power // 2 and power & (power - 1) == 0


def test_slugs_tell_specs_apart() -> None:
    specs = [
        Spec(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, causal=causal, precision=precision)
        for head_dim, head_dim_v, (dtype, precision), causal in itertools.product(
            (1, 64, 128), (1, 64, 128), (("fp16", "ieee"), ("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32")), CAUSAL
        )
    ]
    assert len({spec.slug for spec in specs}) == len(specs)
    assert Spec().slug == "d128_bf16"
    spec = Spec(head_dim=192, dtype="fp32", precision="tf32", causal="top_left")
    assert spec.slug == "d192v128_fp32_tf32_causal_top_left"


def test_a_spec_is_a_value() -> None:
    assert pickle.loads(pickle.dumps(Spec())) == Spec()
    assert len({Spec(), Spec(), Spec(causal="bottom_right")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Spec().head_dim = 64  # type: ignore[misc]


def test_alignments_share_what_was_tuned() -> None:
    assert Spec(causal="top_left").tuned_as == Spec(causal="bottom_right").tuned_as == Spec(causal="bottom_right")
    assert Spec().tuned_as == Spec()


@pytest.mark.parametrize("value", [-1, MAX_SIZE + 1, 1.0, True])
@pytest.mark.parametrize("field", ["batch", "heads", "kv_heads", "seq_q", "seq_kv"])
def test_sizes_that_mean_nothing(field: str, value: object) -> None:
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "seq_q": 1, "seq_kv": 1}
    with pytest.raises(InputError, match=field):
        Problem(**{**sizes, field: value})  # type: ignore[arg-type]


def test_empty_problems_are_problems() -> None:
    for sizes in ((0, 2, 1, 8, 8), (2, 0, 0, 8, 8), (2, 2, 1, 0, 8), (2, 2, 1, 8, 0)):
        problem = Problem(*sizes)
        assert all(problem.visible_pairs(causal) == 0 for causal in CAUSAL)
        assert problem.bucket.seq_q >= 1 and problem.bucket.seq_kv >= 1


@pytest.mark.parametrize("causal", CAUSAL)
def test_visible_pairs_by_counting(causal: Causal) -> None:
    for seq_q, seq_kv in itertools.product(range(9), repeat=2):
        counted = int(visible_keys(seq_q, seq_kv, causal).sum())
        assert Problem(2, 6, 3, seq_q, seq_kv).visible_pairs(causal) == 12 * counted, (seq_q, seq_kv)


def test_visible_pairs_of_long_sequences_are_exact() -> None:
    n = MAX_SIZE
    assert Problem(1, 1, 1, n, n).visible_pairs("bottom_right") == n * (n + 1) // 2


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "bucket"),
    [(0, 0, (1, 1)), (1, 1, (1, 1)), (4096, 4096, (4096, 4096)), (4097, 100, (8192, 128)), (1, 129, (1, 256))],
)
def test_buckets_round_up(seq_q: int, seq_kv: int, bucket: tuple[int, int]) -> None:
    assert Problem(3, 4, 2, seq_q, seq_kv).bucket == Bucket(*bucket)


def test_bucket_distance_counts_doublings() -> None:
    here = Bucket(1024, 4096)
    assert here.distance(here) == 0
    assert here.distance(Bucket(2048, 1024)) == Bucket(2048, 1024).distance(here) == 3
