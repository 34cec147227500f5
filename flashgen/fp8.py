"""`flashgen.attention` of fp8 inputs, forward only, and the operator that tracers know it by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.autograd import fake_forward, is_direct, refuse_tangents
from flashgen.descales import Descales, Number, check_descales, refuse_gradients
from flashgen.errors import UnsupportedError
from flashgen.flat import flat, options_from
from flashgen.modified import attend, judged
from flashgen.modifiers import Options
from flashgen.tensors import causal_from


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    layout: str,
    return_lse: bool,
    family: str | None,
    options: Options,
    descales: Descales,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flashgen.attention` of fp8 inputs, or with descales, which no others have; arguments as given there.

    Raises:
        InputError: the arguments do not fit together.
        UnsupportedError: no kernel does this, or something requires its gradient.
    """
    check_descales(q, descales)
    tensors = [each for each in (q, k, v, *options, *options.mod_tensors, *descales) if isinstance(each, Tensor)]
    refuse_gradients(*tensors)
    if forward_ad._current_level >= 0:
        refuse_tangents(*tensors)
    mask = causal_from(causal)
    if is_direct(*tensors):
        out, lse = attend(q, k, v, mask, scale, layout, return_lse, family, options, descales)
        return (out, lse) if return_lse else out
    if not torch.compiler.is_compiling():
        # What an operator would say of misfits is less clear.
        judged(q, k, v, scale, layout, family, options, descales)
    numbers = [float(each) if isinstance(each, (int, float)) else None for each in descales]
    given = [each if isinstance(each, Tensor) else None for each in descales]
    out, lse = torch.ops.flashgen.forward_fp8(
        q, k, v, mask, scale, layout, return_lse, family, *flat(options), *given, *numbers
    )
    return (out, lse) if return_lse else out


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
    descale_q: Tensor | None,
    descale_k: Tensor | None,
    descale_v: Tensor | None,
    number_q: float | None,
    number_k: float | None,
    number_v: float | None,
) -> tuple[Tensor, Tensor]:
    """(output, lse), lse empty when it is not wanted; of each descale the tensor or the number, or neither."""
    options = options_from(
        softcap, alibi_slopes, bias, window_left, window_right, mask, segment_ids_q, segment_ids_kv, dropout_p,
        dropout_seed, score_mod, mask_mod, mod0, mod1, mod2, mod3, sinks,
    )  # fmt: skip
    pairs = ((descale_q, number_q), (descale_k, number_k), (descale_v, number_v))
    descales: list[Number | None] = [number if tensor is None else tensor for tensor, number in pairs]
    return attend(q, k, v, causal, scale, layout, return_lse, family, options, Descales(*descales))


forward_fp8 = torch.library.custom_op("flashgen::forward_fp8", mutates_args=())(compute)
forward_fp8.register_fake(fake_forward)


def _map(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    raise UnsupportedError(
        "flashgen has no vmap over attention of fp8 inputs. Make the mapped dimension part of the batch."
    )


forward_fp8.register_vmap(_map)
