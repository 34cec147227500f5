"""What is timed of attention over caches, and how much work a call is on a GPU that is not here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.benchmark import kv_bytes, usual_modifiers
from flashgen.families import Variant
from flashgen.graphs import copies_of
from flashgen.hardware import Gpu
from flashgen.launch import laid_out, split_for
from flashgen.problem import Problem
from flashgen.spec import KV_DTYPES, TORCH_DTYPES, Spec

# Of caches that are timed; where nothing else is said.
PAGE_SIZE = 64


def served_inputs(spec: Spec, problem: Problem, device: str) -> dict[str, Any]:
    """What a launch takes by name, but for workspace and counters: full caches, pages in random order.

    Args:
        problem: seq_kv is how many keys every sequence has, new ones included, and can have.
    """
    page_size = problem.page_size or PAGE_SIZE
    generator = torch.Generator(device).manual_seed(0)
    batch, kv_heads, seq_q, seq_kv = problem.batch, problem.kv_heads, problem.seq_q, problem.seq_kv
    pages = -(-seq_kv // page_size)
    rows = (batch * pages, page_size) if spec.paged else (batch, seq_kv)

    def draw(first: int, seq: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        """[first, heads, seq, width], heads of a token side by side."""
        values = torch.empty(first, seq, heads, width, dtype=dtype, device=device)
        step = max(1, 2**28 // max(1, seq * heads * width))
        for start in range(0, first, step):
            part = values[start : start + step]
            drawn = torch.randn(part.shape, device=device, generator=generator)
            part.copy_((drawn * 40).clamp(-127, 127) if dtype == torch.int8 else drawn)
        return values.transpose(1, 2)

    kept = KV_DTYPES[spec.kv_dtype]
    widths = (spec.head_dim, spec.head_dim_v)
    q = draw(batch, seq_q, problem.heads, spec.head_dim, TORCH_DTYPES[spec.dtype])
    k, v = (draw(rows[0], rows[1], kv_heads, width, kept) for width in widths)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "scale": spec.head_dim**-0.5, "lse": lse}
    given["o"] = torch.empty(batch, seq_q, problem.heads, widths[1], dtype=q.dtype, device=device).transpose(1, 2)
    stored = seq_kv - seq_q if spec.appended else seq_kv
    given["cache_seqlens"] = torch.full((batch,), max(0, stored), dtype=torch.int32, device=device)
    if spec.paged:
        order = torch.randperm(batch * pages, device=device, generator=generator)
        given["block_table"] = order.reshape(batch, pages).to(torch.int32)
    if spec.appended:
        given["k_new"], given["v_new"] = (draw(batch, seq_q, kv_heads, width, kept) for width in widths)
    if spec.cache != "none":
        given |= dict.fromkeys(("descale_k", "descale_v"), _descale(spec, k))
    modifiers = usual_modifiers(spec.plain_of_cache, problem, q)
    names = [name for name in spec.plain_of_cache.modifiers if not name.startswith("descale")]
    given |= dict(zip(names, modifiers.arguments(spec.causal), strict=True))
    if spec.varlen:
        given |= _ragged(given, spec.appended)
    return given


def rotating_inputs(spec: Spec, problem: Problem, device: str) -> list[dict[str, Any]]:
    """The same several times, each with caches of its own, so that a launch finds in L2 nothing that another read."""
    given = served_inputs(spec, problem, device)
    others = range(copies_of(kv_bytes(spec, problem)) - 1)
    return [given, *({**given, "k": given["k"].clone(), "v": given["v"].clone()} for _ in others)]


def _descale(spec: Spec, k: Tensor) -> Tensor | float:
    if spec.descale == "tensor":
        return 0.05
    return torch.full(k.shape[: 2 if spec.descale == "head" else 3], 0.05, device=k.device)


def _ragged(given: dict[str, Any], appended: bool) -> dict[str, Any]:
    """The same rows as sequences of equal length behind each other."""
    batch, heads, seq_q, _ = given["q"].shape

    def view(tensor: Tensor) -> Tensor:
        tokens = tensor.transpose(1, 2).flatten(0, 1)
        shape = (batch, tensor.shape[1], seq_q, tensor.shape[3])
        return tokens.as_strided(shape, (0, tokens.stride(1), tokens.stride(0), 1))

    found: dict[str, Any] = {name: view(given[name]) for name in ("q", "o", *("k_new", "v_new") * appended)}
    device = given["q"].device
    found["cu_seqlens_q"] = torch.arange(0, batch * seq_q + 1, seq_q, dtype=torch.int32, device=device)
    return {**found, "total_q": batch * seq_q, "lse": torch.empty(heads, batch * seq_q, device=device)}


def as_split(variant: Variant, problem: Problem, gpu: Gpu) -> Problem:
    """A problem of another op that is as much work: each program's rows and keys as a sequence of one head."""
    sizes = {"q": (problem.heads, problem.seq_q), "k": (problem.kv_heads, problem.seq_kv)}
    of_one = {
        name: torch.empty(problem.batch, *size, variant.spec.head_dim, device="meta") for name, size in sizes.items()
    }
    like = {"block_table": torch.empty(problem.batch, 1, device="meta")}
    views = [{**of_one, **like}.get(name, of_one["k"]) for name in laid_out(variant.spec)]
    splits = split_for(variant, *views, multiprocessors=gpu.num_sms).splits
    rows = problem.seq_q * (problem.heads // max(1, problem.kv_heads))
    return Problem(
        problem.batch * splits, problem.kv_heads, problem.kv_heads, rows, max(1, -(-problem.seq_kv // splits))
    )
