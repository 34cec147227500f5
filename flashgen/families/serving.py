"""What the template of decode names: parameters of its kernel and arguments of its functions, for every cache."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.families.modified import derived as of_features
from flashgen.serving import MAX_SPLITS
from flashgen.spec import Spec

# For the docstring of `launch`.
_DESCALES_DESCRIBED = {
    "tensor": "descale_k, descale_v: numbers that k and v are multiplied by.",
    "head": "descale_k, descale_v: fp32 [batch, kv_heads], multiply k and v; any strides.",
    "token": "descale_k, descale_v: fp32, one for each token of a head: as k without its last dimension; any strides.",
}
_PAGED = (
    "k [pages, kv_heads, page_size, {d}], v [pages, kv_heads, page_size, {dv}], block_table int32 [batch, pages of a",
    "sequence]: key j of it is key j % page_size of page block_table[.., j // page_size].",
)
_CONTIGUOUS = ("k [batch, kv_heads, capacity, {d}], v [batch, kv_heads, capacity, {dv}].",)
_LENGTHS = ("cache_seqlens int32 [batch], keys in the cache; the rows of q stand at the end of the keys.",)
_APPENDED = (
    "k_new [batch, kv_heads, new, {d}], v_new [batch, kv_heads, new, {dv}]: written behind the cache's keys, as far as",
    "there is room, and seen as such.",
)
_VARLEN = (
    "cu_seqlens_q: int32 [sequences + 1], cumulative; total_q: tokens that there are. q, o and what is new are views",
    "in which as many sequences of the longest length start at the first token; lse [heads, total_q].",
)


def planned(spec: Spec) -> tuple[str, ...]:
    """What a kernel is bound to the layout of, as `plan` takes it."""
    return ("q", "k", "v", "o", *(name for name, _ in _strided(spec)))


def _strided(spec: Spec) -> list[tuple[str, str]]:
    """What beside q, k, v and o has strides, and for which dimensions."""
    of_descales = {"tensor": "", "head": "bh", "token": "bhs"}[spec.descale]
    found = [("k_new", "bhs"), ("v_new", "bhs")] * spec.appended + [("block_table", "b")] * spec.paged
    found += [("descale_k", of_descales), ("descale_v", of_descales)] * bool(of_descales)
    return found + [("alibi_slopes", "bh")] * spec.alibi


def _stride(name: str, axis: str) -> str:
    """Its name in the kernel; of those that begin with `stride_` the compiler knows what aligned rows imply."""
    if name.endswith("_new"):
        return f"stride_{name}{axis}"
    return f"{name.removeprefix('block_').removesuffix('_slopes')}_stride_{axis}"


def derived(spec: Spec) -> Mapping[str, object]:
    """What the template names: as `flashgen.families.modified.derived`, and what has to do with the cache.

    `caching`: what the loop over keys takes for it; `finishing`: what the function that writes a row's results takes.
    `numbers`: sizes beyond the usual ones, `numbers_given` how `plan` finds them. `planned`: what `plan` takes;
    `strided_sizes`: of which of them it passes how many strides. `sized`: what says how large a call is, `capacity` how
    many keys a sequence may have.
    """
    named = of_features(spec.plain_of_cache)
    descales = ["descale_k", "descale_v"] if spec.cache != "none" else []
    table, new = ["block_table"] if spec.paged else [], ["k_new", "v_new"] if spec.appended else []
    lines = [*(_PAGED if spec.paged else _CONTIGUOUS), *_LENGTHS, *(_APPENDED if spec.appended else ())]
    described = [line.format(d=spec.head_dim, dv=spec.head_dim_v) for line in lines]
    described += [_DESCALES_DESCRIBED[spec.descale]] if descales else []
    scaling = [f"{name}: tl.float32" if spec.descale == "tensor" else name.upper() for name in descales]
    pointers = ["CACHE_SEQLENS", *(name.upper() for name in (*table, *new)), *scaling]
    new_count = spec.appended and not spec.varlen
    return {
        **named,
        "pointers": pointers + _listed(named["pointers"]) + (["CU_SEQLENS_Q", "total_q: tl.int32"] * spec.varlen),
        "strides": [f"{_stride(name, axis)}: tl.int64" for name, axes in _strided(spec) for axis in axes],
        "modifiers": ["cache_seqlens", *table, *new, *spec.modifiers],
        "described": described + _listed(named["described"]) + (list(_VARLEN) * spec.varlen),
        "caching": _caching(spec),
        "finishing": ["O_head", "stride_oh", "stride_os", "LSE", "lse_place", "group", "seq_q", "scale"]
        + ["total_q"] * spec.varlen
        + ["SINKS_head"] * spec.sinks
        + ["descale_v"] * (spec.cache != "none" and spec.descale != "token"),
        "max_splits": MAX_SPLITS,
        "numbers": ["pages: tl.int32"] * spec.paged + ["new: tl.int32"] * new_count,
        "numbers_given": ["k.shape[0]"] * spec.paged + ["k_new.shape[2]"] * new_count,
        "planned": list(planned(spec)),
        "strided_sizes": [(name, len(axes)) for name, axes in _strided(spec)],
        "sized": ["q", "k", *table],
        "capacity": "block_table.shape[1] * k.shape[2]" if spec.paged else "k.shape[2]",
    }


def _listed(names: object) -> list[str]:
    assert isinstance(names, list)
    return names


def _caching(spec: Spec) -> list[str]:
    found = ["TABLE_row", "pages", "stride_kb", "stride_vb"] if spec.paged else []
    if spec.appended:
        found += ["K_NEW_head", "stride_k_news", "V_NEW_head", "stride_v_news", "stored"]
    if spec.cache != "none" and spec.descale != "token":
        found += ["descale_k"]
    if spec.descale == "token":
        places = ("b", "s") if spec.paged else ("s",)
        for name in ("k", "v"):
            found += [f"DESCALE_{name.upper()}_head", *(f"descale_{name}_stride_{axis}" for axis in places)]
    return found
