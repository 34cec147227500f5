"""How the columns of one head are held in tiles."""

from __future__ import annotations

import functools

from flashgen.problem import next_power_of_2

# Up to as many columns a head is one tile.
MAX_TILE_WIDTH = 256


@functools.cache
def parts_of(width: int, least: int = 16) -> tuple[tuple[int, int], ...]:
    """The tiles that hold the columns of one head: (first column, width), widths powers of two of at least `least`.

    16 is tl.dot's minimum. Wide heads take two where that saves columns: 576 is 512 and 64, not 1024.
    """
    whole = max(least, next_power_of_2(width))
    first = whole // 2
    rest = max(least, next_power_of_2(max(1, width - first)))
    return ((0, first), (first, rest)) if width > MAX_TILE_WIDTH and rest < first else ((0, whole),)
