"""What specs may have beyond the plain attention, by name."""

from __future__ import annotations

import hashlib

# What a spec may have beyond the plain softmax(Q K^T * scale) V, with what its kernels take for it; flashgen.modifiers
# says what each does.
MODIFIERS = {
    "softcap": ("softcap",),
    "alibi": ("alibi_slopes",),
    "bias": ("bias",),
    "window": ("window_left", "window_right"),
    "mask": ("mask",),
    "segments": ("segment_ids_q", "segment_ids_kv"),
    "dropout": ("dropout_threshold", "dropout_scale", "dropout_seed"),
    "sinks": ("sinks",),
    "score_mod": (),
    "mask_mod": (),
    "varlen": ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "total_q", "total_k"),
}
FEATURES = tuple(MODIFIERS)
# Of decode, whose sequences of queries only lie behind each other; and what else such a spec may have.
SERVED = ("softcap", "alibi", "window", "sinks", "varlen")
SERVED_LENGTHS = ("cu_seqlens_q", "total_q")
SERVING = ("paged", "appended", "cache")
# What fp8 inputs are multiplied by, which kernels take before all modifiers.
DESCALES = ("descale_q", "descale_k", "descale_v")
EXPRESSIONS = ("score_mod", "mask_mod")
# Files leave out what a spec does not have.
OPTIONAL = (*FEATURES, "mod_tensors", "descale", *SERVING)


def digest(text: str) -> str:
    """Twelve hex digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
