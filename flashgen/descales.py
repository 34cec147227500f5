"""What fp8 inputs are multiplied by: a caller's numbers, judged and made alike for kernels, and inputs in wider types.

fp8 is e4m3: three bits of mantissa, up to 448, no infinities. Whoever quantises a tensor divides it by a number first,
so that its largest value fits; attention multiplies by that number again, in fp32: the true q is q * descale_q.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flashgen.errors import InputError, UnsupportedError

FP8 = torch.float8_e4m3fn
# Tokens that share one number of a descale by blocks; tiles of keys of every kernel divide it.
BLOCK = 128

Number: TypeAlias = "Tensor | float"


class Descales(NamedTuple):
    """The numbers of q, k and v, none of them negative; a negative or NaN one makes NaN of what it multiplies.

    As a caller gives them each is None, a number, or fp32 that broadcasts to [heads], [batch, heads] or [batch, heads,
    blocks of BLOCK tokens], with kv_heads for k and v. As kernels take them, all three are numbers, or fp32 [batch,
    heads], or [batch, heads, blocks].
    """

    q: Number | None = None
    k: Number | None = None
    v: Number | None = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return any(each is not None for each in self)


def descales_from(
    heads: tuple[int, int, int], lengths: tuple[int, int], like: Tensor, given: Descales, blocks: bool = True
) -> Descales:
    """Judge the descales of one call and bring them into the form of kernels; views where that is possible.

    Args:
        heads: batch, heads and kv_heads of the call.
        lengths: seq_q and seq_kv.
        like: q, which says the device.
        given: what the caller gave.
        blocks: whether each block of tokens may have a number of its own.

    Raises:
        InputError: a descale is not what Descales says, or does not fit the call.
    """
    batch, q_heads, kv_heads = heads
    whole = [(batch, count, -(-length // BLOCK)) for count, length in zip((q_heads, kv_heads), lengths, strict=True)]
    shapes = dict(zip(given._fields, (whole[0], whole[1], whole[1]), strict=True))
    numbers = {name: _judged(name, value, like, shapes[name], blocks) for name, value in given._asdict().items()}
    ranks = [each.dim() for each in numbers.values() if isinstance(each, Tensor)]
    if not ranks:
        return Descales(**numbers)
    alike: dict[str, Number] = {}
    for name, value in numbers.items():
        tensor = value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float32, device=like.device)
        if max(ranks) < 3:
            alike[name] = tensor.expand(shapes[name][:2])
        else:
            alike[name] = (tensor if tensor.dim() == 3 else tensor.unsqueeze(-1)).expand(shapes[name])
    return Descales(**alike)


def _judged(name: str, value: object, like: Tensor, whole: tuple[int, int, int], blocks: bool) -> Number:
    return judged(
        f"descale_{name}", value, like, [(), whole[1:2], whole[:2], *([whole] if blocks else [])],
        f"a head, a head of one of the batch{f', or a block of {BLOCK} tokens' if blocks else ''}",
    )  # fmt: skip


def judged(name: str, value: object, like: Tensor, allowed: list[tuple[int, ...]], words: str) -> Number:
    """One descale, of a shape that broadcasts to the one of `allowed` with its rank; `words` say what these stand for.

    Raises:
        InputError: it is something else.
    """
    if value is None:
        return 1.0
    if not isinstance(value, Tensor):
        # As with the scale, what products of three of them can be must fit into fp32.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 2.0**60:
            raise InputError(
                f"{name} must be None, an fp32 tensor or a number from 0 to {2.0**60:.1e}, but got {value!r}."
            )
        return float(value)
    if value.dtype != torch.float32 or value.device != like.device:
        raise InputError(
            f"{name} must be float32 on q's device {like.device}, but got {value.dtype} on {value.device}. "
            "Use value.to(q.device, torch.float32)."
        )
    wanted = next((shape for shape in allowed if len(shape) == value.dim()), None)
    if wanted is None or any(size not in (1, most) for size, most in zip(value.shape, wanted, strict=True)):
        listed = ", ".join(str(list(shape)) for shape in allowed)
        raise InputError(
            f"{name} must broadcast to one of {listed}, but got {list(value.shape)}: one number for all of it, {words}."
        )
    return value


def check_descales(q: Tensor, descales: Descales | None) -> None:
    """Refuse descales of other inputs than fp8."""
    if descales is not None and descales.given and q.dtype != FP8:
        raise InputError(
            f"descale_q, descale_k and descale_v are for float8_e4m3fn inputs, but got {q.dtype}. Multiply q, k and v "
            "by them."
        )


def refuse_gradients(*tensors: Tensor) -> None:
    """Refuse to differentiate by anything of a call with fp8 inputs."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise UnsupportedError(
            "attention of fp8 inputs has no backward, but a tensor requires its gradient. Call it under "
            "torch.no_grad(), detach() the tensors, or pass q, k and v in 16 bits."
        )


def dequantised(tensor: Tensor, descale: Number, dtype: torch.dtype) -> Tensor:
    """fp8 [batch, heads, seq, head_dim] times its descale, as kernels take that, in a wider dtype."""
    wide = tensor.to(dtype)
    if not isinstance(descale, Tensor):
        return wide * descale
    numbers = torch.where(descale >= 0, descale, math.nan).to(dtype)
    if numbers.dim() == 2:
        return wide * numbers[..., None, None]
    return wide * numbers.repeat_interleave(BLOCK, 2)[:, :, : tensor.shape[2], None]
