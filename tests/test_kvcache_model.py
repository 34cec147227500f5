"""A Llama that decodes with `attention_kvcache` says what it says with Transformers' own attention."""

from __future__ import annotations

import pytest
from paged_llama import decoded_eagerly, decoded_in_pages, model, prompts


@pytest.mark.parametrize("page_size", [16, 24])
def test_256_tokens_are_those_of_eager_attention(page_size: int) -> None:
    sequences = prompts(50, 1, 30)
    expected = [decoded_eagerly(model("eager"), each, 256) for each in sequences]
    assert all(len(each) == 256 for each in expected)
    # Neither always the same token, nor the same for all.
    assert all(len(set(each)) > 20 for each in expected) and expected[0] != expected[1]
    assert decoded_in_pages(model("cached_in_pages"), sequences, 256, page_size) == expected
