"""`hopper_bwd` in tests/gluon_simulator.py: right gradients, no hang and no race in many sizes and interleavings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gluon_simulator import Descriptor, Fault, Int32, Pointer, Program, load_text
from variants import hopper_backward

from flashgen.families import Variant
from flashgen.reference import plain_attention
from flashgen.render import render
from flashgen.spec import Causal, Spec

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
SCALE = 0.3
LAUNCHES = 6
# Launches in which a seeded bug must show.
BUG_LAUNCHES = 40
# How often a consumer reads each block that streams, by launch.
BOTH = {"q_desc": 2, "do_desc": 2, "workspace_desc": 1}
DK_ALONE = {"q_desc": 2, "do_desc": 1, "workspace_desc": 1}
DV_ALONE = {"q_desc": 1, "do_desc": 1, "workspace_desc": 1}
DQ = {"k_desc": 2, "v_desc": 1}


def _variant(causal: Causal, wide: bool, *numbers: int) -> Variant:
    """Narrow and padded heads, or ones whose sums are made one after the other."""
    return hopper_backward(Spec("backward", *((16, 256) if wide else (16, 8)), "bf16", causal), *numbers)


def _workspace(o: np.ndarray, lse: np.ndarray, do: np.ndarray, dlse: np.ndarray | None) -> np.ndarray:
    """What the kernel `delta` leaves, [batch * heads * 2, padded rows]."""
    batch, heads, seq_q, _ = o.shape
    filled = np.zeros((batch * heads, 2, -(-seq_q // 128) * 128), np.float32)
    filled[:, 0] = np.inf
    base_2 = lse * 1.4426950408889634
    filled[:, 0, :seq_q] = np.where(np.isneginf(lse), np.inf, base_2).reshape(batch * heads, seq_q)
    delta = (o * do).sum(3) - (0 if dlse is None else dlse)
    filled[:, 1, :seq_q] = delta.reshape(batch * heads, seq_q)
    return filled.reshape(batch * heads * 2, -1)


def _simulate(
    text: str, given: dict[str, np.ndarray], order: Sequence[str], chance: random.Random
) -> dict[str, np.ndarray]:
    """dq, dk and dv, in an interleaving drawn from `chance`."""
    kernels = load_text(text, 1)
    out = {f"d{name}": np.full(given[name].shape, np.nan, np.float32) for name in ("q", "k", "v")}
    tensors = {**given, **out}
    written = dict.fromkeys(out, 0)
    for name, (programs, _, _), sizes, options in kernels.plan(*(torch.from_numpy(tensors[name]) for name in order))[1:]:
        alone = options.get("FOR_DK")
        reads = DQ if name == "dq_kernel" else BOTH if alone is None else DK_ALONE if alone else DV_ALONE
        descriptors = {
            key: Descriptor(key, tensors[key.removesuffix("_desc")], block) for key, block in kernels.BLOCKS[name].items()
        }
        pointer = Pointer(given["workspace"].reshape(-1))
        arguments = list(descriptors.values())
        if name == "dq_kernel":
            arguments.insert(-1, pointer)
        constants = [] if alone is None else [Int32(alone)]
        for index in range(programs):
            Program.current = Program(index, programs, chance, reads)
            getattr(kernels, name)(*arguments, np.float32(SCALE), *(Int32(size) for size in sizes), *constants)
        for key in out:
            if f"{key}_desc" in descriptors:
                written[key] = written[key] + descriptors[f"{key}_desc"].writes
    for key, writes in written.items():
        if (writes != 1).any():
            raise Fault(f"rows of {key} are written {np.unique(writes)} times")
    return out


def _length(chance: random.Random, longest: int) -> int:
    """Of a sequence: often beside the edge of a block."""
    if chance.random() < 0.3:
        return chance.choice((1, 63, 64, 65, 127, 128, 129))
    return chance.randint(1, chance.choice((64, 128, longest)))


def _wrong(variant: Variant, text: str, chance: random.Random) -> str | None:
    """What is wrong with one call on random sizes in a random interleaving, or None."""
    spec = variant.spec
    seq_q, seq_kv = _length(chance, 300), _length(chance, 300)
    batch, kv_heads = chance.randint(1, 2), chance.randint(1, 2)
    heads = kv_heads * chance.randint(1, 3)
    normal = np.random.default_rng(chance.randrange(2**31)).standard_normal
    q = normal((batch, heads, seq_q, spec.head_dim), np.float32)
    k = normal((batch, kv_heads, seq_kv, spec.head_dim), np.float32)
    v = normal((batch, kv_heads, seq_kv, spec.head_dim_v), np.float32)
    do = normal((batch, heads, seq_q, spec.head_dim_v), np.float32)
    dlse = normal((batch, heads, seq_q), np.float32) if chance.random() < 0.5 else None
    where = f"q {q.shape}, kv {v.shape}, dlse {dlse is not None}"

    wide = [torch.from_numpy(operand).double().requires_grad_() for operand in (q, k, v)]
    o, lse = plain_attention(*wide, causal=spec.causal, scale=SCALE)
    objective = (o * torch.from_numpy(do)).sum()
    if dlse is not None:
        seen = torch.isfinite(lse)
        objective = objective + (torch.where(seen, lse, 0.0) * torch.from_numpy(dlse)).sum()
    expected = torch.autograd.grad(objective, wide)

    filled = _workspace(o.detach().numpy(), lse.detach().numpy(), do, dlse)
    given = {"q": q, "k": k, "v": v, "o": do, "do": do, "workspace": filled}
    try:
        got = _simulate(text, given, ("q", "k", "v", "o", "do", "dq", "dk", "dv"), chance)
    except Fault as fault:
        return f"{where}: {fault}"
    for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        if not np.allclose(got[name], gradient.numpy(), rtol=1e-4, atol=1e-3):
            return f"{where}: wrong {name}"
    return None


NUMBERS = [*itertools.product((64, 128), (2, 3), (1, 2), (64, 128), (2, 3), (1, 2))]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("numbers", NUMBERS[::7], ids=lambda numbers: "-".join(map(str, numbers)))
def test_every_interleaving_gives_the_right_gradients(causal: Causal, wide: bool, numbers: tuple[int, ...]) -> None:
    variant = _variant(causal, wide, *numbers)
    text = render(variant)
    chance = random.Random(variant.slug)
    assert [_wrong(variant, text, chance) for _ in range(LAUNCHES)] == [None] * LAUNCHES
