"""What is made of samples, the work that a time is divided by, and what candidates are timed on."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from flashgen import benchmark
from flashgen.benchmark import Measurement, balanced_orders, flops, geometric_mean, inputs, interleaved
from flashgen.problem import Problem
from flashgen.reference import visible_keys
from flashgen.spec import TORCH_DTYPES, Spec


def test_median_and_spread_of_samples() -> None:
    assert Measurement.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == Measurement(4.0, 2.0, 7)
    assert Measurement.of([5.0, 5.0]) == Measurement(5.0, 0.0, 2)
    assert Measurement.of([10.0, 20.0, 30.0, 40.0]).median_us == 25.0


def test_the_order_of_samples_and_one_outlier_do_not_matter() -> None:
    draw = random.Random(0)
    samples = [draw.gauss(100.0, 2.0) for _ in range(400)]
    calm = Measurement.of(samples)
    assert Measurement.of(sorted(samples)) == calm
    assert calm.median_us == pytest.approx(100.0, abs=0.5)
    # Half the interquartile range of a normal distribution is 0.67 standard deviations.
    assert calm.spread_us == pytest.approx(0.67 * 2.0, rel=0.15)
    disturbed = Measurement.of([*samples[1:], 1e6])
    assert disturbed.median_us == pytest.approx(calm.median_us, abs=0.1)
    assert disturbed.spread_us == pytest.approx(calm.spread_us, abs=0.1)


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 1), (7, 7), (5, 9), (9, 5), (1, 40), (40, 1), (0, 5), (5, 0)])
def test_flops_count_the_pairs_that_are_seen(causal: str, seq_q: int, seq_kv: int) -> None:
    spec = Spec(head_dim=24, head_dim_v=40, causal=causal)  # type: ignore[arg-type]
    pairs = int(visible_keys(seq_q, seq_kv, causal).sum())
    # A multiplication and an addition for each element of the two products' inner dimensions.
    expected = 3 * 6 * pairs * (2 * 24 + 2 * 40)
    assert flops(spec, Problem(3, 6, 2, seq_q, seq_kv)) == expected


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_inputs_are_random_and_repeatable(dtype: str) -> None:
    spec, problem = Spec(head_dim=24, head_dim_v=40, dtype=dtype), Problem(2, 6, 3, 50, 70)  # type: ignore[arg-type]
    q, k, v = inputs(spec, problem, "cpu")
    assert [tuple(tensor.shape) for tensor in (q, k, v)] == [(2, 6, 50, 24), (2, 3, 70, 24), (2, 3, 70, 40)]
    for tensor in (q, k, v):
        assert tensor.dtype == TORCH_DTYPES[dtype] and tensor.is_contiguous()
        assert tensor.double().std().item() == pytest.approx(1.0, abs=0.1)
        assert abs(tensor.double().mean().item()) < 0.1
    assert not torch.equal(k.flatten()[:100], v.flatten()[:100])
    again = inputs(spec, problem, "cpu")
    assert all(torch.equal(*pair) for pair in zip((q, k, v), again, strict=True))
    assert not torch.equal(inputs(spec, problem, "cpu", seed=1)[0], q)


def _turns(monkeypatch: pytest.MonkeyPatch, rounds: int | None, seed: int) -> tuple[list[str], dict[str, Measurement]]:
    """The order of the calls, and their measurements where the n-th call of all takes n microseconds."""
    order: list[str] = []

    def sample(call: Callable[[], object], *, repeat_ms: int) -> list[float]:
        order.append(str(call()))
        return [float(len(order))] * 5

    monkeypatch.setattr(benchmark, "sample", sample)
    calls = {name: lambda name=name: name for name in "abcde"}
    return order, interleaved(calls, rounds=rounds, seed=seed)


def test_every_round_measures_all_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order, measured = _turns(monkeypatch, 6, 0)
    rounds = [order[start : start + 5] for start in range(0, 30, 5)]
    assert all(sorted(turn) == list("abcde") for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 3
    assert order == _turns(monkeypatch, 6, 0)[0] != _turns(monkeypatch, 6, 1)[0]
    assert list(measured) == list("abcde")
    for name, measurement in measured.items():
        own = [float(place) for place, turn in enumerate(order, 1) if turn == name for _ in range(5)]
        assert measurement == Measurement.of(own) and measurement.samples == 30


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7])
def test_each_follows_each_other_one_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(followed) == count * (count - 1) and len(set(followed.values())) <= 1
    assert Counter(order[0] for order in orders) == dict.fromkeys(range(count), len(orders) // count)


def test_all_balanced_orders_if_rounds_are_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    order, _ = _turns(monkeypatch, None, 3)
    rounds = [order[start : start + 5] for start in range(0, len(order), 5)]
    followed = Counter(pair for turn in rounds for pair in itertools.pairwise(turn))
    assert len(rounds) == 10 and set(followed.values()) == {2} and len(followed) == 20


def test_no_place_is_always_somebodys(monkeypatch: pytest.MonkeyPatch) -> None:
    order, _ = _turns(monkeypatch, 400, 0)
    first = Counter(order[::5])
    assert all(50 < first[name] < 110 for name in "abcde")


def test_several_measurements_together() -> None:
    one = Measurement(8.0, 0.4, 30, 12.0)
    assert Measurement.together([one]) == Measurement(8.0, 0.4, 30)
    both = Measurement.together([one, Measurement(2.0, 0.0, 20)])
    # The mean has half the relative error of its only uncertain part.
    assert both == Measurement(4.0, 0.1, 20)
    assert geometric_mean([3.3]) == 3.3


def test_another_way_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(call: Callable[[], object], *, repeat_ms: int) -> list[float]:
        return [float(str(call())), float(repeat_ms)]

    found = interleaved({"a": lambda: 1, "b": lambda: 2}, rounds=2, repeat_ms=5, take=take)
    assert found == {"a": Measurement.of([1.0, 5.0] * 2), "b": Measurement.of([2.0, 5.0] * 2)}
