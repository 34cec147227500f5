"""Customers that share two servers; all the queueing that `model.py` needs."""

from __future__ import annotations

import math


def round_trip(customers: float, tensor: float, issue: float, wait: float) -> float:
    """Clocks for a round of `customers` that alternate between two servers and a wait.

    Mean value analysis (Reiser and Lavenberg 1980): each finds the queues that one customer less would leave. Between
    whole numbers of customers the result is interpolated.
    """
    before_tensor = before_issue = previous = clocks = 0.0
    for number in range(1, math.ceil(customers) + 1):
        at_tensor, at_issue = tensor * (1 + before_tensor), issue * (1 + before_issue)
        previous, clocks = clocks, at_tensor + at_issue + wait
        before_tensor, before_issue = number * at_tensor / clocks, number * at_issue / clocks
    return clocks - (math.ceil(customers) - customers) * (clocks - previous)
