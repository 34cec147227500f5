"""Backward families whose blocks wait for each other or for copies: where a race or a hang would show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flashgen.benchmark import inputs
from flashgen.compile import module_of
from flashgen.families import FAMILIES, Family, Variant
from flashgen.hardware import current_gpu
from flashgen.launch import bind, workspace_size
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Causal, Spec

BY_HAND = [family for family in FAMILIES.values() if family.op == "backward" and family.by_hand]
REPEATS = 1000

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="they are for sm_90"
    ),
    pytest.mark.parametrize("family", BY_HAND, ids=lambda family: family.name),
]
both_masks = pytest.mark.parametrize("causal", ["none", "bottom_right"])

Call = tuple[Callable[[], None], list[Tensor]]


def variants(family: Family, head_dim: int, causal: Causal) -> list[Variant]:
    """The default and, where blocks may start at rows of their own, the default the other way round."""
    spec, gpu = Spec("backward", head_dim, head_dim, "bf16", causal), current_gpu()
    config = family.default(spec, gpu)
    if rejection := family.refuses(spec, config, gpu):
        pytest.skip(f"{family.name} refuses {spec.slug}: {rejection.reason}")
    found = [config]
    if "rotate" in family.choices:
        other = Config(**{**config, "rotate": 1 - config["rotate"]})
        found += [other] if family.refuses(spec, other, gpu) is None else []
    return [Variant(family, spec, each) for each in found]


def call(variant: Variant, problem: Problem, seed: int = 0) -> Call:
    """A bound launch and its three gradients, which are NaN before it; o and the log-sum-exp are the forward's own."""
    spec = variant.spec
    q, k, v = inputs(spec, problem, "cuda", seed)
    o, lse = torch.ops.flashgen.forward(q, k, v, spec.causal, None, "bhsd", True, None)
    do = torch.randn_like(o)
    results = [torch.full_like(each, torch.nan) for each in (q, k, v)]
    bound = bind(variant, q, k, v, o, do, *results)
    size = workspace_size(variant, q)

    def run() -> None:
        workspace = torch.full((size,), torch.nan, device="cuda")
        bound(q, k, v, o, lse, do, None, *results, workspace, spec.head_dim**-0.5)

    return run, results


def poisoned(results: list[Tensor]) -> None:
    for each in results:
        each.fill_(torch.nan)


@both_masks
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_thousand_launches_give_the_same_bits(family: Family, head_dim: int, causal: Causal) -> None:
    """At a size that fills the GPU and ends in ragged tiles: a race shows where blocks compete."""
    for variant in variants(family, head_dim, causal):
        heads = 2048 // head_dim
        run, results = call(variant, Problem(2, heads, heads // 2, 3900, 3900))
        run()
        first = [each.clone() for each in results]
        assert all(each.isfinite().all() for each in first)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(REPEATS):
            poisoned(results)
            run()
            for one, other in zip(results, first, strict=True):
                differing += (one != other).any()
        assert differing.item() == 0, variant.slug


@triton.jit
def occupy(OUT, rounds: tl.int32):
    """Stay on a multiprocessor for a while."""
    x = tl.program_id(0) + tl.arange(0, 128).to(tl.float32)
    for _ in range(rounds):
        x = x * 0.999 + 0.5
    tl.store(OUT + tl.program_id(0) * 128 + tl.arange(0, 128), x)


@both_masks
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("free", [1, 3])
def test_beside_a_kernel_that_holds_most_multiprocessors(
    family: Family, head_dim: int, causal: Causal, free: int
) -> None:
    """Whoever waits for a block that finds no room would wait until the other kernel ends, or for ever."""
    room = torch.cuda.get_device_properties("cuda").multi_processor_count
    out = torch.empty((room - free) * 128, device="cuda")
    for variant in variants(family, head_dim, causal):
        run, results = call(variant, Problem(1, 4, 2, 2000, 2000))
        run()
        first = [each.clone() for each in results]
        poisoned(results)
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            occupy[(room - free,)](out, 50_000_000)
        run()
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, first)), variant.slug


@both_masks
def test_on_two_streams_at_once(family: Family, causal: Causal) -> None:
    for variant in variants(family, 128, causal):
        problem = Problem(1, 16, 16, 2000, 2000)
        calls = [call(variant, problem, seed) for seed in (0, 1)]
        expected = []
        for run, results in calls:
            run()
            expected.append([each.clone() for each in results])
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in calls]
        for _ in range(30):
            for stream, (run, _) in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    run()
        torch.cuda.synchronize()
        for (_, results), first in zip(calls, expected, strict=True):
            assert all(map(torch.equal, results, first)), variant.slug


@both_masks
@pytest.mark.parametrize("seq", [16_384, 20_480, 131_072])
def test_long_sequences(family: Family, seq: int, causal: Causal) -> None:
    """More blocks of keys than multiprocessors; some rows and keys against float64."""
    for variant in variants(family, 128, causal):
        q, k, v = inputs(variant.spec, Problem(1, 1, 1, seq, seq), "cuda", 0)
        o, lse = torch.ops.flashgen.forward(q, k, v, causal, None, "bhsd", True, None)
        do = torch.randn_like(o)
        results = [torch.full_like(each, torch.nan) for each in (q, k, v)]
        bound = bind(variant, q, k, v, o, do, *results)
        workspace = torch.full((workspace_size(variant, q),), torch.nan, device="cuda")
        bound(q, k, v, o, lse, do, None, *results, workspace, 128**-0.5)
        # Not the first keys: the rounded output, from which delta comes, is felt most where few keys are seen.
        some = torch.tensor([seq // 3, seq // 2 + 63, seq - 129], device="cuda")
        for mine, exact in zip(results, _some_gradients(q, k, v, do, causal, some), strict=True):
            assert mine.isfinite().all()
            assert (mine[0, 0, some].double() - exact).abs().max() <= 2**-6 * exact.abs().max(), variant.slug


def _some_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: Causal, some: Tensor) -> tuple[Tensor, ...]:
    """dq of some rows, dk and dv of some keys, in float64, a few thousand rows at a time."""
    q, k, v, do = (each[0, 0].double() for each in (q, k, v, do))
    numbers = torch.arange(q.shape[0], device="cuda")
    dq, dk, dv = (torch.zeros(len(some), 128, device="cuda", dtype=torch.float64) for _ in range(3))

    def probabilities(rows: Tensor) -> tuple[Tensor, Tensor]:
        """P and dS of these rows."""
        s = q[rows] @ k.T * 128**-0.5
        if causal != "none":
            s = s.masked_fill(numbers[None, :] > rows[:, None], -torch.inf)
        p = s.softmax(1)
        dp = do[rows] @ v.T
        return p, p * (dp - (p * dp).sum(1, keepdim=True))

    dq = probabilities(some)[1] @ k * 128**-0.5
    for rows in numbers.split(2048):
        p, ds = probabilities(rows)
        dv += p[:, some].T @ do[rows]
        dk += ds[:, some].T @ q[rows] * 128**-0.5
    return dq, dk, dv


def test_a_small_size_against_float64_beside_the_large_ones(family: Family) -> None:
    """The sizes above are compared with themselves; this one with autograd, also as the file launches itself."""
    for variant in variants(family, 128, "bottom_right"):
        q, k, v = (
            each.double().requires_grad_() for each in inputs(variant.spec, Problem(1, 2, 1, 300, 500), "cuda", 0)
        )
        o, lse = plain_attention(q, k, v, causal="bottom_right")
        do = torch.randn_like(o).bfloat16()
        exact = torch.autograd.grad(o, (q, k, v), do.double())
        low = [each.detach().bfloat16() for each in (q, k, v, o)]
        results = [torch.full_like(each, torch.nan) for each in low[:3]]
        for launch in (bind(variant, *low, do, *results), module_of(variant).launch):
            poisoned(results)
            workspace = torch.full((workspace_size(variant, low[0]),), torch.nan, device="cuda")
            launch(*low, lse.detach().float(), do, None, *results, workspace, 128**-0.5)
            for mine, wanted in zip(results, exact, strict=True):
                assert (mine.double() - wanted).abs().max() <= 2**-6 * wanted.abs().max(), variant.slug


@both_masks
def test_a_replayed_graph_gives_the_same_bits(family: Family, causal: Causal) -> None:
    """Tickets and locks are zero again at each replay, and all programs of a cooperative launch run at once."""
    for variant in variants(family, 128, causal):
        run, results = call(variant, Problem(1, 8, 8, 2000, 2000))
        run()
        first = [each.clone() for each in results]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(3):
            poisoned(results)
            graph.replay()
            assert all(map(torch.equal, results, first)), variant.slug


def test_on_a_part_of_the_multiprocessors(family: Family) -> None:
    """As under MPS: what would need them all goes on in another order, and nobody waits for blocks without room."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts", reason="torch 2.9 has no green contexts")
    part = green_contexts.GreenContext.create(16, 0)
    for variant in variants(family, 128, "none"):
        run, results = call(variant, Problem(1, 8, 8, 2000, 2000))
        run()
        torch.cuda.synchronize()
        expected = [each.clone() for each in results]
        poisoned(results)
        part.set_context()
        try:
            run()
            torch.cuda.synchronize()
        finally:
            part.pop_context()
        # Another order of sums has other last bits.
        for each, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(each, exact, rtol=0.02, atol=0.005)
