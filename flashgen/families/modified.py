"""What templates name where a spec has features: parameters of kernels and arguments of the functions in lib/scores."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.expressions.bounds import block_of, is_opaque
from flashgen.expressions.emit import statements
from flashgen.expressions.given import derivative_of, mask_of, score_of
from flashgen.features import DESCALES, FEATURES
from flashgen.hardware import Gpu
from flashgen.space import Config
from flashgen.spec import Spec

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
    "score_mod": ("batch", "head"),
}
_SEEING = {
    "window": ("window_left", "window_right"),
    "mask": ("MASK_head", "mask_stride_q", "mask_stride_k"),
    "mask_mod": ("batch", "head"),
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
    "dropout": (
        "dropout_threshold: of words of 32 bits, those from this on stay, multiplied with dropout_scale.",
        "dropout_seed: int64 [2], (seed, offset).",
    ),
    "sinks": ("sinks: fp32 [heads], one more logit of every row.",),
    "score_mod": ("mod0, …: what the expressions read, contiguous, and the sizes of each.",),
    "varlen": (
        "cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], cumulative; total_q, total_k: tokens that there are.",
        "seqused_k: int32 [sequences], how many keys of each count, or empty. q, k, v and o are views in which as many",
        "sequences of the longest length start at the first token; lse [heads, total_q].",
    ),
}


def reads_more(spec: Spec) -> bool:
    """Whether blocks of scores bring loads beyond K and V, which take shared memory or undo the pipeline."""
    return spec.bias != "none" or spec.mask or spec.segments or spec.mod_tensors != "none"


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
    tables = [each for index in range(len(spec.tensors)) for each in (f"MOD{index}", *_sizes(spec, index))]
    shaping = of(_SHAPING) + (tables if spec.score_mod != "none" else [])
    seeing = of(_SEEING) + (tables if spec.mask_mod != "none" else [])
    return {
        "pointers": [*scaling, *of(_POINTERS), *(name if name[0] == "M" else f"{name}: tl.int32" for name in tables)],
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
        "shaping": shaping,
        "seeing": seeing,
        # What both take, as parameters of those that call them.
        "passed": list(dict.fromkeys(shaping + seeing)),
        "tables": tables,
        **_expressions(spec),
        # Not all blocks that any row sees are seen whole up to one place.
        "edged": spec.window or spec.segments or spec.mask_mod != "none",
        # Where they start and end is looked up.
        "searched": spec.segments or spec.mask_mod != "none",
        "ranged": spec.causal != "none" or spec.window,
        # Scores of what is seen may be -inf.
        "guarding": (spec.bias != "none" or spec.score_mod != "none") and not spec.mask,
        "dense": [name for name in ("bias", "mask") if name in spec.features],
    }


def _sizes(spec: Spec, index: int) -> list[str]:
    return [f"mod{index}_size_{axis}" for axis in range(spec.tensors[index][1])]


def _expressions(spec: Spec) -> Mapping[str, object]:
    """The caller's expressions as lines of Triton and the results, for lib/mods; and what their blocks need."""
    found: dict[str, object] = {"score_mod": None, "mask_mod": None, "sparse": spec.mask, "tanh": False}
    lines: list[str] = []
    if spec.score_mod != "none":
        score = score_of(spec.score_mod, spec.tensors)
        results = [score]
        if spec.op == "backward":
            results.append(derivative_of(spec.score_mod, spec.tensors))
        lines, texts = statements(results, spec.tensors)
        found["score_mod"] = (lines, texts)
    if spec.mask_mod != "none":
        condition = mask_of(spec.mask_mod, spec.tensors)
        found["mask_mod"] = statements([condition], spec.tensors)
        found["mask_bounds"] = statements(block_of(condition), spec.tensors)
        # Blocks that the bounds let through may be hidden all the same: they are looked at before they are computed.
        found["sparse"] = spec.mask or is_opaque(condition)
    found["tanh"] = "tanh_of" in repr(found)
    return found


def plain_rule(spec: Spec, config: Config, gpu: Gpu) -> str | None:
    """For families whose templates name none of this."""
    if spec.features:
        return f"computes no {', '.join(spec.features)}: {'triton_fwd' if spec.op == 'forward' else 'triton_bwd'} does"
    return None
