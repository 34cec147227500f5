"""`hopper_fwd` where a race, a hang or a counter that is left over would show: many launches, streams, graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.benchmark import inputs
from flashgen.check import FLOOR, FORWARD_FACTOR, max_error
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import current_gpu
from flashgen.launch import bind
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Causal, Spec

FAMILY = FAMILIES["hopper_fwd"]
REPEATS = 1000

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="hopper_fwd is for sm_90"
)

Call = tuple[Callable[[], None], Tensor, Tensor]


def config(spec: Spec, schedule: int, consumers: int | None = None, pack: int = 0) -> Config:
    """The default with another schedule; with one consumer, as many blocks a multiprocessor as there is a choice of."""
    chosen = {**FAMILY.default(spec, current_gpu()), "schedule": schedule, "ahead": int(schedule > 0), "pack": pack}
    if consumers is not None:
        chosen["consumers"] = consumers
    if consumers == 1:
        chosen.update(resident=3 if spec.head_dim <= 64 else 2, block_kv=64)
    if FAMILY.refuses(spec, Config(**chosen), current_gpu()):
        chosen["ahead"] = 0
    return Config(**chosen)


def call(
    spec: Spec, problem: Problem, schedule: int, seed: int = 0, consumers: int | None = None, pack: int = 0
) -> Call:
    """A bound launch with its output and log-sum-exp, which are NaN before it."""
    q, k, v = inputs(spec, problem, "cuda", seed)
    o = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:3], torch.nan, device="cuda")
    chosen = config(spec, schedule, consumers, pack)
    bound = bind(Variant(FAMILY, spec, chosen), q, k, v, o)
    return lambda: bound(q, k, v, o, lse, spec.head_dim**-0.5), o, lse


@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize(
    ("head_dim", "consumers", "pack"),
    [(64, None, 0), (128, None, 0), (256, None, 0), (64, 1, 0), (128, 1, 0), (128, None, 1)],
)
def test_a_thousand_launches_give_the_same_bits(
    head_dim: int, consumers: int | None, pack: int, causal: Causal, schedule: int
) -> None:
    """At a size that fills the GPU and ends in ragged tiles: a race shows where blocks compete."""
    spec = Spec(head_dim=head_dim, head_dim_v=head_dim, dtype="bf16", causal=causal)
    heads = 2048 // head_dim
    problem = Problem(2, heads, heads // 4 if pack else heads, 1900, 1900)
    run, o, lse = call(spec, problem, schedule, consumers=consumers, pack=pack)
    run()
    first = o.clone(), lse.clone()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        o.fill_(torch.nan)
        run()
        differing += (o != first[0]).sum() + (lse != first[1]).sum()
    assert differing.item() == 0 and not o.isnan().any()


@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_the_timed_size_against_float64(causal: Causal, schedule: int) -> None:
    spec = Spec(dtype="bf16", causal=causal)
    problem = Problem(1, 4, 4, 8192, 8192)
    run, o, lse = call(spec, problem, schedule)
    run()
    for head in range(4):
        q, k, v = (each[:, head : head + 1] for each in inputs(spec, problem, "cuda"))
        plain, _ = plain_attention(q, k, v, causal=causal)
        true, true_lse = plain_attention(q.double(), k.double(), v.double(), causal=causal)
        assert max_error(o[:, head : head + 1], true) <= FORWARD_FACTOR * max_error(plain, true) + FLOOR
        assert max_error(lse[:, head : head + 1], true_lse) <= 1e-4


def test_two_streams_count_for_themselves() -> None:
    spec = Spec(dtype="bf16", causal="bottom_right")
    calls = [call(spec, Problem(1, 8, 8, seq, seq), 2, seed) for seed, seq in enumerate((2000, 700))]
    expected = []
    for run, o, _ in calls:
        run()
        expected.append(o.clone())
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _, (stream, (run, o, _)) in itertools.product(range(200), list(zip(streams, calls, strict=True))):
        with torch.cuda.stream(stream):
            o.fill_(torch.nan)
            run()
    torch.cuda.synchronize()
    assert [torch.equal(o, same) for (_, o, _), same in zip(calls, expected, strict=True)] == [True, True]


def test_a_graph_is_replayed_beside_eager_calls() -> None:
    """On another stream than it was captured on: it counts for itself."""
    spec = Spec(dtype="bf16", causal="bottom_right")
    run, o, _ = call(spec, Problem(2, 8, 8, 1000, 1000), 2)
    other, other_o, _ = call(spec, Problem(2, 8, 8, 1100, 1100), 2, seed=1)
    run()
    other()
    expected, other_expected = o.clone(), other_o.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
        run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(100):
        with torch.cuda.stream(stream):
            o.fill_(torch.nan)
            graph.replay()
        other_o.fill_(torch.nan)
        other()
    torch.cuda.synchronize()
    assert torch.equal(o, expected) and torch.equal(other_o, other_expected)


@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_lengths_around_every_edge(causal: Causal, schedule: int) -> None:
    """Tiles of 64 rows a consumer, blocks of 128 keys, diagonals that are no multiple of 64."""
    spec = Spec(head_dim=64, head_dim_v=64, dtype="bf16", causal=causal)
    lengths = (1, 63, 64, 65, 127, 128, 129, 191, 193, 320)
    for seq_q, seq_kv in itertools.product(lengths, lengths):
        assert_right(spec, Problem(1, 3, 1, seq_q, seq_kv), schedule)


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_lengths_around_the_edges_of_one_consumers_tiles(causal: Causal) -> None:
    spec = Spec(head_dim=64, head_dim_v=64, dtype="bf16", causal=causal)
    for seq_q, seq_kv in itertools.product((1, 63, 64, 65, 130), (1, 64, 65, 129)):
        assert_right(spec, Problem(2, 3, 1, seq_q, seq_kv), 2, consumers=1)


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_groups_of_heads_share_tiles(causal: Causal, consumers: int) -> None:
    """Rows that fill no tile, one and several, of groups that fit and of one that does not."""
    spec = Spec(dtype="bf16", causal=causal)
    for group, seq_q, seq_kv in itertools.product((2, 3, 4, 8), (1, 5, 64, 100), (70, 256)):
        assert_right(spec, Problem(2, 2 * group, 2, seq_q, seq_kv), 1, consumers=consumers, pack=1)


def assert_right(spec: Spec, problem: Problem, schedule: int, consumers: int | None = None, pack: int = 0) -> None:
    """Output and log-sum-exp of one launch against float64."""
    run, o, lse = call(spec, problem, schedule, consumers=consumers, pack=pack)
    run()
    q, k, v = inputs(spec, problem, "cuda")
    true, true_lse = plain_attention(q.double(), k.double(), v.double(), causal=spec.causal)
    plain, _ = plain_attention(q, k, v, causal=spec.causal)
    assert max_error(o, true) <= FORWARD_FACTOR * max_error(plain, true) + FLOOR, problem
    assert max_error(lse, true_lse) <= 1e-4, problem


def test_descriptors_follow_their_tensors() -> None:
    """They are remembered by address: other tensors have their own, one in a freed place is read as it is now."""
    q = [torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for one, other in itertools.product(q, q):
        for _ in range(2):
            o = flashgen.attention(one, other, one, family="hopper_fwd")
            true, _ = plain_attention(one.double(), other.double(), one.double())
            assert isinstance(o, Tensor) and max_error(o, true) < 2e-2
        del o
