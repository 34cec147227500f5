"""Expressions such as users write, for the tests of what becomes of them."""

from __future__ import annotations

from typing import Any

# Scores, with the tensors that they read: (text, types).
SCORES: dict[str, tuple[str, str]] = {
    "relative bias": ("score + (q_idx - kv_idx)", "none"),
    "table": ("score + 0.1 * mod0[head, kv_idx - q_idx + 48]", "fp32[2]"),
    "cap": ("4.0 * tanh(score / 4.0)", "none"),
    "hiding": ('where(kv_idx + head <= q_idx, score, float("-inf"))', "none"),
    "curved": ("score * sigmoid(score) + exp(-abs(score)) / (1.0 + batch)", "none"),
}
# Conditions: by place alone, by place and head, with holes, and of documents in order.
MASKS: dict[str, tuple[str, str]] = {
    "prefix": ("(kv_idx <= q_idx + seq_kv - seq_q) | (kv_idx < 21)", "none"),
    "prefix by batch": ("(kv_idx <= q_idx) | (kv_idx < 9 * mod0[batch])", "int64[1]"),
    "window by head": ("abs(q_idx - kv_idx) <= 7 * (head + 1)", "none"),
    "chunks": ("q_idx // 16 == kv_idx // 16", "none"),
    "dilated": ("(q_idx - kv_idx) % 3 == 0", "none"),
    "sinks and window": ("(kv_idx < 4) | ((kv_idx <= q_idx) & (q_idx - kv_idx < 12))", "none"),
    "documents": ("mod0[q_idx] == mod0[kv_idx]", "int32[1]"),
    "random": ("mod0[q_idx, kv_idx]", "bool[2]"),
    "nothing": ("kv_idx < 0", "none"),
}


def features(kind: str, name: str) -> dict[str, Any]:
    """Fields of a spec: kind "score_mod" or "mask_mod"."""
    from flashgen.expressions.parse import canonical

    text, types = (SCORES if kind == "score_mod" else MASKS)[name]
    names = tuple(f"mod{index}" for index in range(0 if types == "none" else len(types.split(" "))))
    return {kind: canonical(text, names, kind == "score_mod"), "mod_tensors": types}
