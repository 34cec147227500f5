"""What a call does to its scaled scores before the softmax: the caller's options, judged and made into Modifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen import judging
from flashgen.descales import FP8, Descales
from flashgen.dropout import Dropout, dropout_from
from flashgen.errors import InputError
from flashgen.expressions.given import judge

# Whole numbers up to here are exact in fp32.
EXACT = 2**24


def _as_bytes(value: Any) -> Any:
    return value.view(torch.uint8) if isinstance(value, Tensor) and value.dtype == torch.bool else value


class Modifiers(NamedTuple):
    """What happens to scores = q k^T * scale, in this order; None where nothing does.

    Row i and key j are placed by their distance d = j - (i + seq_kv - seq_q), or j - i with causal="top_left".

    Attributes:
        softcap: cap * tanh(scores / cap) (Gemma 2, section 2).
        alibi_slopes: fp32 [batch, heads]; slope * |j - (i + seq_kv - seq_q)| is subtracted (Press et al. 2022).
        bias: [batch, heads, seq_q, seq_kv], added.
        window: (left, right): -left <= d <= right is seen, with causal also d <= 0; judging.UNLIMITED is an open side.
        mask: bool [batch, heads, seq_q, seq_kv]; True is seen, as in SDPA.
        segment_ids_q: int32 [batch, seq_q]; a row sees the keys with its own id.
        segment_ids_kv: int32 [batch, seq_kv].
        dropout: which probabilities are dropped, after the softmax.
        sinks: fp32 [heads], or fp64 for fp64 inputs: one more logit of every row, which has no value (GPT-OSS). The
            log-sum-exp includes it: that of a row that sees no key is the sink.
        score_mod: canonical expression of the scaled scores (flashgen.expressions), before all of this.
        mask_mod: canonical condition for what is seen.
        mod_tensors: what they read, contiguous.
        descales: what fp8 inputs are multiplied by, before all that.
    """

    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    window: tuple[int, int] | None = None
    mask: Tensor | None = None
    segment_ids_q: Tensor | None = None
    segment_ids_kv: Tensor | None = None
    dropout: Dropout | None = None
    sinks: Tensor | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    mod_tensors: tuple[Tensor, ...] = ()
    descales: Descales | None = None

    def arguments(self, causal: str) -> tuple[Tensor | float, ...]:
        """What kernels take of it: descales, then every other field that there is, in order.

        The window is two numbers, bool are bytes. Expressions are part of the kernel; their tensors come with their
        sizes.
        """
        found = [] if self.descales is None else [each for each in self.descales if each is not None]
        for value in self:
            if isinstance(value, Dropout):
                found += value.arguments
            elif value is self.window is not None:
                left, right = self.window
                found += [left, right if causal == "none" else 0]
            elif isinstance(value, (Tensor, float)):
                found.append(_as_bytes(value))
        for tensor in self.mod_tensors:
            found += [_as_bytes(tensor), *tensor.shape]
        return tuple(found)

    def to(self, change: Callable[[Tensor], Tensor]) -> Modifiers:
        """The same with every floating tensor changed, e.g. to float64."""
        floating: dict[str, Any] = {
            name: change(value)
            for name, value in self._asdict().items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return self._replace(**floating)


NOTHING = Modifiers()


def kind_of(value: object) -> object:
    """What of a modifier kernels are compiled for, or bound to."""
    if isinstance(value, Tensor):
        return value.stride(), value.dtype, value.data_ptr() & 15
    return value if isinstance(value, str) else value is None


class Options(NamedTuple):
    """The same as a caller gives it, not judged yet.

    Attributes:
        softcap: a positive number.
        alibi_slopes: [heads] or [batch, heads].
        bias: of q's dtype or fp32, broadcastable to [batch, heads, seq_q, seq_kv].
        window: (left, right), each a number of keys or None.
        mask: bool, broadcastable likewise.
        segment_ids_q, segment_ids_kv: integers [batch, seq_q] and [batch, seq_kv]; both or neither.
        dropout_p: from 0 to 1.
        dropout_seed: int64 [2]; flashgen.dropout.drawn makes it of what a caller gives.
        sinks: [heads].
        score_mod, mask_mod, mod_tensors: as flashgen.expressions.given.written returns them.
    """

    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    window: tuple[int | None, int | None] | None = None
    mask: Tensor | None = None
    segment_ids_q: Tensor | None = None
    segment_ids_kv: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    sinks: Tensor | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    mod_tensors: Sequence[Tensor] = ()


def modifiers_from(sizes: tuple[int, int, int, int], like: Tensor, options: Options) -> Modifiers:
    """Judge the options of one call and bring them into the form of Modifiers; views where that is possible.

    Args:
        sizes: batch, heads, seq_q and seq_kv of the call.
        like: q, which says dtype and device.
        options: what the caller gave.

    Raises:
        InputError: an option is not what Options says, or does not fit the call.
    """
    batch, heads, seq_q, seq_kv = sizes
    for name in ("alibi_slopes", "score_mod"):
        if getattr(options, name) is not None and max(seq_q, seq_kv) >= EXACT:
            raise InputError(f"{name} needs lengths below {EXACT}, but got {seq_q} and {seq_kv}.")
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    slopes = judging.floats("alibi_slopes", options.alibi_slopes, like)
    if slopes is not None:
        if tuple(slopes.shape) not in ((heads,), (batch, heads)):
            raise InputError(f"alibi_slopes must be [{heads}] or [{batch}, {heads}], but got {tuple(slopes.shape)}.")
        slopes = slopes.to(wide).expand(batch, heads)
    added = judging.floats("bias", options.bias, like)
    own = torch.bfloat16 if like.dtype == FP8 else like.dtype
    if added is not None and added.dtype not in (own, torch.float32):
        raise InputError(f"bias must be {own}, as the output, or torch.float32, but got {added.dtype}. Cast it.")
    sink = judging.floats("sinks", options.sinks, like)
    if sink is not None and tuple(sink.shape) != (heads,):
        raise InputError(f"sinks must be [{heads}], one a head, but got {tuple(sink.shape)}.")
    ids = judging.segments(options.segment_ids_q, options.segment_ids_kv, (batch, seq_q), (batch, seq_kv), like)
    return Modifiers(
        softcap=judging.softcap(options.softcap),
        alibi_slopes=slopes,
        bias=None if added is None else judging.broadcast("bias", added, sizes),
        window=judging.window(options.window, max(seq_q, seq_kv)),
        mask=judging.mask(options.mask, sizes, like),
        segment_ids_q=ids[0],
        segment_ids_kv=ids[1],
        dropout=dropout_from(options.dropout_p, options.dropout_seed, like),
        sinks=None if sink is None else sink.to(wide).contiguous(),
        score_mod=options.score_mod,
        mask_mod=options.mask_mod,
        mod_tensors=judge(options.score_mod, options.mask_mod, options.mod_tensors, like.device),
    )


def check_cap(options: Options, scale: float | None) -> None:
    """Refuse a soft cap so far below the scale that fp32 cannot hold one in units of the other."""
    if options.softcap is not None and scale is not None and abs(scale) > 2.0**100 * options.softcap:
        raise InputError(
            f"scale must be at most {2.0**100:.1e} times softcap, but got scale={scale!r} and "
            f"softcap={options.softcap!r}. Scale q instead."
        )


def check_gradients(options: Options, *, of_slopes: bool = True) -> None:
    """Refuse to differentiate by what has no gradient here; where a call is made, since inside no graph is seen."""
    for name, tensors in (("alibi_slopes", [options.alibi_slopes]), ("mod_tensors", options.mod_tensors)):
        if name == "alibi_slopes" and of_slopes:
            continue
        wanted = any(isinstance(each, Tensor) and each.requires_grad for each in tensors)
        if wanted and torch.is_grad_enabled():
            raise InputError(
                f"{name} have no gradient here, but they require one: detach() them, or make a bias of them."
            )
