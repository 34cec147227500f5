"""What callers may ask: good input is described, bad input refused with the values and the way out."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashgen.errors import InputError
from flashgen.reference import visible_keys
from flashgen.spec import DTYPE_NAMES, MAX_SIZE, TORCH_DTYPES, Bucket, Causal, Problem, Spec, next_power_of_2
from flashgen.tensors import causal_from, check_scale, from_tensors

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")


def _tensors(
    q: tuple[int, ...] = (2, 4, 5, 64), k: tuple[int, ...] = (2, 2, 7, 64), v: tuple[int, ...] = (2, 2, 7, 32)
) -> list[Tensor]:
    return [torch.empty(shape, dtype=torch.float16, device="meta") for shape in (q, k, v)]


def test_tensors_are_described() -> None:
    spec, problem = from_tensors(*_tensors(), causal=True)
    assert spec == Spec(head_dim=64, head_dim_v=32, dtype="fp16", causal="bottom_right")
    assert problem == Problem(batch=2, heads=4, kv_heads=2, seq_q=5, seq_kv=7)


def test_layouts_describe_the_same_call() -> None:
    bshd = [tensor.transpose(1, 2) for tensor in _tensors()]
    assert from_tensors(*bshd, layout="bshd") == from_tensors(*_tensors())


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_has_one_name(name: str) -> None:
    tensors = [tensor.to(TORCH_DTYPES[name]) for tensor in _tensors()]
    spec, _ = from_tensors(*tensors)
    assert spec.dtype == name == DTYPE_NAMES[TORCH_DTYPES[name]]
    assert spec.element_bytes == tensors[0].element_size()


@pytest.fixture
def restored_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.usefixtures("restored_tf32")
def test_tf32_is_torchs_choice_and_for_fp32_only(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    assert from_tensors(*(tensor.float() for tensor in _tensors()))[0].precision == ("tf32" if allowed else "ieee")
    assert from_tensors(*_tensors())[0].precision == "ieee"


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"q": (4, 5, 64)}, ["q must have 4 dimensions", "(4, 5, 64)", "unsqueeze"]),
        ({"v": (1, 2, 2, 7, 32)}, ["v must have 4 dimensions", "(1, 2, 2, 7, 32)"]),
        ({"k": (3, 2, 7, 64)}, ["batch", "2, 3 and 2"]),
        ({"k": (2, 4, 7, 64)}, ["heads", "4 and 2"]),
        ({"k": (2, 2, 8, 64)}, ["length", "8 and 7"]),
        ({"k": (2, 2, 7, 32)}, ["head_dim", "q 64, k 32"]),
        ({"q": (2, 4, 5, 0), "k": (2, 2, 7, 0)}, ["head dims must be at least 1", "q 0, k 0"]),
        ({"v": (2, 2, 7, 0)}, ["head dims must be at least 1", "v 0"]),
        ({"q": (2, 4, 5, 257), "k": (2, 2, 7, 257)}, ["1 <= head_dim <= 256", "257"]),
        ({"v": (2, 2, 7, 257)}, ["1 <= head_dim_v <= 256", "257"]),
        ({"q": (2, 33, 5, 64)}, ["heads must be a multiple of kv_heads", "heads=33, kv_heads=2"]),
        ({"q": (2, 3, 5, 64)}, ["heads must be a multiple of kv_heads", "heads=3, kv_heads=2"]),
        ({"q": (2, 1, 5, 64)}, ["heads=1, kv_heads=2"]),
        ({"k": (2, 0, 7, 64), "v": (2, 0, 7, 32)}, ["heads=4, kv_heads=0"]),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        from_tensors(*_tensors(**shapes))
    assert isinstance(error.value, ValueError)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_dtypes_that_do_not_fit() -> None:
    q, k, v = _tensors()
    with pytest.raises(InputError, match=r"share one dtype, but got q torch\.float16, k torch\.bfloat16"):
        from_tensors(q, k.bfloat16(), v)
    for dtype in (torch.float64, torch.int32, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(InputError, match=f"dtype must be one of .*, but got {dtype}"):
            from_tensors(q.to(dtype), k.to(dtype), v.to(dtype))


def test_devices_that_do_not_fit() -> None:
    q, k, v = _tensors()
    with pytest.raises(InputError, match="share one device, but got q cpu, k meta, v meta"):
        from_tensors(torch.empty_like(q, device="cpu"), k, v)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor(name: str) -> None:
    named: dict[str, object] = dict(zip("qkv", _tensors(), strict=True))
    named[name] = [[1.0]]
    with pytest.raises(InputError, match=f"{name} must be a torch.Tensor, but got list"):
        from_tensors(**named)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["bhds", "BHSD", "", None, 4])
def test_unknown_layouts(layout: object) -> None:
    with pytest.raises(InputError, match="layout must be 'bhsd' or 'bshd'"):
        from_tensors(*_tensors(), layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "causal"),
    [(False, "none"), (True, "bottom_right"), ("bottom_right", "bottom_right"), ("top_left", "top_left")],
)
def test_causal_is_named(value: object, causal: Causal) -> None:
    assert causal_from(value) == causal
    assert from_tensors(*_tensors(), causal=value)[0].causal == causal


@pytest.mark.parametrize("value", ["upper", "none", "", None, 0, 1, 2.0, [True]])
def test_unknown_causal(value: object) -> None:
    with pytest.raises(InputError, match=r"causal must be False, True, 'bottom_right' or 'top_left'"):
        from_tensors(*_tensors(), causal=value)


@pytest.mark.parametrize("scale", [None, 1, 1.0, 1e-3, 0.0, -0.5, 1e-30])
def test_finite_scales(scale: float | None) -> None:
    check_scale(scale)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, True, "1", torch.tensor(1.0), 1j])
def test_scales_that_are_no_finite_number(scale: object) -> None:
    with pytest.raises(InputError, match="scale must be None or a finite number, but got"):
        check_scale(scale)


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
        ("head_dim", 257),
        ("head_dim", 64.0),
        ("head_dim", True),
        ("head_dim_v", 0),
        ("head_dim_v", 257),
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
    n = 2**31 - 1
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
