"""What every kernel family says about itself, and Variant: one family, spec and config, exactly one generated file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.space import Config, Rejection, Rule, Space, config_from, first_broken
from flashgen.spec import Op, Spec


@dataclass(frozen=True)
class Tile:
    """How a kernel goes through its work: what one block keeps, and what streams past it.

    Attributes:
        kernel: its name in the generated file.
        stays: "q" when rows stay and keys stream, "kv" the other way round.
        block, step: lengths of what stays and of what streams at a time.
        num_warps, num_stages: its launch options.
        width: multiply-adds for one pair of row and key: the products' inner or outer widths, added up.
        resident: that part of it whose first operand lies in shared memory; the others' are registers.
        kept: width of the fp32 accumulators.
    """

    kernel: str
    stays: Literal["q", "kv"]
    block: int
    step: int
    num_warps: int
    num_stages: int
    width: int
    resident: int
    kept: int


@dataclass(frozen=True, eq=False)
class Family:
    """One template with its choices, rules and needs.

    Attributes:
        name: the stem of its template, golden files and YAML key.
        op: what it computes.
        choices: the search space as a table, name -> values.
        rules: constraints with reasons, cheap ones first; the one list for space, tuner, store and dispatcher.
        default: a config that obeys the rules for (spec, gpu), for when nobody tuned.
        shared_memory: (low, high) bytes of shared memory that the compiled kernel will need; low is certain.
        tiles: for each loop of each kernel how it goes through the work; for the model.
        kernels: the kernels of the generated file in the order in which they are launched, each with the choices that
            it is compiled with: configs that agree in these share it.
        aligned: whether it takes only tensors whose rows start on 16-byte boundaries and whose strides are positive.
        by_hand: whether copies and products overlap as the template has ordered them, not as a compiler likes it; one
            that spills in the loop, serialises its products or takes P apart has undone that.
        least_pairs: where nobody tuned and several families could serve, it comes last for fewer pairs of row and key.
        pointless: why a config does on these problems what another does, which is reason not to try it; or None.
        derived: what else the template may name, where its structure depends on more than a spec says.
    """

    name: str
    op: Op
    choices: Mapping[str, Sequence[int]]
    rules: tuple[Rule, ...]
    default: Callable[[Spec, Gpu], Config]
    shared_memory: Callable[[Spec, Config, Gpu], tuple[int, int]]
    tiles: Callable[[Spec, Config], tuple[Tile, ...]]
    kernels: Mapping[str, tuple[str, ...]]
    aligned: bool = False
    by_hand: bool = False
    least_pairs: int = 1
    pointless: Callable[[Config, Sequence[Problem]], str | None] = lambda config, problems: None
    derived: Callable[[Spec], Mapping[str, object]] = lambda spec: {}

    def __reduce__(self) -> tuple[Callable[[str], Family], tuple[str]]:
        """Families travel to child processes by name, so that a process has one object of each."""
        from flashgen.families import family_named

        return family_named, (self.name,)

    def space(self, spec: Spec, gpu: Gpu) -> Space:
        """Every config, split into usable and refused with a reason."""
        return Space.of(self.choices, self.rules, spec, gpu)

    def worth_trying(self, problems: Sequence[Problem]) -> Family:
        """The same family, which also refuses what is pointless on these problems: for a search."""
        rule = Rule("pointless", lambda spec, config, gpu: self.pointless(config, problems))
        return replace(self, rules=(*self.rules, rule))

    def refuses(self, spec: Spec, config: Config, gpu: Gpu) -> Rejection | None:
        """Why this config cannot run here, or None."""
        return first_broken(self.rules, spec, config, gpu)

    def config(self, values: Mapping[str, object]) -> Config:
        """A Config from untrusted values; InputError names the key that is wrong."""
        return config_from(values, self.choices)


@dataclass(frozen=True)
class Variant:
    """One kernel: what it computes, by which template, with which numbers."""

    family: Family
    spec: Spec
    config: Config

    @property
    def slug(self) -> str:
        """Readable part of the file name, e.g. `triton_fwd_d128_bf16_causal_q128_kv64_w8_s3`."""
        short = {
            "block_q": "q",
            "block_kv": "kv",
            "num_warps": "w",
            "num_stages": "s",
            "index_bits": "i",
            "advance": "a",
            "blocks_per_sm": "b",
            "dkdv_block_q": "dkdv_q",
            "dkdv_block_kv": "kv",
            "dkdv_num_warps": "w",
            "dkdv_num_stages": "s",
            "dq_block_q": "dq_q",
            "dq_block_kv": "kv",
            "dq_num_warps": "w",
            "dq_num_stages": "s",
        }
        numbers = "_".join(f"{short.get(name, name)}{value}" for name, value in self.config.items())
        return f"{self.family.name}_{self.spec.slug}_{numbers}"
