"""Inputs on which attention kernels have broken: sizes, and tensors with values and layouts of every kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.spec import TORCH_DTYPES, Problem, Spec


@dataclass(frozen=True)
class Case:
    """One input on which kernels have broken.

    Attributes:
        name: what it is about.
        problem: its sizes.
        magnitude: standard deviation of q; scores grow with it.
        strided: q, k, v and o are each a view of another memory order with NaN in the gaps.
    """

    name: str
    problem: Problem
    magnitude: float = 1.0
    strided: bool = False


# Lengths around 64 and 128 leave a tail in every block size; seq_q > seq_kv has rows that see nothing when causal.
CASES = (
    Case("tail", Problem(2, 2, 2, 113, 241)),
    Case("one row", Problem(2, 4, 2, 1, 129)),
    Case("empty rows", Problem(1, 3, 1, 200, 77)),
    Case("gqa, strided", Problem(2, 6, 2, 130, 190), strided=True),
    Case("large logits", Problem(1, 2, 2, 128, 256), magnitude=40.0),
    Case("long", Problem(1, 2, 1, 640, 1024)),
    # An error that compounds once per block of keys shows only over many of them.
    Case("many keys", Problem(1, 1, 1, 16, 16384), magnitude=4.0),
)
# Triton's interpreter takes about a second for 256 x 256.
SMALL_CASES = (
    Case("tail", Problem(1, 2, 2, 33, 49)),
    Case("one row", Problem(1, 2, 1, 1, 35)),
    Case("empty rows", Problem(1, 1, 1, 40, 17)),
    Case("gqa, strided", Problem(2, 3, 1, 19, 37), strided=True),
    Case("large logits", Problem(1, 1, 1, 32, 48), magnitude=40.0),
)


def tensors(spec: Spec, case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a case: fresh random values, [batch, heads, seq, head_dim], views of poisoned memory if strided."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sizes = case.problem
    dtype = TORCH_DTYPES[spec.dtype]

    def draw(heads: int, seq: int, width: int, order: tuple[int, ...], magnitude: float = 1.0) -> Tensor:
        values = torch.randn(sizes.batch, heads, seq, width, generator=generator) * magnitude
        values = values.to(device, dtype)
        return strided_like(values, order) if case.strided else values

    # Each tensor has a memory order of its own: equal layouts hide swapped strides.
    q = draw(sizes.heads, sizes.seq_q, spec.head_dim, (0, 2, 1, 3), case.magnitude)
    k = draw(sizes.kv_heads, sizes.seq_kv, spec.head_dim, (2, 0, 1, 3))
    v = draw(sizes.kv_heads, sizes.seq_kv, spec.head_dim_v, (1, 0, 2, 3))
    return q, k, v


def strided_like(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values as a view whose memory has the dimensions in `order`, with NaN between and after them."""
    shape = [values.shape[axis] for axis in order]
    shape[2] += 3
    shape[3] += 16
    buffer = torch.full(shape, torch.nan, dtype=values.dtype, device=values.device)
    back = [order.index(axis) for axis in range(4)]
    view = buffer.permute(back)[tuple(slice(0, n) for n in values.shape)]
    view.copy_(values)
    return view
