"""Dropout of attention's probabilities: a caller's options, the seed of a call, and which probabilities stay.

Each is kept or dropped by a number of its own: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3") of the seed, the offset, the batch, the head, the row and the key, whatever kernel, tile and layout computes.
One counter serves rows r and r + 8 with keys k and k + 8, which tensor cores leave with one thread, also transposed:

    counter  (k // 16 * 8 + k % 8, r // 16 * 8 + r % 8, batch * heads + head, offset)
    key      the seed's low and high 32 bits
    word     2 * (r // 8 % 2) + k // 8 % 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.errors import InputError, UnsupportedError

# Of Philox4x32: what rounds multiply with, and what the key grows by.
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_INTS = (int, torch.SymInt)


class Dropout(NamedTuple):
    """O = sum over keys of kept * P / (1 - p) * V; the log-sum-exp is that of all scores.

    Attributes:
        p: how many probabilities are dropped, above 0 and at most 1, which leaves nothing.
        seed: int64 [2], (seed, offset) on the tensors' device; of the offset the low 32 bits count.
        first: which of the batch the tensors' first one is.
    """

    p: float
    seed: Tensor
    first: int = 0

    @property
    def threshold(self) -> int:
        """A probability stays if its word is at least this, from 0 to 2**32."""
        return round(self.p * 2**32)

    @property
    def scale(self) -> float:
        """What stays is multiplied with this; 0 where nothing does."""
        return 0.0 if self.threshold == 2**32 else 1 / (1 - self.p)

    @property
    def arguments(self) -> tuple[int, float, Tensor]:
        """What kernels take of it: a threshold below 2**32, the scale and the seed."""
        return min(self.threshold, _LOW), self.scale, self.seed


def dropout_from(p: object, seed: Tensor | None, like: Tensor) -> Dropout | None:
    """Judge a probability and a seed that was drawn; None where nothing is dropped.

    Raises:
        InputError: they are not what Dropout says, or not on the device of `like`.
    """
    probability = _probability(p)
    if probability == 0:
        return None
    return Dropout(probability, _checked(seed, like.device).contiguous())


def drawn(p: object, seed: object, generator: torch.Generator | None, device: torch.device) -> Tensor | None:
    """The seed of one call as a tensor on the device: what was given, or drawn there, without a wait for the device.

    Args:
        p: the probability; 0 needs no seed.
        seed: int64 [2], a pair (seed, offset), or None to draw one.
        generator: what to draw from; None is the device's default one.

    Raises:
        InputError: an argument is not that, or seed and generator are both given.
        UnsupportedError: torch.compile cannot trace it.
    """
    if _probability(p) == 0:
        return None
    if generator is not None and torch.compiler.is_compiling():
        raise UnsupportedError(
            "torch.compile knows no generator as an argument: draw from it outside, as dropout_seed."
        )
    if seed is None:
        if generator is not None and not _is_on(generator, device):
            raise InputError(f"generator must be a torch.Generator on {device}, as q is, but got {generator!r}.")
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)
    if generator is not None:
        raise InputError("dropout_seed and generator both say what to drop. Leave one of them out.")
    if isinstance(seed, Tensor):
        return _checked(seed, device)
    if not isinstance(seed, (tuple, list)) or len(seed) != 2 or any(type(each) not in _INTS for each in seed):
        raise InputError(f"dropout_seed must be int64 [2] or a pair of integers (seed, offset), but got {seed!r}.")
    if not (-(2**63) <= seed[0] < 2**63 and 0 <= seed[1] <= _LOW):
        raise InputError(f"dropout_seed needs a seed of 64 bits and an offset from 0 to 2**32 - 1, but got {seed!r}.")
    # Filled on the device: a copy would wait for it.
    return torch.stack([torch.full((), each, dtype=torch.int64, device=device) for each in seed])


def _is_on(generator: object, device: torch.device) -> bool:
    """Generators may name their kind of device alone, and draw for the one of a tensor then."""
    own = getattr(generator, "device", None)
    return isinstance(own, torch.device) and own.type == device.type and own.index in (None, device.index)


def _checked(seed: object, device: torch.device) -> Tensor:
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or tuple(seed.shape) != (2,):
        what = f"{seed.dtype} {list(seed.shape)}" if isinstance(seed, Tensor) else repr(seed)
        raise InputError(f"dropout_seed must be int64 [2], (seed, offset), but got {what}.")
    if seed.device != device:
        raise InputError(f"dropout_seed must be on q's device {device}, but got {seed.device}. Move it there.")
    return seed


def _probability(p: object) -> float:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise InputError(f"dropout_p must be a number from 0 to 1, but got {p!r}.")
    return float(p)


def kept(dropout: Dropout, heads: Sequence[int], seq_q: int, keys: range) -> Tensor:
    """Which probabilities stay: bool [*heads, seq_q, keys], where heads is (batch, heads)."""
    device = dropout.seed.device
    batch, count = heads
    columns = torch.arange(keys.start // 16 * 8, -(-keys.stop // 16) * 8, device=device)
    rows = torch.arange(-(-seq_q // 16) * 8, device=device)[:, None]
    first = dropout.first * count
    streams = torch.arange(first, first + batch * count, device=device)[:, None, None]
    seed, offset = dropout.seed.unbind()
    words = philox((columns, rows, streams, offset & _LOW), (seed & _LOW, seed >> 32 & _LOW))
    stays = torch.stack(words, -1) >= dropout.threshold
    # The word's bits of row and key go before the places within 8 rows and 8 keys.
    stays = stays.reshape(batch, count, len(rows) // 8, 8, len(columns) // 8, 8, 2, 2).permute(0, 1, 2, 6, 3, 4, 7, 5)
    stays = stays.reshape(batch, count, 2 * len(rows), 2 * len(columns))
    start = keys.start % 16
    return stays[:, :, :seq_q, start : start + len(keys)]


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words of 32 bits from each counter of four and key of two, all in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products wrap as they pass 2**63; all their 64 bits are right.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW
        c2, c3 = (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
    return c0, c1, c2, c3
