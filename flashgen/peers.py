"""What flashgen is compared with: the same attention by torch and by packages of others, where they are installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen.api import attention
from flashgen.reference import plain_attention

Forward = Callable[[], Tensor]


def _flashgen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
    def call() -> Tensor:
        o = attention(q, k, v, causal=causal)
        assert isinstance(o, Tensor)
        return o

    return call


def _sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, bool], Forward]:
    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
        grouped = q.shape[1] != k.shape[1]

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return call

    return make


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Beyond the limit torch.compile silently runs the unfused form.
    torch._dynamo.config.recompile_limit = 1000
    # Donated buffers allow one backward per forward; here one forward is differentiated many times.
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, q.shape[2], k.shape[2], device="cuda")
    grouped = q.shape[1] != k.shape[1]
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
    return lambda: plain_attention(q, k, v, causal="bottom_right" if causal else "none")[0]


def _package(*modules: str) -> Callable[[Tensor, Tensor, Tensor, bool], Forward]:
    """flash_attn_func of the first of these modules that is installed; tensors in the layout that it wants."""

    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Forward:
        flash_attn_func = _imported(*modules).flash_attn_func
        rows_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]

        def call() -> Tensor:
            o: Any = flash_attn_func(*rows_first, causal=causal)
            first: Tensor = o[0] if isinstance(o, tuple) else o
            return first

        return call

    return make


def _imported(*names: str) -> Any:
    """The first of these modules that is installed.

    Raises:
        RuntimeError: none is.
    """
    for name in names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise RuntimeError(f"not installed: {' or '.join(names)}")


PEERS: Mapping[str, Callable[[Tensor, Tensor, Tensor, bool], Forward]] = {
    "flashgen": _flashgen,
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
    "fa3": _package("fa3_fwd_interface", "flash_attn_interface"),
    "fa4": _package("flash_attn.cute"),
    "plain": _plain,
}
# Packages of their own, which few machines have.
OPTIONAL = ("fa3", "fa4")
