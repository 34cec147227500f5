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
LAUNCHES = 3
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


NUMBERS = [*itertools.product((0, 1), (0, 1), (0, 1), (0, 1))]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("numbers", NUMBERS, ids=lambda numbers: "".join(map(str, numbers)))
def test_every_interleaving_gives_the_right_gradients(causal: Causal, wide: bool, numbers: tuple[int, ...]) -> None:
    rotate = int(causal == "none" and sum(numbers) % 2)
    variant = _variant(causal, wide, *numbers, rotate)
    text = render(variant)
    chance = random.Random(variant.slug)
    assert [_wrong(variant, text, chance) for _ in range(LAUNCHES)] == [None] * LAUNCHES
