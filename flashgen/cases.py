"""Inputs on which attention kernels have broken: sizes, and tensors with values and layouts of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.descales import BLOCK, Descales, descales_from
from flashgen.expressions.given import TYPES
from flashgen.modifiers import Modifiers, Options, modifiers_from
from flashgen.problem import Problem
from flashgen.spec import TORCH_DTYPES, Spec


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


def modifiers(spec: Spec, case: Case, device: str, like: Tensor, seed: int = 2) -> Modifiers:
    """Modifiers of every feature of the spec for a case; `like` is its q.

    A mask hides some rows as a whole and some whole blocks; segments are sorted, of lengths that fill no block, and the
    first one has no keys. In strided cases bias and mask are broadcast over batch and heads, and slopes over the batch.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    sizes = case.problem
    whole = (sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv)
    shape = (1, 1, sizes.seq_q, sizes.seq_kv) if case.strided else whole

    def ids(length: int, low: int) -> Tensor:
        starts = torch.rand(sizes.batch, length, generator=generator) < 0.03
        return (starts.cumsum(1) + low).to(device)

    slopes = torch.rand(sizes.heads if case.strided else (sizes.batch, sizes.heads), generator=generator) * 0.1
    bias = torch.randn(shape, generator=generator) * 2
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[..., ::5, :] = False
    mask[..., : sizes.seq_kv // 2] &= torch.rand(1, generator=generator) < 0.5
    given: dict[str, dict[str, object]] = {
        "softcap": {"softcap": 5.0},
        "alibi": {"alibi_slopes": slopes.to(device)},
        "bias": {"bias": bias.to(device, TORCH_DTYPES.get(spec.bias, torch.float32))},
        "window": {"window": (37, 11)},
        "mask": {"mask": mask.to(device)},
        "segments": {"segment_ids_q": ids(sizes.seq_q, 0), "segment_ids_kv": ids(sizes.seq_kv, 1)},
        # All 64 bits of the seed count.
        "dropout": {"dropout_p": 0.3, "dropout_seed": torch.tensor([-0x123456789ABCDEF, 0x89ABCDEF]).to(device)},
        "sinks": {"sinks": torch.randn(sizes.heads, generator=generator).to(device) * 3},
        "score_mod": {"score_mod": spec.score_mod},
        "mask_mod": {"mask_mod": spec.mask_mod},
    }
    options: dict[str, Any] = {"mod_tensors": mod_tensors(spec, device, generator)}
    for feature in spec.features:
        options |= given[feature]
    found = modifiers_from(whole, like, Options(**options))
    if spec.dtype != "fp8":
        return found
    return found._replace(descales=_descales(spec, case, like, generator))


def _descales(spec: Spec, case: Case, like: Tensor, generator: torch.Generator) -> Descales:
    """Descales around 1, not all in one memory order; some blocks of values have 0."""
    sizes = case.problem
    if spec.descale == "tensor":
        return Descales(0.7, 1.3, 3.0)
    drawn = []
    for heads, length in ((sizes.heads, sizes.seq_q), (sizes.kv_heads, sizes.seq_kv), (sizes.kv_heads, sizes.seq_kv)):
        shape = (sizes.batch, heads, -(-length // BLOCK))[: 2 if spec.descale == "head" else 3]
        order = torch.exp2(torch.randn(shape[::-1], generator=generator) * 0.5)
        drawn.append(order.permute(*reversed(range(len(shape)))))
    drawn[2][torch.rand(drawn[2].shape, generator=generator) < 0.1] = 0.0
    given = Descales(*(each.to(like.device) for each in drawn))
    return descales_from((sizes.batch, sizes.heads, sizes.kv_heads), (sizes.seq_q, sizes.seq_kv), like, given)


def mod_tensors(spec: Spec, device: str | torch.device, generator: torch.Generator) -> list[Tensor]:
    """What a spec's expressions read: 97 elements a dimension, whole numbers in runs from 0 on, as documents have."""
    found = []
    for name, rank in spec.tensors:
        shape = (97,) * rank
        if name.startswith(("fp", "bf")):
            values = torch.randn(shape, generator=generator)
        elif name == "bool":
            values = torch.rand(shape, generator=generator) < 0.7
        else:
            values = (torch.rand(shape, generator=generator) < 0.05).cumsum(-1)
        dtype = next(each for each, known in TYPES.items() if known == name)
        found.append(values.to(device, dtype))
    return found


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
