"""A search whose kernels run in no time: results come from the records. As a script: a search that dies."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from measured import H200, measured

from flashgen.families import FAMILIES, Family
from flashgen.hardware import Gpu
from flashgen.search import Search
from flashgen.space import Config, Rule
from flashgen.spec import Spec

CHOICES = {
    "block_q": (64, 128),
    "block_kv": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
    "index_bits": (32, 64),
    "advance": (0, 1),
}
SLUG = "d256_bf16"
SPEC = measured()[SLUG].spec
# What a killed process told before it died.
TOLD = 5


def values(slug: str) -> dict[Config, float]:
    """What tuning minimises, sum of log times over the problems, for every kernel that was measured."""
    return {kernel.config: sum(map(math.log, kernel.us)) for kernel in measured()[slug].kernels}


def family(slug: str | None = SLUG, choices: Mapping[str, Sequence[int]] | None = None) -> Family:
    """`triton_fwd` with the choices that the records cover; a slug refuses by rule what has no record for that spec."""
    known = values(slug) if slug else {}

    def unmeasured(spec: Spec, config: Config, gpu: Gpu) -> str | None:
        return None if config in known else f"{config} has no record"

    rules = (Rule("unmeasured", unmeasured),) if slug else ()
    wanted = {name: tuple(numbers) for name, numbers in (choices or CHOICES).items()}
    return replace(FAMILIES["triton_fwd"], choices=wanted, rules=rules)


def search(journal: Path | None = None, *, trials: int = 1000, seed: int = 0, of: Family | None = None) -> Search:
    return Search(of or family(), SPEC, H200, trials=trials, seed=seed, journal=journal, name="replay")


def run(one: Search, told: Mapping[Config, float], most: int = sys.maxsize) -> list[Config]:
    """Ask and tell until the search ends, at most `most` times; a config without a value is refused."""
    asked: list[Config] = []
    while len(asked) < most and (config := one.ask()) is not None:
        asked.append(config)
        one.tell(config, told.get(config), {"config": dict(config)})
    return asked


def _die(*_: object, **__: object) -> None:
    os._exit(9)


if __name__ == "__main__":
    victim, place = search(Path(sys.argv[1])), sys.argv[2]
    run(victim, values(SLUG), most=TOLD)
    if place == "enqueued":
        victim._suggest = _die  # type: ignore[assignment]
    left_open = victim.ask()
    assert left_open is not None
    if place == "telling":
        victim._study.tell = _die  # type: ignore[method-assign]
        victim.tell(left_open, values(SLUG)[left_open], {"config": dict(left_open)})
    _die()
