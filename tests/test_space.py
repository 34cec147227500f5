"""Configs as values, and how a table of choices and a list of rules become a space."""

from __future__ import annotations

import pickle

import pytest

from flashgen.errors import InputError
from flashgen.hardware import Gpu
from flashgen.space import Config, Rejection, Rule, Space, config_from, first_broken
from flashgen.spec import Spec

GPU = Gpu.named("a100")
CHOICES = {"block_q": (16, 32, 64), "num_warps": (2, 4)}


def _wide_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    return f"{config['block_q']} rows are too many" if config["block_q"] > 32 else None


def _warps_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    return "too many warps" if config["num_warps"] * 16 > config["block_q"] else None


RULES = (Rule("rows", _wide_rule), Rule("warps", _warps_rule))


def test_a_config_is_a_mapping_and_a_value() -> None:
    config = Config(block_q=64, num_warps=4)
    assert dict(config) == {"block_q": 64, "num_warps": 4}
    assert list(config) == ["block_q", "num_warps"] and len(config) == 2
    assert config == Config(num_warps=4, block_q=64)
    assert hash(config) == hash(Config(num_warps=4, block_q=64))
    assert config != Config(block_q=64, num_warps=8)
    assert pickle.loads(pickle.dumps(config)) == config
    assert eval(repr(config), {"Config": Config}) == config


def test_a_config_cannot_be_changed() -> None:
    config = Config(block_q=64)
    with pytest.raises(TypeError):
        config["block_q"] = 128  # type: ignore[index]
    with pytest.raises(AttributeError):
        config.block_kv = 64  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        config["block_kv"]


def test_the_first_broken_rule_is_the_reason() -> None:
    assert first_broken(RULES, Spec(), Config(block_q=32, num_warps=2), GPU) is None
    both = first_broken((*RULES, Rule("never", lambda *_: "x")), Spec(), Config(block_q=64, num_warps=8), GPU)
    assert both == Rejection("rule", "rows", "64 rows are too many")
    assert first_broken(RULES[::-1], Spec(), Config(block_q=64, num_warps=8), GPU) == Rejection(
        "rule", "warps", "too many warps"
    )


def test_a_space_is_every_combination_once() -> None:
    space = Space.of(CHOICES, RULES, Spec(), GPU)
    assert space.usable == (Config(block_q=32, num_warps=2),)
    everything = [*space.usable, *(config for config, _ in space.rejected)]
    assert len(set(everything)) == len(everything) == 6
    kinds = {tuple(config.values()): rejection.kind for config, rejection in space.rejected}
    assert kinds == {(16, 2): "warps", (16, 4): "warps", (32, 4): "warps", (64, 2): "rows", (64, 4): "rows"}


def test_rules_see_spec_and_gpu() -> None:
    seen: set[tuple[Spec, Gpu]] = set()

    def note(spec: Spec, config: Config, gpu: Gpu) -> None:
        seen.add((spec, gpu))

    spec = Spec(head_dim=64)
    assert len(Space.of(CHOICES, (Rule("note", note),), spec, GPU).usable) == 6
    assert seen == {(spec, GPU)}


def test_values_from_outside_become_a_config() -> None:
    config = config_from({"num_warps": 4, "block_q": 64}, CHOICES)
    assert config == Config(block_q=64, num_warps=4)
    assert list(config) == list(CHOICES)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"block_q": 64}, ["'num_warps' is missing", "[2, 4]"]),
        ({"block_q": 64, "num_warps": 4, "block_k": 64}, ["unknown config key 'block_k'", "'block_q'"]),
        ({"block_q": 48, "num_warps": 4}, ["block_q=48", "[16, 32, 64]"]),
        ({"block_q": "64", "num_warps": 4}, ["block_q='64'"]),
        ({"block_q": 64.0, "num_warps": 4}, ["block_q=64.0"]),
        ({"block_q": None, "num_warps": 4}, ["block_q=None"]),
        ({"block_q": 64, "num_warps": [4]}, ["num_warps=[4]"]),
        ({1: 64}, ["unknown config key 1"]),
        ({}, ["'block_q' is missing"]),
    ],
)
def test_values_that_are_no_config(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        config_from(values, CHOICES)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_true_is_no_number() -> None:
    with pytest.raises(InputError, match="advance=True"):
        config_from({"advance": True}, {"advance": (0, 1)})
