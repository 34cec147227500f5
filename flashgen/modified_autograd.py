"""`torch.ops.flashgen.forward_modified` and `.backward_modified`: calls with modified scores as opaque operators.

One pair for all options, apart from the plain one, whose calls stay short.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from flashgen.autograd import fake_forward, folded, is_direct, looped, no_second_derivative, save_nothing
from flashgen.errors import UnsupportedError
from flashgen.expressions.given import MAX_TENSORS
from flashgen.modified import attend, gradients
from flashgen.modifiers import Options, window_sides
from flashgen.tensors import empty_gradient

# Where the options begin among the arguments of either operator, and the ranks of those that have a batch.
_FORWARD_OPTIONS, _BACKWARD_OPTIONS = 8, 10
_RANKS = {"alibi_slopes": 2, "bias": 4, "mask": 4, "segment_ids_q": 2, "segment_ids_kv": 2}
# A list of tensors would be beyond torch's older vmap, by which it batches gradients.
_MODS = tuple(f"mod{index}" for index in range(MAX_TENSORS))
_FLAT = (
    "softcap", "alibi_slopes", "bias", "window_left", "window_right", "mask", "segment_ids_q", "segment_ids_kv",
    "dropout_p", "dropout_seed", "score_mod", "mask_mod", *_MODS, "sinks",
)  # fmt: skip
_TENSORS = (*_RANKS, "dropout_seed", *_MODS, "sinks")
# What of a call depends on the place in its own batch.
_OWN = tuple(_FLAT.index(name) for name in ("dropout_seed", "score_mod", "mask_mod"))


def flat(options: Options) -> tuple[Any, ...]:
    """Options as the operators take them, the window as two numbers."""
    known = options._asdict() | dict(zip(("window_left", "window_right"), window_sides(options.window), strict=True))
    known |= itertools.zip_longest(_MODS, options.mod_tensors)
    return tuple(known[name] for name in _FLAT)


def options_from(*given: Any) -> Options:
    """Back from `flat`, of which the sinks may be left out."""
    known = dict(zip(_FLAT, given, strict=False))
    window = known.pop("window_left"), known.pop("window_right")
    tables = [known.pop(name) for name in _MODS]
    return Options(window=window, mod_tensors=[each for each in tables if each is not None], **known)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    window_left: int | None,
    window_right: int | None,
    mask: Tensor | None,
    segment_ids_q: Tensor | None,
    segment_ids_kv: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    score_mod: str | None,
    mask_mod: str | None,
    mod0: Tensor | None,
    mod1: Tensor | None,
    mod2: Tensor | None,
    mod3: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(output, lse), lse empty when it is not wanted; gradients need it.

    Options as `flashgen.attention` takes them, expressions in canonical form.
    """
    options = options_from(
        softcap, alibi_slopes, bias, window_left, window_right, mask, segment_ids_q, segment_ids_kv, dropout_p,
        dropout_seed, score_mod, mask_mod, mod0, mod1, mod2, mod3, sinks,
    )  # fmt: skip
    return attend(q, k, v, causal, scale, layout, return_lse, family, options)


forward_modified = torch.library.custom_op("flashgen::forward_modified", mutates_args=())(compute)
forward_modified.register_fake(fake_forward)


def compute_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float | None,
    layout: str,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    window_left: int | None,
    window_right: int | None,
    mask: Tensor | None,
    segment_ids_q: Tensor | None,
    segment_ids_kv: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    score_mod: str | None,
    mask_mod: str | None,
    mod0: Tensor | None,
    mod1: Tensor | None,
    mod2: Tensor | None,
    mod3: Tensor | None,
    of_bias: bool,
    of_slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dslopes) of what `forward_modified` computed, both last ones empty when not wanted."""
    options = options_from(
        softcap, alibi_slopes, bias, window_left, window_right, mask, segment_ids_q, segment_ids_kv, dropout_p,
        dropout_seed, score_mod, mask_mod, mod0, mod1, mod2, mod3,
    )  # fmt: skip
    return gradients(q, k, v, o, lse, do, dlse, causal, scale, layout, options, of_bias, of_slopes)


backward_modified = torch.library.custom_op("flashgen::backward_modified", mutates_args=())(compute_gradients)


@backward_modified.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dslopes, dbias = (
        like.new_empty(like.shape) if wanted and like is not None else q.new_empty(0)
        for like, wanted in zip(others[8:10], (others[-1], others[-2]), strict=True)
    )
    return empty_gradient(q), empty_gradient(k), empty_gradient(v), dbias, dslopes


def run(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`forward_modified`, past the operator where nobody needs to see it."""
    tensors = (each for each in inputs if isinstance(each, Tensor))
    results: tuple[Tensor, Tensor] = (compute if is_direct(*tensors) else torch.ops.flashgen.forward_modified)(*inputs)
    return results


def _run_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (each for each in inputs if isinstance(each, Tensor))
    operator: Any = compute_gradients if is_direct(*tensors) else torch.ops.flashgen.backward_modified
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = operator(*inputs)
    return results


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    options = dict(zip(_FLAT, inputs[_FORWARD_OPTIONS:], strict=True))
    ctx.causal, ctx.scale, ctx.layout, ctx.with_lse = inputs[3:7]
    ctx.numbers = {name: options[name] for name in _FLAT if name not in _TENSORS}
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *(options[name] for name in _TENSORS))


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.with_lse:
        raise UnsupportedError(
            "gradients of torch.ops.flashgen.forward_modified need the log-sum-exp: pass return_lse=True."
        )
    found: dict[str, Tensor | None] = {}
    if do is not None or dlse is not None:
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        options = dict(zip(_TENSORS, tensors, strict=True)) | ctx.numbers
        of_bias, of_slopes, of_sinks = (
            ctx.needs_input_grad[_FORWARD_OPTIONS + _FLAT.index(name)] for name in ("bias", "alibi_slopes", "sinks")
        )
        # With a graph of the backward, which torch.func always makes, it would be differentiated again.
        operator: Any = ModifiedGradients.apply if torch.is_grad_enabled() else _run_backward
        given = (options[name] for name in _FLAT[:-1])
        dq, dk, dv, dbias, dslopes = operator(
            q, k, v, o, lse, do, dlse, ctx.causal, ctx.scale, ctx.layout, *given, of_bias, of_slopes
        )
        found = {"q": dq, "k": dk, "v": dv}
        found |= {
            name: each for name, each, of in (("bias", dbias, of_bias), ("alibi_slopes", dslopes, of_slopes)) if of
        }
        if of_sinks:
            found["sinks"] = sinks_gradient(options["sinks"], o, lse, do, dlse, ctx.layout)
    return tuple(found.get(name) for name in ("q", "k", "v", *[""] * 5, *_FLAT))


def sinks_gradient(sinks: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, layout: str) -> Tensor:
    """A sink is a key with value 0: its probability times (0 - delta), over batch and rows.

    delta = rowsum(dO * O) - dLSE (FlashAttention-2, Dao 2023, algorithm 2).
    """
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)
    delta = delta if layout == "bhsd" else delta.transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    # A sink of -inf adds nothing, not even where no key is seen.
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
    return -(p * delta).sum((0, 2)).to(sinks.dtype)


forward_modified.register_autograd(_differentiate, setup_context=_save)
backward_modified.register_autograd(no_second_derivative, setup_context=save_nothing)


def _fold_option(tensor: Tensor, dim: int | None, rank: int, size: int, batch: int) -> Tensor:
    """An option of up to `rank` dimensions, broadcast to the whole batch, of which its mapped one becomes a part."""
    whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    whole = whole.reshape(size, *(1,) * (rank + 1 - whole.dim()), *whole.shape[1:])
    return whole.expand(size, batch, *whole.shape[2:]).flatten(0, 1)


def _fold(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...], first: int) -> list[Any]:
    """All inputs, without a mapped dimension: q and its like come first, options from `first` on."""
    batch = inputs[0].shape[0 if in_dims[0] != 0 else 1]
    mains = 7 if first == _BACKWARD_OPTIONS else 3
    results = [*folded(info.batch_size, in_dims[:mains], inputs[:mains]), *inputs[mains:]]
    for place, name in enumerate(_FLAT[: len(inputs) - first], first):
        given = inputs[place]
        if name in _RANKS and given is not None:
            results[place] = _fold_option(given, in_dims[place], _RANKS[name], info.batch_size, batch)
    return results


def _map_forward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
    # What depends on a call's own batch, or is shared by all of it, goes call by call, with seeds that vmap has drawn.
    own = any(inputs[_FORWARD_OPTIONS + place] is not None for place in _OWN)
    if own or in_dims[_FORWARD_OPTIONS + _FLAT.index("sinks")] is not None:
        return looped(info.batch_size, in_dims, inputs, torch.ops.flashgen.forward_modified)
    o, lse = torch.ops.flashgen.forward_modified(*_fold(info, in_dims, inputs, _FORWARD_OPTIONS))
    with_lse = inputs[6]
    return (
        (o.unflatten(0, (info.batch_size, -1)), lse.unflatten(0, (info.batch_size, -1)) if with_lse else lse),
        (0, 0 if with_lse else None),
    )


def _map_backward(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], Any]:
    if any(inputs[_BACKWARD_OPTIONS + place] is not None for place in _OWN) or inputs[-1]:
        return looped(info.batch_size, in_dims, inputs, torch.ops.flashgen.backward_modified)
    *main, dbias, dslopes = torch.ops.flashgen.backward_modified(*_fold(info, in_dims, inputs, _BACKWARD_OPTIONS))
    results = [result.unflatten(0, (info.batch_size, -1)) for result in main]
    place = _BACKWARD_OPTIONS + _FLAT.index("bias")
    if inputs[place] is None or not inputs[-2]:
        return (*results, dbias, dslopes), (0, 0, 0, None, None)
    # Back from the whole batch to one gradient of the caller's shape for each mapped call.
    shape = [size for dim, size in enumerate(inputs[place].shape) if dim != in_dims[place]]
    each = dbias.unflatten(0, (info.batch_size, -1))
    padded = (info.batch_size, *(1,) * (4 - len(shape)), *shape)
    each = each.sum_to_size(padded).reshape(info.batch_size, *shape)
    return (*results, each, dslopes), (0, 0, 0, 0, None)


forward_modified.register_vmap(_map_forward)
backward_modified.register_vmap(_map_backward)


class Modified(torch.autograd.Function):
    """Calls that are differentiated, but for those that torch.compile traces."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.forward_modified`."""
        return run(*inputs)

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    vmap = staticmethod(_map_forward)


class ModifiedGradients(torch.autograd.Function):
    """Their gradients, which are not differentiated again."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.backward_modified`."""
        return _run_backward(*inputs)

    setup_context = staticmethod(save_nothing)
    backward = staticmethod(no_second_derivative)
    vmap = staticmethod(_map_backward)
