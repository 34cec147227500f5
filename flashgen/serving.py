"""One call of `attention_kvcache`: its arguments, judged, in the form in which kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen import descales
from flashgen.caches import Cache, check
from flashgen.descales import Number
from flashgen.errors import InputError
from flashgen.modifiers import Modifiers, Options, check_cap, modifiers_from
from flashgen.problem import Problem
from flashgen.tensors import check_device, check_scale, with_contiguous_rows

# Programs that may share the keys of a row.
MAX_SPLITS = 128


class Call(NamedTuple):
    """The arguments, not judged yet; `causal` is a Spec's."""

    q: Tensor
    cache: Cache
    causal: str
    scale: float | None
    return_lse: bool
    num_splits: int | None
    family: str | None
    options: Options

    @property
    def tensors(self) -> list[Tensor]:
        """All that are given."""
        given = (self.q, *self.cache, self.options.alibi_slopes, self.options.sinks)
        return [each for each in given if isinstance(each, Tensor)]

    def with_rows(self) -> Call:
        """The same with copies of what has a strided last dimension; caches have none, and options may have."""
        given = self.cache._asdict()
        copies: dict[str, Any] = {
            name: with_contiguous_rows(given[name]) for name in _COPIED if given[name] is not None
        }
        return self._replace(q=with_contiguous_rows(self.q), cache=self.cache._replace(**copies))


# Of Cache.
_COPIED = ("seqlens", "table", "new_k", "new_v", "cu_seqlens_q")


def judged(call: Call) -> tuple[Problem, Modifiers]:
    """The sizes and options of a call in the form in which kernels take them; all else about it is checked as well.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: nothing runs on this device.
    """
    q, cache = call.q, call.cache
    problem = check(q, cache)
    check_scale(call.scale, q.dtype)
    check_device(q.device, call.family)
    check_splits(call.num_splits)
    modifiers = modifiers_from((problem.batch, problem.heads, problem.seq_q, problem.seq_kv), q, call.options)
    check_cap(call.options, call.scale)
    descales_of(cache, problem.batch)
    return problem, modifiers


def check_splits(num_splits: object) -> None:
    """Refuse more splits than a kernel has room for, or none; None means as many as fill the GPU."""
    if num_splits is not None and (type(num_splits) is not int or not 1 <= num_splits <= MAX_SPLITS):
        raise InputError(f"num_splits must be from 1 to {MAX_SPLITS}, or None, but got {num_splits!r}.")


def descales_of(cache: Cache, batch: int) -> tuple[Number, Number]:
    """Both descales in one form: numbers, or views [batch, kv_heads], or [batch, kv_heads, seq_kv] by token, with
    pages and page_size for batch and seq_kv where the caches are paged.

    Raises:
        InputError: one of them is something else.
    """
    places = tuple(cache.k.shape[:3])
    heads = places[2]
    shapes = [(), (heads,), (batch, heads), places]
    found = [
        descales.judged(name, value, cache.k, shapes, "a head, a head of one of the batch, or a token of the cache")
        for name, value in (("descale_k", cache.descale_k), ("descale_v", cache.descale_v))
    ]
    ranks = [each.dim() for each in found if isinstance(each, Tensor)]
    if not ranks:
        return found[0], found[1]
    if {2, 3} <= set(ranks) and cache.table is not None:
        raise InputError(
            "descale_k and descale_v of pages must both have numbers by token, or neither may have them by batch and "
            f"head, but got ranks {ranks[0]} and {ranks[1]}. Write the numbers of heads to every token."
        )
    alike = []
    for each in found:
        tensor = each if isinstance(each, Tensor) else torch.full((), each, dtype=torch.float32, device=cache.k.device)
        if max(ranks) < 3:
            alike.append(tensor.expand(batch, heads))
        else:
            by_token = tensor.unsqueeze(1) if tensor.dim() == 2 else tensor
            alike.append(by_token.expand(places).transpose(1, 2))
    return alike[0], alike[1]
