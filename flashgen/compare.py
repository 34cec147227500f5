"""flashgen beside what torch offers: time, speed and peak memory of one problem, in one run."""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen.api import attention
from flashgen.benchmark import Measurement, flops, inputs, interleaved
from flashgen.errors import InputError, did_you_mean
from flashgen.reference import plain_attention
from flashgen.spec import Problem, Spec

Call = Callable[[], object]
Forward = Callable[[], Tensor]
Work = Literal["forward", "backward", "training"]


@dataclass(frozen=True)
class Row:
    """One implementation on one problem.

    Attributes:
        spec: what the forward computes.
        work: what was timed: the forward, the gradients of q, k and v after it, or both.
        name: a key of PEERS.
        measurement: its time, or None when it could not run.
        tflops: 1e12 floating-point operations a second; masked pairs are not counted.
        extra_bytes: peak memory beyond inputs, in bytes.
        failure: why it could not run.
    """

    spec: Spec
    problem: Problem
    work: Work
    name: str
    measurement: Measurement | None
    tflops: float | None
    extra_bytes: int | None
    failure: str | None

    @property
    def label(self) -> str:
        """What a table calls its line."""
        return self.spec.slug if self.work == "forward" else f"{self.work} {self.spec.slug}"


def _flashgen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
    def call() -> Tensor:
        o = attention(q, k, v, causal=causal)
        assert isinstance(o, Tensor)
        return o

    return call


def _sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, bool], Forward]:
    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
        grouped = q.shape[1] != k.shape[1]

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return call

    return make


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Beyond the limit torch.compile silently runs the unfused form.
    torch._dynamo.config.recompile_limit = 1000
    # Donated buffers allow one backward per forward; here one forward is differentiated many times.
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, q.shape[2], k.shape[2], device="cuda")
    grouped = q.shape[1] != k.shape[1]
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
    return lambda: plain_attention(q, k, v, causal="bottom_right" if causal else "none")[0]


def _fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
    flash_attn_func = _imported("fa3_fwd_interface", "flash_attn_interface").flash_attn_func
    rows_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    return lambda: flash_attn_func(*rows_first, causal=causal)


def _imported(*names: str) -> Any:
    """The first of these modules that is installed.

    Raises:
        RuntimeError: none is.
    """
    for name in names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise RuntimeError(f"not installed: {' or '.join(names)}")


PEERS: Mapping[str, Callable[[Tensor, Tensor, Tensor, bool], Forward]] = {
    "flashgen": _flashgen,
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
    "fa3": _fa3,
    "plain": _plain,
}


def compare(spec: Spec, problem: Problem, names: tuple[str, ...], rounds: int = 3, work: Work = "forward") -> list[Row]:
    """Measure implementations on one problem, interleaved; one that fails or runs out of memory is a row that says so.

    Args:
        spec: what the forward computes; causal alignments coincide only where seq_q = seq_kv, so that must hold.
        problem: the sizes.
        names: keys of PEERS.
        rounds: shuffled rounds of measurement.
        work: what is timed.

    Raises:
        InputError: an unknown name, or causal with seq_q != seq_kv.
    """
    for name in names:
        if name not in PEERS:
            raise InputError(f"no implementation is called {name!r}. {did_you_mean(name, PEERS)}")
    if spec.causal != "none" and problem.seq_q != problem.seq_kv:
        raise InputError(
            f"causal peers agree only when seq_q equals seq_kv, but got {problem.seq_q}, {problem.seq_kv}."
        )
    q, k, v = (tensor.requires_grad_(work != "forward") for tensor in inputs(spec, problem, "cuda"))
    calls: dict[str, Call] = {}
    memory: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            forward = PEERS[name](q, k, v, spec.causal != "none")
            call = _timed(forward, (q, k, v), work)
            call()
            # Of gradients with the forward before them: what that keeps is theirs.
            memory[name] = _extra_memory(call if work == "forward" else _timed(forward, (q, k, v), "training"))
            calls[name] = call
        except torch.OutOfMemoryError:
            failures[name] = "out of memory"
        except RuntimeError as error:  # a peer may refuse a shape or dtype; its reason is its row
            failures[name] = str(error).strip().splitlines()[0][:200]
        torch.cuda.empty_cache()
    times = interleaved(calls, rounds=rounds)
    total = _flops(spec, problem, work)
    return [
        Row(spec, problem, work, name, times[name], total / times[name].median_us / 1e6, memory[name], None)
        if name in times
        else Row(spec, problem, work, name, None, None, None, failures[name])
        for name in names
    ]


def _timed(forward: Forward, inputs: tuple[Tensor, ...], work: Work) -> Call:
    """What is timed of one implementation; the gradient of the output is random, as in training."""
    if work == "forward":
        return torch.no_grad()(forward)
    o = forward()
    do = torch.randn_like(o)
    if work == "training":
        return lambda: torch.autograd.grad(forward(), inputs, do)
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def _flops(spec: Spec, problem: Problem, work: Work) -> float:
    forward, backward = flops(spec, problem), flops(replace(spec, op="backward"), problem)
    return {"forward": forward, "backward": backward, "training": forward + backward}[work]


def _extra_memory(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class HostCost:
    """CPU time of one eager call on a tiny problem, microseconds (median of the repeats)."""

    flashgen_us: float
    sdpa_us: float


def host_cost(calls: int = 600, repeats: int = 7) -> HostCost:
    """What calling costs before the GPU has anything to do: batch 1, one head, 64 tokens, head_dim 64, bf16."""
    q, k, v = inputs(Spec(head_dim=64, head_dim_v=64), Problem(1, 1, 1, 64, 64), "cuda")
    subjects: dict[str, Call] = {
        "flashgen": lambda: attention(q, k, v),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
    }
    times: dict[str, list[float]] = {name: [] for name in subjects}
    with torch.no_grad():
        for _ in range(repeats):
            for name, call in subjects.items():
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                times[name].append((time.perf_counter() - start) / calls * 1e6)
                torch.cuda.synchronize()
    return HostCost(statistics.median(times["flashgen"]), statistics.median(times["sdpa"]))
