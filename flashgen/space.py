"""How fast (Config), which choices there are, and the rules that say why a choice cannot work (Rule, Rejection)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashgen.errors import InputError, did_you_mean
from flashgen.hardware import Gpu
from flashgen.spec import Spec


class Config(Mapping[str, int]):
    """The tuned numbers of one kernel: an immutable, hashable mapping such as `{"block_q": 128, "num_warps": 8}`.

    A Config never changes the answer beyond rounding; what does is in the Spec.
    """

    __slots__ = ("_items",)

    def __init__(self, **values: int) -> None:
        self._items = values

    def __getitem__(self, name: str) -> int:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value}' for name, value in self._items.items())})"


@dataclass(frozen=True)
class Rejection:
    """Why a candidate is not used: a sentence with the values in it.

    Attributes:
        stage: where it was refused: "rule", "compile", "resources", "check" or "benchmark".
        kind: a short name to count by, e.g. "shared memory".
        reason: the full sentence.
    """

    stage: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """One constraint of a family.

    Attributes:
        kind: short name to count refusals by.
        broken: returns the reason when (spec, config, gpu) breaks the rule, else None.
    """

    kind: str
    broken: Callable[[Spec, Config, Gpu], str | None]


def first_broken(rules: Sequence[Rule], spec: Spec, config: Config, gpu: Gpu) -> Rejection | None:
    """The first rule that the candidate breaks, as a value; None when it may be compiled."""
    for rule in rules:
        reason = rule.broken(spec, config, gpu)
        if reason is not None:
            return Rejection("rule", rule.kind, reason)
    return None


@dataclass(frozen=True)
class Space:
    """All configs of one family for one spec and GPU, split by the family's rules."""

    usable: tuple[Config, ...]
    rejected: tuple[tuple[Config, Rejection], ...]

    @staticmethod
    def of(choices: Mapping[str, Sequence[int]], rules: Sequence[Rule], spec: Spec, gpu: Gpu) -> Space:
        """Enumerate the table of choices; nothing is compiled here."""
        usable: list[Config] = []
        rejected: list[tuple[Config, Rejection]] = []
        for values in itertools.product(*choices.values()):
            config = Config(**dict(zip(choices, values, strict=True)))
            rejection = first_broken(rules, spec, config, gpu)
            if rejection is None:
                usable.append(config)
            else:
                rejected.append((config, rejection))
        return Space(tuple(usable), tuple(rejected))


def config_from(values: Mapping[str, object], choices: Mapping[str, Sequence[int]]) -> Config:
    """Build a Config from untrusted values (a YAML mapping, a command line).

    Raises:
        InputError: a key is missing or unknown, or a value is not among the family's choices.
    """
    for name in values:
        if name not in choices:
            raise InputError(f"unknown config key {name!r}. {did_you_mean(str(name), choices)}")
    for name, allowed in choices.items():
        if name not in values:
            raise InputError(f"config key {name!r} is missing; one of {list(allowed)} is needed.")
        if type(values[name]) is not int or values[name] not in allowed:
            raise InputError(f"{name}={values[name]!r} is not among the choices {list(allowed)}.")
    return Config(**{name: int(str(values[name])) for name in choices})
