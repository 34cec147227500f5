"""A Llama that decodes with `attention_kvcache` says what it says with Transformers' own attention."""

from __future__ import annotations

import torch
from paged_llama import decoded_eagerly, decoded_in_pages, logits_in_pages, model, prompts


def test_256_tokens_are_those_of_eager_attention() -> None:
    sequences = prompts(50, 1, 37)
    expected = [decoded_eagerly(model("eager"), each, 256) for each in sequences]
    assert all(len(each) == 256 for each in expected)
    # Neither always the same token, nor the same for all.
    assert all(len(set(each)) > 20 for each in expected) and expected[0] != expected[1]
    for page_size in (16, 24):
        assert decoded_in_pages(model("cached_in_pages"), sequences, 256, page_size) == expected


def test_logits_are_those_of_eager_attention() -> None:
    (sequence,) = prompts(80)
    with torch.no_grad():
        expected = model("eager")(torch.tensor([sequence])).logits[0]
    torch.testing.assert_close(logits_in_pages(model("cached_in_pages"), sequence), expected, rtol=1e-4, atol=1e-4)
