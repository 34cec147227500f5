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
LAUNCHES = 4
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
    for name, (programs, _, _), sizes, options in kernels.plan(*(torch.from_numpy(tensors[name]) for name in order))[
        1:
    ]:
        alone = options.get("FOR_DK")
        reads = DQ if name == "dq_kernel" else BOTH if alone is None else DK_ALONE if alone else DV_ALONE
        descriptors = {
            key: Descriptor(key, tensors[key.removesuffix("_desc")], block)
            for key, block in kernels.BLOCKS[name].items()
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

    if spec.causal == "top_left":
        # Of keys that no row sees.
        v[:, :, seq_q:] = np.inf
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
@pytest.mark.parametrize("numbers", NUMBERS[::13], ids=lambda numbers: "-".join(map(str, numbers)))
def test_every_interleaving_gives_the_right_gradients(causal: Causal, wide: bool, numbers: tuple[int, ...]) -> None:
    variant = _variant(causal, wide, *numbers)
    text = render(variant)
    chance = random.Random(variant.slug)
    assert [_wrong(variant, text, chance) for _ in range(LAUNCHES)] == [None] * LAUNCHES


@pytest.mark.parametrize(
    ("wide", "right", "wrong"),
    [
        pytest.param(
            True,
            "        dk = warpgroup_mma(ds, q_ring.index(last)",
            "        mbarrier.arrive(do_empty.index((step - 1) % DO_STAGES), count=1)\n"
            "        dk = warpgroup_mma(ds, q_ring.index(last)",
            id="do released while its deltas are loaded",
        ),
        pytest.param(
            True,
            "        dv = warpgroup_mma(p, do_ring.index(last)",
            "        mbarrier.arrive(q_empty.index((step - 1) % Q_STAGES), count=1)\n"
            "        dv = warpgroup_mma(p, do_ring.index(last)",
            id="q released while its log-sum-exps are loaded",
        ),
        pytest.param(
            False,
            "mbarrier.wait(q_empty.index(q_slot), step // Q_STAGES & 1 ^ 1)",
            "pass",
            id="no wait for q_empty",
        ),
        pytest.param(
            False,
            "mbarrier.wait(do_empty.index(do_slot), step // DO_STAGES & 1 ^ 1)",
            "mbarrier.wait(do_empty.index(do_slot), step // DO_STAGES & 1)",
            id="phase of do_empty",
        ),
        pytest.param(
            False,
            "        s = warpgroup_mma_wait(1, [s])\n        s = hide_rows",
            "        mbarrier.arrive(q_empty.index(q_slot), count=1)\n        s = warpgroup_mma_wait(1, [s])\n"
            "        s = hide_rows",
            id="q released early",
        ),
        pytest.param(
            False,
            "        dv = warpgroup_mma_wait(1, [dv])\n        mbarrier.arrive(do_empty.index(do_slot), count=1)",
            "        mbarrier.arrive(do_empty.index(do_slot), count=1)\n        dv = warpgroup_mma_wait(1, [dv])",
            id="do released early",
        ),
        pytest.param(
            False, "q_empty = barriers(Q_STAGES, 2)", "q_empty = barriers(Q_STAGES, 1)", id="count of q_empty"
        ),
        pytest.param(False, "(batch * kv_heads * group + head) * 2", "(batch * group + head) * 2", id="statistics"),
        pytest.param(False, "[statistics + 1, row]", "[statistics, row]", id="delta"),
        pytest.param(
            False, "head += gl.where(row + BLOCK_Q < seq_q, 0, 1)", "head += 0", id="one head of the group only"
        ),
        pytest.param(False, "row + BLOCK_Q < seq_q, row", "row < seq_q, row", id="rows past the last"),
        pytest.param(False, "first_key - diagonal, 0)", "first_key + diagonal, 0)", id="first row that sees a key"),
        pytest.param(False, "row + diagonal < key + 63", "row + diagonal < key", id="rows half hidden"),
        pytest.param(False, "(dk * scale, key", "(dk, key", id="scale of dk"),
        pytest.param(False, "leave(dk_desc, start, k,", "leave(dk_desc, start, k_own.index(0),", id="place of dk"),
        pytest.param(
            False, "    fence_async_shared()\n    copy_out", "    copy_out", id="no fence before the gradient leaves"
        ),
        pytest.param(False, "diagonal), 16)\n    tma.store_wait(0)", "diagonal), 16)", id="left before dk"),
        pytest.param(
            False, "mbarrier.wait(k_empty.index(k_slot), step // K_STAGES & 1 ^ 1)", "pass", id="no wait for k_empty"
        ),
        pytest.param(
            False,
            "        dq = warpgroup_mma_wait(1, [dq])\n        mbarrier.arrive(k_empty.index(last), count=1)",
            "        mbarrier.arrive(k_empty.index(last), count=1)\n        dq = warpgroup_mma_wait(1, [dq])",
            id="k released early",
        ),
        pytest.param(False, "mbarrier.wait(do_full.index(CONSUMER), 0)", "pass", id="no wait for do"),
        pytest.param(False, "seq_kv), 1), BLOCK_KV)", "seq_kv), 0), BLOCK_KV)", id="rows without keys"),
        pytest.param(
            False, "gl.minimum(row + diagonal + 1, seq_kv)", "gl.minimum(row + diagonal + 64, seq_kv)", id="keys hidden"
        ),
        pytest.param(False, "LSE_head + length + rows", "LSE_head + seq_q + rows", id="place of deltas"),
        pytest.param(False, "block = blocks - 1 - block", "block = blocks - block", id="rows not there"),
        pytest.param(False, "head // group, key", "head % group, key", id="heads of k and v"),
        pytest.param(
            True,
            "mbarrier.arrive(q_empty.index((step - 1) % Q_STAGES), count=1)",
            "mbarrier.arrive(q_empty.index(q_slot), count=1)",
            id="q of dv released in another place",
        ),
        pytest.param(
            True,
            "        dk = warpgroup_mma_wait(1, [dk])\n        mbarrier.arrive(q_empty.index(last), count=1)",
            "        mbarrier.arrive(q_empty.index(last), count=1)\n        dk = warpgroup_mma_wait(1, [dk])",
            id="q of dk released early",
        ),
        pytest.param(True, "gl.expand_dims(keys, 1) <=", "gl.expand_dims(keys, 1) <", id="diagonal hidden"),
        pytest.param(True, '{"num_warps": 4, "FOR_DK": 0}', '{"num_warps": 4, "FOR_DK": 1}', id="dk twice"),
    ],
)
def test_seeded_bugs_are_caught(wide: bool, right: str, wrong: str) -> None:
    # Short rings are soon full, so that what is released too early is soon copied over.
    rings = [(2, 1, 64, 3, 2), (2, 2, 64, 3, 2)] if wide else [(3, 2, 64, 3, 2), (2, 1, 64, 2, 1)]
    variants = [_variant("bottom_right", wide, 64, *numbers) for numbers in rings]
    texts = [render(variant) for variant in variants]
    assert all(right in text for text in texts)
    chance = random.Random(variants[0].slug)
    assert any(
        _wrong(variant, _spoilt(text, right, wrong), chance)
        for _ in range(BUG_LAUNCHES)
        for variant, text in zip(variants, texts, strict=True)
    )


def _spoilt(text: str, right: str, wrong: str) -> str:
    """The text with a bug; what it releases earlier it does not release again."""
    bad = text.replace(right, wrong)
    if "arrive(" not in wrong or "arrive(" in right:
        return bad
    line = next(line for line in wrong.splitlines(keepends=True) if "arrive(" in line)
    first, rest = bad.split(line, 1)
    return first + line + rest.replace(line, "", 1)


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_keys_that_no_row_sees_have_no_gradient(wide: bool) -> None:
    variant = _variant("top_left", wide, 64, 2, 2, 64, 2, 2)
    text = render(variant)
    right = "dk = gl.where(gl.expand_dims(keys < seq_q + diagonal, 1), dk, 0.0)"
    assert right in text
    chance = random.Random(0)
    assert any(_wrong(variant, text.replace(right, "pass"), chance) for _ in range(BUG_LAUNCHES))
