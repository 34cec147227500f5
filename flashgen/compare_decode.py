"""flashgen beside others on rows over a cache of keys: times in CUDA graphs and eagerly, and how much was read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.benchmark import Measurement, extra_memory, interleaved, kv_bytes
from flashgen.check import FLOOR, max_error
from flashgen.decode_inputs import served_inputs
from flashgen.decode_peers import DECODE_PEERS, Cached
from flashgen.errors import InputError, UnsupportedError, did_you_mean
from flashgen.graphs import Replayed, copies_of, eager_us, in_turns
from flashgen.problem import Problem
from flashgen.reference import plain_attention
from flashgen.spec import Spec

DEVICE = "cuda"
# heads, kv_heads, head_dim, batch, keys: small caches and large ones, without and with groups.
TABLE = (
    (32, 8, 128, 1, 4096), (32, 8, 128, 1, 65536), (32, 8, 128, 16, 4096), (32, 8, 128, 16, 32768),
    (32, 8, 128, 64, 8192), (32, 32, 128, 16, 4096), (64, 8, 64, 1, 4096), (64, 8, 64, 64, 8192),
)  # fmt: skip


@dataclass(frozen=True)
class DecodeRow:
    """One implementation on one problem.

    Attributes:
        spec: what is computed, of a contiguous cache.
        name: a key of flashgen.decode_peers.DECODE_PEERS.
        measurement: its time in a CUDA graph and, as its eager_us, from Python; None when it could not run.
        gbs: GB/s of keys and values in the graph.
        share: of the bandwidth.
        extra_bytes: peak memory of an eager call beyond its inputs.
        failure: why it could not run, or how wrong it was.
        caches: how many were read in turns.
    """

    spec: Spec
    problem: Problem
    name: str
    measurement: Measurement | None
    gbs: float | None
    share: float | None
    extra_bytes: int | None
    failure: str | None
    caches: int


def compare_decode(
    spec: Spec, problem: Problem, names: tuple[str, ...], bandwidth: float, rounds: int | None = None
) -> list[DecodeRow]:
    """Measure implementations on one problem, interleaved, each as a CUDA graph; who is wrong is not timed.

    A launch reads a cache that no launch before it has left in L2: the launches of a graph take several in turns.

    Args:
        spec: of op "decode", without features.
        problem: seq_kv is how many keys each sequence has; page_size of the pages that "paged" reads.
        names: keys of DECODE_PEERS.
        bandwidth: GB/s, what shares are of.
        rounds: of measurement; None for as many as it takes that each follows each other one equally often.

    Raises:
        InputError: an unknown name.
    """
    for name in names:
        if name not in DECODE_PEERS:
            raise InputError(f"no implementation is called {name!r}. {did_you_mean(name, DECODE_PEERS)}")
    size = kv_bytes(spec, problem)
    calls = _caches(spec, problem, copies_of(size))
    truth = _truth(calls[0])
    graphs: dict[str, Replayed] = {}
    eager: dict[str, tuple[float, int]] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            runs = [DECODE_PEERS[name](call) for call in calls]
            wrong = _refuted(runs[0], truth)
            if wrong is None:
                launches = in_turns(runs, size)
                eager[name] = eager_us(launches), extra_memory(runs[0])
                graphs[name] = Replayed(launches)
            else:
                failures[name] = wrong
        except torch.OutOfMemoryError:
            failures[name] = "out of memory"
        except (RuntimeError, AssertionError, UnsupportedError) as error:
            # A peer may refuse a shape or dtype; its reason is its row.
            failures[name] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    times = interleaved(graphs, rounds=rounds, take=Replayed.sample) if graphs else {}
    rows = []
    for name in names:
        took = times.get(name)
        us, memory = eager.get(name, (None, None))
        gbs = None if took is None else size / took.median_us / 1e3
        found = None if took is None else took.with_eager(us)
        share = None if gbs is None else gbs / bandwidth
        rows.append(DecodeRow(spec, problem, name, found, gbs, share, memory, failures.get(name), len(calls)))
    return rows


def _caches(spec: Spec, problem: Problem, count: int) -> list[Cached]:
    """So many calls that differ in their caches' memory only."""
    given = served_inputs(spec, problem, DEVICE)
    q, k, v = (given[name].transpose(1, 2) for name in ("q", "k", "v"))
    pages = _in_pages(k, v, problem) if problem.page_size else None
    call = Cached(q, k, v, given["cache_seqlens"], pages, spec.causal != "none")
    calls = [call]
    for _ in range(count - 1):
        again = None if pages is None else (pages[0].clone(), pages[1].clone(), pages[2])
        calls.append(call._replace(k=k.clone(), v=v.clone(), pages=again))
    return calls


def _in_pages(k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The same keys and values in pages in random order, and the table."""
    batch, size = problem.batch, problem.page_size
    each = math.ceil(problem.seq_kv / size)
    generator = torch.Generator(k.device).manual_seed(2)
    order = torch.randperm(batch * each, generator=generator, device=k.device)

    def paged(cache: Tensor) -> Tensor:
        found = cache.new_zeros(batch * each, size, *cache.shape[2:])
        for sequence, places in zip(cache, order.reshape(batch, each), strict=True):
            padded = torch.zeros(each * size, *cache.shape[2:], dtype=cache.dtype, device=cache.device)
            padded[: len(sequence)] = sequence
            found[places] = padded.reshape(each, size, *cache.shape[2:])
        return found

    return paged(k), paged(v), order.reshape(batch, each).to(torch.int32)


# Of the batch, the first and the last, which what counts programs wrongly would miss.
def _some(batch: int) -> list[int]:
    return sorted({0, batch - 1})


def _truth(call: Cached) -> list[tuple[int, Tensor, float]]:
    """Of some sequences the output in float64, [seq_q, heads, head_dim_v], and what it may be missed by."""
    found = []
    for index in _some(len(call.q)):
        q, k, v = (each[index : index + 1].transpose(1, 2) for each in (call.q, call.k, call.v))
        causal = "bottom_right" if call.causal else "none"
        exact = plain_attention(q.double(), k.double(), v.double(), causal=causal)[0]
        plain = plain_attention(q, k, v, causal=causal)[0]
        rounding = torch.finfo(q.dtype).eps * exact.abs().max().item()
        # As flashgen.agreement: few rows may be lucky.
        allowed = 2 * max(max_error(plain, exact), rounding) + FLOOR
        found.append((index, exact[0].transpose(0, 1), allowed))
    return found


def _refuted(run: Callable[[], Tensor], truth: list[tuple[int, Tensor, float]]) -> str | None:
    """Why what an implementation computes is wrong, or None."""
    o = run()
    for index, expected, allowed in truth:
        error = max_error(o[index], expected)
        if not error <= allowed:
            return f"wrong: output of sequence {index} is off by {error:.3g}, allowed {allowed:.3g}"
    return None
