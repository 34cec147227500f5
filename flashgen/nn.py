"""`FlashAttention`: multi-head attention as a torch.nn.Module, four plain Linear layers around `attention`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashgen.api import attention
from flashgen.errors import InputError
from flashgen.spec import MAX_HEAD_DIM
from flashgen.tensors import causal_from, check_scale


class FlashAttention(nn.Module):
    """out_proj(attention(q_proj(x), k_proj(context), v_proj(context))), self attention where there is no context.

    The parameters are those of four torch.nn.Linear: q_proj [heads * head_dim, d_model], k_proj and v_proj
    [kv_heads * head_dim, d_model], out_proj [d_model, heads * head_dim]. Row h * head_dim + i of a projection is
    element i of head h; query head h reads key head h // (heads // kv_heads).

    Args:
        d_model: width of x, of the context and of the output.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of heads; default heads.
        head_dim: width of one head, 1 to 576; default d_model // heads.
        causal: False, True, "bottom_right" or "top_left", as for `flashgen.attention`.
        bias: whether the four projections have one.
        scale: multiplies the scores; default head_dim ** -0.5.
        device: where the parameters are made.
        dtype: of the parameters, and so of x: fp16, bf16 or fp32; fp64 on the CPU.

    Raises:
        InputError: the sizes or an option do not fit together.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool | str = False,
        bias: bool = True,
        scale: float | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model = _size("d_model", d_model)
        self.heads = _size("heads", heads)
        self.kv_heads = heads if kv_heads is None else _size("kv_heads", kv_heads)
        self.head_dim = _default_head_dim(d_model, heads) if head_dim is None else _size("head_dim", head_dim)
        if self.heads % self.kv_heads:
            raise InputError(
                f"heads must be a multiple of kv_heads, but got {self.heads} and {self.kv_heads}. "
                "Choose kv_heads among the divisors of heads."
            )
        if self.head_dim > MAX_HEAD_DIM:
            raise InputError(
                f"head_dim must be at most {MAX_HEAD_DIM}, but got {self.head_dim} (d_model {d_model}, heads {heads}). "
                "Use more heads, or pass a smaller head_dim."
            )
        causal_from(causal)
        check_scale(scale, torch.get_default_dtype() if dtype is None else dtype)
        self.causal = causal
        self.scale = scale

        def linear(width_in: int, width_out: int) -> nn.Linear:
            return nn.Linear(width_in, width_out, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(d_model, self.heads * self.head_dim)
        self.k_proj = linear(d_model, self.kv_heads * self.head_dim)
        self.v_proj = linear(d_model, self.kv_heads * self.head_dim)
        self.out_proj = linear(self.heads * self.head_dim, d_model)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend from x to the context, or to x itself.

        Args:
            x: [batch, seq, d_model], in the parameters' dtype unless autocast chooses another.
            context: [batch, seq_kv, d_model], what keys and values are made of; None is x.

        Returns:
            [batch, seq, d_model].

        Raises:
            InputError: the tensors do not fit the layer or each other.
            UnsupportedError: no kernel does this.
        """
        self._check("x", x)
        if context is None:
            context = x
        else:
            self._check("context", context)
        # Heads are split off in place, as layout="bshd" wants them: nothing is transposed or copied.
        q = self.q_proj(x).unflatten(2, (self.heads, self.head_dim))
        k = self.k_proj(context).unflatten(2, (self.kv_heads, self.head_dim))
        v = self.v_proj(context).unflatten(2, (self.kv_heads, self.head_dim))
        attended = attention(q, k, v, causal=self.causal, scale=self.scale, layout="bshd")
        assert isinstance(attended, Tensor)  # a tuple only with return_lse
        out: Tensor = self.out_proj(attended.flatten(2))
        return out

    def extra_repr(self) -> str:
        """What the repr shows of this layer, besides its projections."""
        shown = ["d_model", "heads", "kv_heads", "head_dim", "causal"]
        if self.scale is not None:
            shown.append("scale")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)

    def _check(self, name: str, tensor: Tensor) -> None:
        if tensor.dim() != 3 or tensor.shape[2] != self.d_model:
            raise InputError(
                f"{name} must have shape [batch, seq, {self.d_model}], but got {tuple(tensor.shape)}: "
                "reshape it, or build the layer with its width as d_model."
            )


def _size(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, but got {value!r}. Pass one.")
    return value


def _default_head_dim(d_model: int, heads: int) -> int:
    if d_model % heads:
        raise InputError(
            f"d_model must be a multiple of heads, but got {d_model} and {heads}. Change one of them, or pass head_dim."
        )
    return d_model // heads
