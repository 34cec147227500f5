"""`hopper_bwd_fused` in tests/gluon_simulator.py: right gradients, the same bits, no hang and no race in many sizes,
numbers of programs and interleavings."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gluon_simulator import Descriptor, Fault, Grid, Int32, Pointer, Program, load_text
from variants import hopper_backward_fused

from flashgen.families import Variant
from flashgen.reference import plain_attention
from flashgen.render import render
from flashgen.spec import Causal, Spec

CAUSAL: tuple[Causal, ...] = ("none", "bottom_right", "top_left")
SCALE = 0.3
LAUNCHES = 2
# Launches in which a seeded bug must show.
BUG_LAUNCHES = 40
# How often a consumer reads each block that streams.
READS = {"q_desc": 2, "do_desc": 2, "workspace_desc": 1}
NAMES = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


def _variant(causal: Causal, wide: bool, *numbers: int) -> Variant:
    """Narrow heads, whose dQ two warpgroups halve by rows, or heads padded to 128, whose dQ they halve by columns."""
    return hopper_backward_fused(Spec("backward", *((24, 72) if wide else (16, 8)), "bf16", causal), *numbers)


def _like(array: np.ndarray) -> Any:
    """What `plan` looks at."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return SimpleNamespace(shape=array.shape, is_cuda=True, device=0, stride=lambda: strides)


class _Simulation:
    """One call on tensors by name, every kernel of it."""

    def __init__(self, text: str, given: dict[str, np.ndarray], programs: int) -> None:
        self.kernels = load_text(text, programs)
        out = {f"d{name}": np.full(given[name].shape, np.nan, np.float32) for name in ("q", "k", "v")}
        size = self.kernels.workspace_size(_like(given["q"]))
        batch, heads, seq_q, _ = given["q"].shape
        length = -(-seq_q // 128) * 128
        flat = np.full(size, np.nan, np.float32)
        self.tensors = {
            **given,
            **out,
            "workspace": flat[: 2 * batch * heads * length].reshape(-1, length),
            "sums": flat[: size // 256 * 256].reshape(-1, 256),
        }
        self.out, self.workspace = out, Pointer(flat)
        self.scale = np.float32(SCALE)

    def run(self, chance: random.Random) -> dict[str, np.ndarray]:
        """dq, dk and dv, in an interleaving drawn from `chance`."""
        for name, (programs, _, _), sizes, options in self.kernels.plan(*(_like(self.tensors[n]) for n in NAMES)):
            numbers = [Int32(size) for size in sizes]
            numbers += [Int32(value) for key, value in options.items() if key.isupper()]
            if name == "gradients_kernel":
                # A cooperative launch has all programs at once; of others that is only a hope.
                resident = programs if options["launch_cooperative_grid"] else chance.randint(1, programs)
                self._gradients(programs, numbers, Grid(resident, chance))
                continue
            for index in range(programs):
                Program.current = Program(index, programs, chance)
                getattr(self.kernels, name)(*self._pointers(name), self.scale, *numbers)
        return self.out

    def _pointers(self, name: str) -> list[Pointer | None]:
        def to(key: str) -> Pointer:
            return Pointer(self.tensors[key].reshape(-1))

        if name == "convert_kernel":
            return [self.workspace, to("dq")]
        dlse = to("dlse") if self.tensors.get("dlse") is not None else Pointer(None)
        return [to("o"), to("do"), to("lse"), dlse, self.workspace]

    def _gradients(self, programs: int, numbers: list[Int32], grid: Grid) -> None:
        blocks = self.kernels.BLOCKS["gradients_kernel"]
        made = {key: Descriptor(key, self.tensors[key.removesuffix("_desc")], block) for key, block in blocks.items()}
        for index in range(programs):
            Program.current = Program(index, programs, grid.chance, READS, grid=grid)
            self.kernels.gradients_kernel(*made.values(), self.workspace, self.scale, *numbers)
        grid.run()
        for key in ("dk_desc", "dv_desc"):
            if (made[key].writes != 1).any():
                raise Fault(f"rows of {key} are written {np.unique(made[key].writes)} times")


def _length(chance: random.Random, longest: int) -> int:
    """Of a sequence: often beside the edge of a block."""
    if chance.random() < 0.3:
        return chance.choice((1, 63, 64, 65, 127, 128, 129, 256))
    return chance.randint(1, chance.choice((64, 128, longest)))


def _tensors(spec: Spec, chance: random.Random) -> dict[str, np.ndarray | None]:
    seq_q, seq_kv = _length(chance, 400), _length(chance, 500)
    batch, kv_heads = chance.randint(1, 2), chance.randint(1, 2)
    heads = kv_heads * chance.randint(1, 2)
    normal = np.random.default_rng(chance.randrange(2**31)).standard_normal
    return {
        "q": normal((batch, heads, seq_q, spec.head_dim), np.float32),
        "k": normal((batch, kv_heads, seq_kv, spec.head_dim), np.float32),
        "v": normal((batch, kv_heads, seq_kv, spec.head_dim_v), np.float32),
        "do": normal((batch, heads, seq_q, spec.head_dim_v), np.float32),
        "dlse": normal((batch, heads, seq_q), np.float32) if chance.random() < 0.5 else None,
    }


def _expected(spec: Spec, given: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], dict[str, np.ndarray]]:
    """The gradients in float64, and what the forward returns."""
    wide = [torch.from_numpy(given[name]).double().requires_grad_() for name in ("q", "k", "v")]
    o, lse = plain_attention(*wide, causal=spec.causal, scale=SCALE)
    objective = (o * torch.from_numpy(given["do"])).sum()
    if given["dlse"] is not None:
        seen = torch.isfinite(lse)
        objective = objective + (torch.where(seen, lse, 0.0) * torch.from_numpy(given["dlse"])).sum()
    forward = {"o": o.detach().numpy().astype(np.float32), "lse": lse.detach().numpy().astype(np.float32)}
    return torch.autograd.grad(objective, wide), forward


def _wrong(variant: Variant, text: str, chance: random.Random) -> str | None:
    """What is wrong with one call on random sizes, run in two random interleavings, or None."""
    spec = variant.spec
    given: dict[str, Any] = _tensors(spec, chance)
    expected, forward = _expected(spec, given)
    if spec.causal == "top_left":
        # Of keys that no row sees.
        given["v"][:, :, given["q"].shape[2] :] = np.inf
    given |= forward
    programs = chance.choice((1, 2, 3, 5, 132))
    where = f"q {given['q'].shape}, kv {given['v'].shape}, dlse {given['dlse'] is not None}, {programs} programs"
    try:
        got, again = (_Simulation(text, given, programs).run(chance) for _ in range(2))
    except Fault as fault:
        return f"{where}: {fault}"
    for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        if not np.allclose(got[name], gradient.numpy(), rtol=1e-4, atol=1e-3):
            return f"{where}: wrong {name}"
        if not np.array_equal(got[name], again[name]):
            return f"{where}: other bits of {name} in another interleaving"
    return None


# Every legal combination of all but rotate.
NUMBERS = [numbers for numbers in itertools.product((0, 1), repeat=4) if numbers[0] or numbers[1]]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("numbers", NUMBERS, ids=lambda numbers: "".join(map(str, numbers)))
def test_every_interleaving_gives_the_right_gradients(causal: Causal, wide: bool, numbers: tuple[int, ...]) -> None:
    variant = _variant(causal, wide, *numbers, int(causal == "none" and numbers[2] == 1))
    text = render(variant)
    chance = random.Random(variant.slug)
    assert [_wrong(variant, text, chance) for _ in range(LAUNCHES)] == [None] * LAUNCHES


@pytest.mark.parametrize(
    ("causal", "right", "wrong"),
    [
        pytest.param(
            "bottom_right",
            "mbarrier.wait(rows_empty.index(slot), step >> 1 & 1 ^ 1)",
            "pass",
            id="no wait for rows_empty",
        ),
        pytest.param("none", "mbarrier.wait(kv_empty.index(0), turn & 1 ^ 1)", "pass", id="no wait for kv_empty"),
        pytest.param("bottom_right", "wait_for_turn(LOCKS + place, rank)", "pass", id="out of turn"),
        pytest.param("none", "cp.async.bulk.wait_group 0; ", "", id="passed on before dQ has arrived"),
        pytest.param("bottom_right", "blocks) - 1 - first_key", "blocks) - first_key", id="rank"),
        pytest.param("bottom_right", "(blocks - 1 - tile % blocks)", "(tile % blocks)", id="tiles in another order"),
        pytest.param(
            "bottom_right",
            'gl.atomic_add(TICKET, 1, sem="relaxed")',
            "turn * gl.num_programs(0) + gl.program_id(0)",
            id="tiles by program",
        ),
        pytest.param("none", "rank + blocks, rank)", "rank, rank)", id="rank of a rotated head"),
        pytest.param("none", "key_blocks <= programs", "key_blocks <= tiles", id="rotated with few programs"),
        pytest.param("none", "turn * gl.num_programs(0) + gl.program_id(0)", "turn", id="every program every tile"),
        pytest.param("none", "tl.store(COUNTS + tl.program_id(0), 0)", "pass", id="locks as they were found"),
        pytest.param("bottom_right", "(rows + diagonal >= 0)", "(rows + diagonal >= -128)", id="rows without keys"),
        pytest.param("none", "        meet()\n        leave", "        leave", id="dk over k in use"),
        pytest.param(
            "bottom_right",
            "    fence_async_shared()\n    if NAMED_BARRIER",
            "    if NAMED_BARRIER",
            id="no fence behind ds",
        ),
        pytest.param("none", "store(dq)\n    fence_async_shared()", "store(dq)", id="no fence behind dq"),
        pytest.param("none", "mbarrier.wait(dq_empty.index(CONSUMER), step & 1 ^ 1)", "pass", id="dq over dq in use"),
        pytest.param(
            "none",
            "            tma.store_wait(0)\n            for part",
            "            for part",
            id="dq released before it has left",
        ),
        pytest.param("none", "if rank == 0:", "if rank < 0:", id="added to nothing"),
        pytest.param("none", "mbarrier.wait(ds_full.index(step & 1), step >> 1 & 1)", "pass", id="no wait for ds"),
        pytest.param("none", "place = ds_ring.index((step & 1) * 2", "place = ds_ring.index(2", id="place of ds"),
        pytest.param(
            "bottom_right",
            "            dv, dk = warpgroup_mma_wait(2, [dv, dk])",
            "            mbarrier.arrive(rows_empty.index(slot), count=1)\n"
            "            dv, dk = warpgroup_mma_wait(2, [dv, dk])",
            id="rows released twice",
        ),
        pytest.param("none", "told_empty = barriers(2, 3)", "told_empty = barriers(2, 2)", id="told over unheard"),
        pytest.param(
            "bottom_right", "ahead + BLOCK_Q < most_ahead", "ahead < most_ahead", id="diagonal of the next head"
        ),
        pytest.param("bottom_right", "return ahead < 64", "return ahead < 1", id="rows half hidden"),
        pytest.param("top_left", "ds = gl.where(p == 0.0, 0.0, ds)", "pass", id="hidden dp may be infinite"),
        pytest.param("bottom_right", "(scale_2 * 0.6931471805599453)", "scale_2", id="scale of dk"),
        pytest.param("none", "* 2 + part) * 16", "* 2 + 1 - part) * 16", id="halves of dq"),
        pytest.param("bottom_right", "head_index * group\n", "head_index\n", id="heads of dq"),
        pytest.param("none", "[statistics + 1, row]", "[statistics, row]", id="delta"),
    ],
)
def test_seeded_bugs_are_caught(causal: Causal, right: str, wrong: str) -> None:
    variant = _variant(causal, True, 0, 1, 1, 0, int(causal == "none"))
    text = render(variant)
    assert right in text
    chance = random.Random(variant.slug)
    assert any(_wrong(variant, text.replace(right, wrong), chance) for _ in range(BUG_LAUNCHES))
