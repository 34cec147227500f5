"""What templates name where a spec has features: parameters of kernels and arguments of the functions in lib/scores."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.hardware import Gpu
from flashgen.space import Config
from flashgen.spec import DESCALES, FEATURES, Spec

# By feature: what a kernel takes as pointers and numbers, in launch.arguments_of's order, what it takes as strides, and
# which arguments `modified` and `seen` take beyond the scores' places.
_POINTERS = {
    "softcap": ("softcap: tl.float32",),
    "alibi": ("ALIBI_SLOPES",),
    "bias": ("BIAS",),
    "window": ("window_left: tl.int32", "window_right: tl.int32"),
    "mask": ("MASK",),
    "segments": ("SEGMENT_IDS_Q", "SEGMENT_IDS_KV"),
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
# fp8 inputs: what a kernel takes for their descales and, in the loop over keys, what it passes on.
_DESCALES = {
    "tensor": tuple(f"{name}: tl.float32" for name in DESCALES),
    "head": tuple(name.upper() for name in DESCALES),
    "block": tuple(name.upper() for name in DESCALES),
}
_DESCALE_STRIDES = {"tensor": (), "head": ("stride_b", "stride_h"), "block": ("stride_b", "stride_h", "stride_s")}
_DESCALING = {
    "tensor": ("descale_v",),
    "head": ("descale_v",),
    "block": ("DESCALE_K_head", "descale_k_stride_s", "DESCALE_V_head", "descale_v_stride_s"),
}
_DESCALES_DESCRIBED = {
    "tensor": "descale_q, descale_k, descale_v: numbers that q, k and v are multiplied by.",
    "head": "descale_q [batch, heads], descale_k, descale_v [batch, kv_heads]: fp32, multiply q, k and v; any strides.",
    "block": "descale_q, descale_k, descale_v: fp32 [batch, heads or kv_heads, blocks of 128 tokens], any strides.",
}
# For the docstring of `launch`.
_DESCRIBED = {
    "softcap": ("softcap: scores become softcap * tanh(scores / softcap).",),
    "alibi": ("alibi_slopes: fp32 [batch, heads].",),
    "bias": ("bias: [batch, heads, seq_q, seq_kv], any strides.",),
    "window": ("window_left, window_right: keys seen before and after a row's own; right 0 where causal.",),
    "mask": ("mask: bytes [batch, heads, seq_q, seq_kv], any strides; other than 0 is seen.",),
    "segments": ("segment_ids_q [batch, seq_q], segment_ids_kv [batch, seq_kv]: int32 contiguous.",),
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
    `dense`: what has a number for every row and key. `descaling`: what the loop over keys multiplies fp8 inputs by;
    `of_values`: that part of it which the second product takes.
    """

    def of(table: Mapping[str, tuple[str, ...]]) -> list[str]:
        return [name for feature in FEATURES if feature in spec.features for name in table.get(feature, ())]

    fp8 = spec.dtype == "fp8"
    scaling = _DESCALES[spec.descale] if fp8 else ()
    scaling_strides = [f"{name}_{stride}" for name in DESCALES for stride in _DESCALE_STRIDES[spec.descale]]
    return {
        "pointers": [*scaling, *of(_POINTERS)],
        "strides": [f"{name}: tl.int64" for name in (*scaling_strides, *of(_STRIDES))],
        "modifiers": list(spec.modifiers),
        "strided_names": [
            *(DESCALES if scaling_strides else ()),
            *(_STRIDED[feature] for feature in spec.features if feature in _STRIDED),
        ],
        "described": [*([_DESCALES_DESCRIBED[spec.descale]] if fp8 else []), *of(_DESCRIBED)],
        "descaling": list(_DESCALING[spec.descale]) if fp8 else [],
        "of_values": ["key", *_DESCALING["block"][2:]] if spec.descale == "block" else ["descale_v"],
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
