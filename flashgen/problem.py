"""At which sizes something is computed (Problem), and what the store keys on (Bucket)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashgen.errors import InputError

MAX_SIZE = 2**31 - 512  # the kernels' sizes are int32, and they round up to a block


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Problem:
    """The sizes of one call; lengths in tokens; `page_size` of a cache in pages, 0 where there is none."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    page_size: int = 0

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if type(value) is not int or not 0 <= value <= MAX_SIZE:
                raise InputError(f"0 <= {field} <= {MAX_SIZE} must hold, but got {field}={value!r}.")
        if self.heads and (self.kv_heads == 0 or self.heads % self.kv_heads):
            raise InputError(
                f"heads must be a multiple of kv_heads, but got heads={self.heads}, kv_heads={self.kv_heads}. "
                "Query head h reads key head h // (heads // kv_heads)."
            )

    @property
    def bucket(self) -> Bucket:
        """What the store keys on: lengths rounded up to powers of two, so that new lengths need no new tuning."""
        return Bucket(next_power_of_2(max(1, self.seq_q)), next_power_of_2(max(1, self.seq_kv)))

    @property
    def stated(self) -> dict[str, int]:
        """Its sizes by name; without that of pages where there are none."""
        return {name: size for name, size in vars(self).items() if size or name != "page_size"}

    def visible_pairs(self, causal: str) -> int:
        """How many (row, key) pairs are computed, over the batch and all heads."""
        if causal == "none":
            return self.batch * self.heads * self.seq_q * self.seq_kv
        diagonal = self.seq_kv - self.seq_q if causal == "bottom_right" else 0
        # Row i sees clamp(i + diagonal + 1, 0, seq_kv) keys: an arithmetic series between the two clamps.
        first = min(max(0, -diagonal), self.seq_q)
        full = min(max(first, self.seq_kv - diagonal), self.seq_q)
        rows = full - first
        series = rows * (first + diagonal + 1) + rows * (rows - 1) // 2
        return self.batch * self.heads * (series + (self.seq_q - full) * self.seq_kv)


@dataclass(frozen=True, order=True)
class Bucket:
    """Lengths rounded up to powers of two."""

    seq_q: int
    seq_kv: int

    def distance(self, other: Bucket) -> float:
        """How far two buckets are apart, in doublings of either length."""
        return abs(math.log2(self.seq_q / other.seq_q)) + abs(math.log2(self.seq_kv / other.seq_kv))
