"""`torch.ops.flashgen.forward_modified` and `.backward_modified`: calls with modified scores as opaque operators.

One pair for all options, apart from the plain one, whose calls stay short.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashgen.autograd import fake_forward, is_direct, no_second_derivative, save_nothing
from flashgen.errors import UnsupportedError
from flashgen.flat import FLAT, FORWARD_OPTIONS, TENSORS, options_from
from flashgen.modified import attend, gradients
from flashgen.modified_vmap import map_backward, map_forward
from flashgen.tensors import empty_gradient


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
    options = dict(zip(FLAT, inputs[FORWARD_OPTIONS:], strict=True))
    ctx.causal, ctx.scale, ctx.layout, ctx.with_lse = inputs[3:7]
    ctx.numbers = {name: options[name] for name in FLAT if name not in TENSORS}
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *(options[name] for name in TENSORS))


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.with_lse:
        raise UnsupportedError(
            "gradients of torch.ops.flashgen.forward_modified need the log-sum-exp: pass return_lse=True."
        )
    found: dict[str, Tensor | None] = {}
    if do is not None or dlse is not None:
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        options = dict(zip(TENSORS, tensors, strict=True)) | ctx.numbers
        of_bias, of_slopes, of_sinks = (
            ctx.needs_input_grad[FORWARD_OPTIONS + FLAT.index(name)] for name in ("bias", "alibi_slopes", "sinks")
        )
        # With a graph of the backward, which torch.func always makes, it would be differentiated again.
        operator: Any = ModifiedGradients.apply if torch.is_grad_enabled() else _run_backward
        given = (options[name] for name in FLAT[:-1])
        dq, dk, dv, dbias, dslopes = operator(
            q, k, v, o, lse, do, dlse, ctx.causal, ctx.scale, ctx.layout, *given, of_bias, of_slopes
        )
        found = {"q": dq, "k": dk, "v": dv}
        found |= {
            name: each for name, each, of in (("bias", dbias, of_bias), ("alibi_slopes", dslopes, of_slopes)) if of
        }
        if of_sinks:
            found["sinks"] = sinks_gradient(options["sinks"], o, lse, do, dlse, ctx.layout)
    return tuple(found.get(name) for name in ("q", "k", "v", *[""] * 5, *FLAT))


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


forward_modified.register_vmap(map_forward)
backward_modified.register_vmap(map_backward)


class Modified(torch.autograd.Function):
    """Calls that are differentiated, but for those that torch.compile traces."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.forward_modified`."""
        return run(*inputs)

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    vmap = staticmethod(map_forward)


class ModifiedGradients(torch.autograd.Function):
    """Their gradients, which are not differentiated again."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Arguments and results of `torch.ops.flashgen.backward_modified`."""
        return _run_backward(*inputs)

    setup_context = staticmethod(save_nothing)
    backward = staticmethod(no_second_derivative)
    vmap = staticmethod(map_backward)
