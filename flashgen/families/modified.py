"""What templates name where a spec has features: parameters of kernels and arguments of the functions in lib/scores."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.hardware import Gpu
from flashgen.space import Config
from flashgen.spec import FEATURES, Spec

# By feature: what a kernel takes as pointers and numbers, in launch.arguments_of's order, what it takes as strides, and
# which arguments `modified` and `seen` take beyond the scores' places.
_POINTERS = {
    "softcap": ("softcap: tl.float32",),
    "alibi": ("ALIBI_SLOPES",),
    "bias": ("BIAS",),
    "window": ("window_left: tl.int32", "window_right: tl.int32"),
    "mask": ("MASK",),
    "segments": ("SEGMENT_IDS_Q", "SEGMENT_IDS_KV"),
    "dropout": ("dropout_threshold: tl.int64", "dropout_scale: tl.float32", "DROPOUT_SEED"),
    "sinks": ("SINKS",),
    "varlen": ("CU_SEQLENS_Q", "CU_SEQLENS_K", "SEQUSED_K", "total_q: tl.int32", "total_k: tl.int32"),
}
_STRIDES = {
    "alibi": ("alibi_stride_b", "alibi_stride_h"),
    "bias": ("bias_stride_b", "bias_stride_h", "bias_stride_q", "bias_stride_k"),
    "mask": ("mask_stride_b", "mask_stride_h", "mask_stride_q", "mask_stride_k"),
}
_STRIDED = {"alibi": "alibi_slopes", "bias": "bias", "mask": "mask"}
_SHAPING = {
    "softcap": ("softcap",),
    "alibi": ("slope",),
    "bias": ("BIAS_head", "bias_stride_q", "bias_stride_k"),
}
_SEEING = {
    "window": ("window_left", "window_right"),
    "mask": ("MASK_head", "mask_stride_q", "mask_stride_k"),
}
# For the docstring of `launch`.
_DESCRIBED = {
    "softcap": ("softcap: scores become softcap * tanh(scores / softcap).",),
    "alibi": ("alibi_slopes: fp32 [batch, heads].",),
    "bias": ("bias: [batch, heads, seq_q, seq_kv], any strides.",),
    "window": ("window_left, window_right: keys seen before and after a row's own; right 0 where causal.",),
    "mask": ("mask: bytes [batch, heads, seq_q, seq_kv], any strides; other than 0 is seen.",),
    "segments": ("segment_ids_q [batch, seq_q], segment_ids_kv [batch, seq_kv]: int32 contiguous.",),
    "dropout": (
        "dropout_threshold: of words of 32 bits, those from this on stay, multiplied with dropout_scale.",
        "dropout_seed: int64 [2], (seed, offset).",
    ),
    "sinks": ("sinks: fp32 [heads], one more logit of every row.",),
    "varlen": (
        "cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], cumulative; total_q, total_k: tokens that there are.",
        "seqused_k: int32 [sequences], how many keys of each count, or empty. q, k, v and o are views in which as many",
        "sequences of the longest length start at the first token; lse [heads, total_q].",
    ),
}


def reads_more(spec: Spec) -> bool:
    """Whether blocks of scores bring loads beyond K and V, which take shared memory or undo the pipeline."""
    return spec.bias != "none" or spec.mask or spec.segments


def derived(spec: Spec) -> Mapping[str, object]:
    """What the templates name: lists of names and lines, as the tables above say, and what a spec's features imply.

    `scored`: blocks of scores are handled in another way. `ranged`: which keys a row sees depends on its place.
    `dense`: what has a number for every row and key.
    """

    def of(table: Mapping[str, tuple[str, ...]]) -> list[str]:
        return [name for feature in FEATURES if feature in spec.features for name in table.get(feature, ())]

    return {
        "pointers": of(_POINTERS),
        "strides": [f"{name}: tl.int64" for name in of(_STRIDES)],
        "modifiers": list(spec.modifiers),
        "strided_names": [_STRIDED[feature] for feature in spec.features if feature in _STRIDED],
        "described": of(_DESCRIBED),
        "scored": bool(set(spec.features) - {"sinks", "varlen"}),
        "shaping": of(_SHAPING),
        "seeing": of(_SEEING),
        "ranged": spec.causal != "none" or spec.window,
        "dense": [name for name in ("bias", "mask") if name in spec.features],
    }


def plain_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """For families whose templates name none of this."""
    if spec.features:
        return f"computes no {', '.join(spec.features)}: {'triton_fwd' if spec.op == 'forward' else 'triton_bwd'} does"
    return None
