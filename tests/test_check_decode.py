"""What `check_decode` hands to a kernel, and what it sees of what a kernel does to caches."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.check import Accuracy
from flashgen.check_decode import SCRATCH, check_decode, prepare_decode
from flashgen.decode_cases import SMALL_DECODE_CASES
from flashgen.launch import arguments_of
from flashgen.space import Rejection
from flashgen.spec import Spec

STRIDED = SMALL_DECODE_CASES[2]
NAMES = ("q", "k", "v", "o", "lse")


@pytest.mark.parametrize("paged", [False, True])
def test_caches_keep_the_memory_between_their_rows_and_it_is_looked_at(paged: bool) -> None:
    spec = Spec("decode", 32, 32, "fp16", "bottom_right", paged=paged)
    call, true, _, _ = prepare_decode(spec, STRIDED, "cpu")
    assert STRIDED.strided and arguments_of(spec)[:7] == (*NAMES, *SCRATCH)
    touched = ""

    def launch(*given: Any, num_splits: int | None) -> None:
        assert num_splits == STRIDED.num_splits
        named = dict(zip(NAMES, given, strict=False))
        named["o"].copy_(true.o)
        named["lse"].copy_(true.lse)
        for name in ("k", "v"):
            cache = named[name]
            assert cache.stride() == call.given[name].stride() and cache.stride(2) >= 32 + 16
            # Behind the first row.
            behind = cache.as_strided((1,), (1,), cache.storage_offset() + 32)
            assert behind.isnan()
            if name == touched:
                behind.zero_()

    assert isinstance(check_decode(launch, spec, "cpu", (STRIDED,)), Accuracy)
    for touched in ("k", "v"):
        found = check_decode(launch, spec, "cpu", (STRIDED,))
        assert isinstance(found, Rejection) and f"the cache of {touched} is not" in found.reason
