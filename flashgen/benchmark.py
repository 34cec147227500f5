"""How long a call takes: median, spread and samples, each with a cold L2."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from flashgen.cases import mod_tensors
from flashgen.descales import Descales, descales_from
from flashgen.features import EXPRESSIONS
from flashgen.modifiers import Modifiers, Options, modifiers_from
from flashgen.problem import Problem
from flashgen.spec import KV_DTYPES, TORCH_DTYPES, Spec

MIN_SAMPLES = 5
_Call = TypeVar("_Call", bound=Callable[[], object])


@dataclass(frozen=True)
class Measurement:
    """Times of one kernel on one problem, in microseconds.

    Attributes:
        median_us: median of the samples.
        spread_us: half the distance between the 25th and 75th percentile.
        samples: how many there are.
        eager_us: from one call to the next where each is made from Python; None where the median is that of such calls.
    """

    median_us: float
    spread_us: float
    samples: int
    eager_us: float | None = None

    @staticmethod
    def of(times_us: Sequence[float]) -> Measurement:
        """Summarise at least two samples."""
        low, _, high = statistics.quantiles(times_us, n=4)
        return Measurement(statistics.median(times_us), (high - low) / 2, len(times_us))

    @staticmethod
    def together(several: Sequence[Measurement]) -> Measurement:
        """Of several problems the geometric mean, whose relative error is that of a mean of independent ones."""
        median = geometric_mean([each.median_us for each in several])
        spread = math.hypot(*(each.spread_us / each.median_us for each in several)) / len(several)
        return Measurement(median, spread * median, min(each.samples for each in several))

    def with_eager(self, eager_us: float | None) -> Measurement:
        return replace(self, eager_us=eager_us)


def geometric_mean(values: Sequence[float]) -> float:
    """Of one value, that value."""
    return float(math.prod(values) ** (1 / len(values)))


def sample(call: Callable[[], object], *, warmup_ms: int = 10, repeat_ms: int = 30) -> list[float]:
    """Times of single calls in microseconds, by CUDA events, the L2 cache overwritten before each."""
    from triton.testing import do_bench

    times: list[float] = []
    # A slow call fits into the time once or not at all; no median without a few samples.
    while len(times) < MIN_SAMPLES:
        times += do_bench(call, warmup=warmup_ms, rep=repeat_ms, return_mode="all")
    return [1000.0 * time for time in times]


def balanced_orders(count: int) -> list[list[int]]:
    """Orders in which each of `count` subjects directly follows each other one equally often.

    As many orders as subjects, twice as many of an odd number (Williams 1949, designs balanced for residual effects).
    """
    zigzag = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(count)]
    orders = [[(place + shift) % count for place in zigzag] for shift in range(count)]
    return orders + [order[::-1] for order in orders] if count % 2 and count > 1 else orders


def interleaved(
    calls: Mapping[str, _Call],
    *,
    rounds: int | None = None,
    seed: int = 0,
    repeat_ms: int = 30,
    take: Callable[..., list[float]] | None = None,
) -> dict[str, Measurement]:
    """Measure several calls in turns, in rounds of other orders; as many as the balanced orders are, if not said.

    `take`: measures one of them, as `sample`, which does where nothing is said.

    A kernel leaves its successor a hot or a cool GPU. Of two runs on an H200, each with three orders for all problems,
    one had a peer follow slower kernels only: it was 6 % faster there, where the others stayed within 2 %.
    """
    chance = random.Random(seed)
    names = list(calls)
    chance.shuffle(names)
    orders = balanced_orders(len(names))
    times: dict[str, list[float]] = {name: [] for name in calls}
    deck: list[list[int]] = []
    for _ in range(len(orders) if rounds is None else rounds):
        if not deck:
            deck = orders.copy()
            chance.shuffle(deck)
        for place in deck.pop():
            times[names[place]] += (take or sample)(calls[names[place]], repeat_ms=repeat_ms)
    return {name: Measurement.of(values) for name, values in times.items()}


def inputs(spec: Spec, problem: Problem, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random contiguous q, k, v of a problem; never zeros, which run faster than real data (13 % seen on an H200)."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = TORCH_DTYPES[spec.dtype]

    def draw(heads: int, seq: int, width: int) -> torch.Tensor:
        drawn = torch.float32 if spec.dtype == "fp8" else dtype
        return torch.randn(problem.batch, heads, seq, width, device=device, dtype=drawn, generator=generator).to(dtype)

    return (
        draw(problem.heads, problem.seq_q, spec.head_dim),
        draw(problem.kv_heads, problem.seq_kv, spec.head_dim),
        draw(problem.kv_heads, problem.seq_kv, spec.head_dim_v),
    )


def usual_modifiers(spec: Spec, problem: Problem, q: torch.Tensor) -> Modifiers:
    """`usual_options` as kernels take them."""
    sizes = (problem.batch, problem.heads, problem.seq_q, problem.seq_kv)
    options = usual_options(spec, problem, q)
    options |= {name: getattr(spec, name) for name in EXPRESSIONS if name in spec.features}
    tables = mod_tensors(spec, q.device, torch.Generator().manual_seed(1))
    found = modifiers_from(sizes, q, Options(**options, mod_tensors=tables))
    if spec.dtype != "fp8":
        return found
    shape = {"tensor": (), "head": (1, 1), "block": (1, 1, 1)}[spec.descale]
    one = 1.0 if spec.descale == "tensor" else torch.ones(shape, device=q.device)
    heads, lengths = (problem.batch, problem.heads, problem.kv_heads), (problem.seq_q, problem.seq_kv)
    return found._replace(descales=descales_from(heads, lengths, q, Descales(one, one, one)))


def usual_options(spec: Spec, problem: Problem, q: torch.Tensor) -> dict[str, Any]:
    """What is timed where a spec has features, as `attention` takes it: values of the usual sizes, for this q.

    A window of 1,024 keys, four documents in a row, one bias and one mask for all heads, a tenth dropped.
    """
    generator = torch.Generator(q.device).manual_seed(1)
    scores = problem.seq_q, problem.seq_kv

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=q.device, generator=generator)

    def documents(length: int) -> torch.Tensor:
        ids = torch.arange(length, device=q.device) * 4 // max(length, 1)
        return ids.expand(problem.batch, length)

    options: dict[str, Any] = {}
    if spec.softcap:
        options["softcap"] = 50.0
    if spec.alibi:
        options["alibi_slopes"] = draw(problem.heads).abs() * 0.1
    if spec.bias != "none":
        options["bias"] = draw(*scores).to(TORCH_DTYPES[spec.bias])
    if spec.window:
        options["window"] = (1023, 1023)
    if spec.mask:
        options["mask"] = draw(*scores) < 2.0
    if spec.segments:
        options |= {"segment_ids_q": documents(problem.seq_q), "segment_ids_kv": documents(problem.seq_kv)}
    if spec.dropout:
        options |= {"dropout_p": 0.1, "dropout_seed": torch.ones(2, dtype=torch.int64, device=q.device)}
    if spec.sinks:
        options["sinks"] = draw(problem.heads)
    return options


def flops(spec: Spec, problem: Problem, pairs: int | None = None) -> float:
    """Floating-point operations of the products, masked pairs not counted.

    Of a backward those of the five that the math needs; recomputing some more often is no merit.

    Args:
        pairs: how many pairs of row and key are seen, over batch and heads, where more than `causal` hides some.
    """
    d, dv = spec.head_dim, spec.head_dim_v
    width = 3 * d + 2 * dv if spec.op == "backward" else d + dv
    return 2.0 * (problem.visible_pairs(spec.causal) if pairs is None else pairs) * width


def kv_bytes(spec: Spec, problem: Problem) -> int:
    """Of the keys and values of a problem: what a decode has to read."""
    each = (spec.head_dim + spec.head_dim_v) * KV_DTYPES[spec.kv_dtype].itemsize
    return problem.batch * problem.kv_heads * problem.seq_kv * each


def extra_memory(call: Callable[[], object]) -> int:
    """Peak memory of a call beyond what is allocated before it, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
