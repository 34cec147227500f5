"""A small Llama of random weights that decodes with a paged cache, which `attention_kvcache` fills and reads."""

from __future__ import annotations

from typing import Any

import torch
from kvcaches import ints
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import flashgen

VOCABULARY, LAYERS, KV_HEADS, HEAD_DIM = 199, 2, 2, 16


class PagedCache:
    """Pages of all layers, which sequences take as they grow; lengths and table stay on the device."""

    def __init__(self, batch: int, capacity: int, page_size: int, device: str, dtype: torch.dtype) -> None:
        self.page_size = page_size
        each = -(-capacity // page_size)
        generator = torch.Generator().manual_seed(3)
        self._free = torch.randperm(batch * each, generator=generator).tolist()
        shape = (2, LAYERS, batch * each, page_size, KV_HEADS, HEAD_DIM)
        # Whatever is read before it was written shows.
        self.keys, self.values = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.table = torch.full((batch, each), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._pages = [0] * batch

    def reserve(self, tokens: list[int]) -> None:
        """Pages for so many tokens of each sequence, as a scheduler hands them out."""
        for index, count in enumerate(tokens):
            while self._pages[index] * self.page_size < count:
                self.table[index, self._pages[index]] = self._free.pop()
                self._pages[index] += 1


def _paged(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    paged: PagedCache, scaling: float, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as Transformers calls it, [batch, heads, tokens, head_dim]; packed tokens are one row of a batch."""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    if cu_seqlens_q is not None:
        q, k, v = q[0], k[0], v[0]
    o = flashgen.attention_kvcache(
        q, paged.keys[module.layer_idx], paged.values[module.layer_idx], cache_seqlens=paged.lengths,
        block_table=paged.table, k=k, v=v, scale=scaling, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    assert isinstance(o, Tensor)
    return (o if cu_seqlens_q is None else o[None]), None


AttentionInterface.register("cached_in_pages", _paged)


def model(implementation: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Equal weights for every implementation; large ones, so that its choices are far apart."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=6,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=1024, initializer_range=0.2,
        attn_implementation=implementation, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype).eval()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def decoded_eagerly(llama: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, one after the other, by Transformers' own attention and cache; no choice is a close one."""
    given = torch.tensor([prompt], device=llama.device)
    generated = llama.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count, min_new_tokens=count
    )
    best, second = llama(generated).logits[0, len(prompt) - 1 : -1].topk(2).values.unbind(1)
    assert (best - second).min() > 5e-4
    found: list[int] = generated[0, len(prompt) :].tolist()
    return found


@torch.no_grad()
def decoded_in_pages(
    llama: LlamaForCausalLM, sequences: list[list[int]], count: int, page_size: int = 16, chunk: int = 24
) -> list[list[int]]:
    """The same of all sequences together: parts of prompts beside single tokens, until all have `count` more."""
    longest = max(len(each) for each in sequences) + count
    cache = PagedCache(len(sequences), longest, page_size, str(llama.device), llama.dtype)
    tokens = [list(each) for each in sequences]
    done = [0] * len(sequences)
    wanted = [len(each) + count for each in sequences]
    while any(len(mine) < most for mine, most in zip(tokens, wanted, strict=True)):
        rows = [mine[start : start + chunk] if len(mine) < most else []
                for mine, start, most in zip(tokens, done, wanted, strict=True)]  # fmt: skip
        counts = [len(each) for each in rows]
        cache.reserve([start + more for start, more in zip(done, counts, strict=True)])
        logits = _step(llama, cache, rows, done)
        cache.lengths += ints(counts).to(cache.lengths.device)
        for index, more in enumerate(counts):
            done[index] += more
            if more and done[index] == len(tokens[index]):
                tokens[index].append(int(logits[sum(counts[: index + 1]) - 1].argmax()))
    return [mine[len(prompt) :] for mine, prompt in zip(tokens, sequences, strict=True)]


@torch.no_grad()
def logits_in_pages(llama: LlamaForCausalLM, sequence: list[int], page_size: int = 16, chunk: int = 24) -> Tensor:
    """What follows each token of a sequence, given in parts and at last token by token."""
    cache = PagedCache(1, len(sequence), page_size, str(llama.device), llama.dtype)
    cache.reserve([len(sequence)])
    found, start = [], 0
    while start < len(sequence):
        rows = sequence[start : start + (chunk if start < len(sequence) // 2 else 1)]
        found.append(_step(llama, cache, [rows], [start]))
        cache.lengths += len(rows)
        start += len(rows)
    return torch.cat(found)


def _step(llama: LlamaForCausalLM, cache: PagedCache, rows: list[list[int]], done: list[int]) -> Tensor:
    """Logits of all new tokens, behind each other."""
    places = [start + index for start, mine in zip(done, rows, strict=True) for index in range(len(mine))]
    given = torch.tensor([[token for mine in rows for token in mine]], device=llama.device)
    packed: dict[str, Any] = {}
    if all(len(mine) == 1 for mine in rows):
        # Decode: a batch of single tokens.
        given, position_ids = given.T, torch.tensor(places, device=llama.device)[:, None]
    else:
        position_ids = torch.tensor([places], device=llama.device)
        starts = [sum(len(mine) for mine in rows[:index]) for index in range(len(rows) + 1)]
        packed = {"cu_seqlens_q": ints(starts).to(llama.device), "max_seqlen_q": max(len(mine) for mine in rows)}
    result = llama(input_ids=given, position_ids=position_ids, use_cache=False, paged=cache, **packed)
    logits = result.logits
    assert isinstance(logits, Tensor)
    return logits.flatten(0, 1)
