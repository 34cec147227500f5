"""What is computed (Spec)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast, get_args

import torch

from flashgen.coherence import check_coherent
from flashgen.errors import InputError, did_you_mean
from flashgen.features import DESCALES, EXPRESSIONS, FEATURES, MODIFIERS, OPTIONAL, SERVED_LENGTHS, SERVING, digest
from flashgen.tiles import MAX_TILE_WIDTH, parts_of

Op = Literal["forward", "backward", "decode"]
DType = Literal["fp16", "bf16", "fp32", "fp8"]
Causal = Literal["none", "bottom_right", "top_left"]
Precision = Literal["ieee", "tf32"]
Layout = Literal["bhsd", "bshd"]
BiasDType = Literal["none", "fp16", "bf16", "fp32"]
Descale = Literal["tensor", "head", "block", "token"]
Cache = Literal["none", "fp8", "int8"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
DTYPE_NAMES: dict[torch.dtype, DType] = {value: cast(DType, key) for key, value in TORCH_DTYPES.items()}
ELEMENT_BYTES: dict[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4, "fp8": 1}
# Of caches.
KV_DTYPES: dict[str, torch.dtype] = {**TORCH_DTYPES, "int8": torch.int8}

MAX_HEAD_DIM = 576


@dataclass(frozen=True)
class Spec:
    """What a kernel computes. Every field changes the answer, so every field is part of a variant's identity.

    Attributes:
        op: `"forward"`: O = softmax(Q K^T * scale) V and LSE; `"backward"`: dQ, dK and dV of it; `"decode"`: O and
            LSE of a few rows, the last ones, over a cache of keys.
        head_dim: true, unpadded width of q and k, 1 to 576; of fp8 to 256.
        head_dim_v: true width of v and of the output, likewise.
        dtype: element type of q, k, v and the output; "fp8" is e4m3, whose output is bf16, forward only.
        causal: `"bottom_right"` shows row i the keys j <= i + (seq_kv - seq_q); `"top_left"` j <= i.
        precision: how fp32 inputs multiply: `"ieee"` is true fp32, `"tf32"` the tensor cores' format.
            16-bit inputs have exact products either way and always say `"ieee"`.
        softcap, alibi, window, mask, segments, sinks: whether the scores are modified so (flashgen.modifiers).
        dropout: whether probabilities are dropped (flashgen.dropout).
        bias: element type of what is added to them; `"none"` when nothing is.
        score_mod, mask_mod: canonical expressions (flashgen.expressions), or `"#"` and the digest of one; `"none"`
            without.
        varlen: whether sequences of different lengths lie behind each other, as `attention_varlen` takes them.
        mod_tensors: type and rank of the tensors that expressions read, such as `"fp32[1] int64[2]"`.
        descale: what has a number of its own that fp8 inputs are multiplied by: each of q, k and v ("tensor"), each of
            their heads, or each block of tokens of a head (flashgen.descales); of a cache also each of its tokens.
        paged: whether the cache is in pages, which a table names.
        appended: whether new keys are given, which the kernel writes behind those of the cache.
        cache: element type of a cache of 8 bits; `"none"` for one of q's type.
    """

    op: Op = "forward"
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: DType = "bf16"
    causal: Causal = "none"
    precision: Precision = "ieee"
    softcap: bool = False
    alibi: bool = False
    bias: BiasDType = "none"
    window: bool = False
    mask: bool = False
    segments: bool = False
    dropout: bool = False
    sinks: bool = False
    score_mod: str = "none"
    mask_mod: str = "none"
    varlen: bool = False
    mod_tensors: str = "none"
    descale: Descale = "tensor"
    paged: bool = False
    appended: bool = False
    cache: Cache = "none"

    def __post_init__(self) -> None:
        kinds = (
            ("op", Op), ("dtype", DType), ("causal", Causal), ("precision", Precision), ("bias", BiasDType),
            ("descale", Descale), ("cache", Cache),
        )  # fmt: skip
        for field, kind in kinds:
            value = getattr(self, field)
            if value not in get_args(kind):
                raise InputError(f"{field}={value!r} is not known. {did_you_mean(str(value), get_args(kind))}")
        for field in ("head_dim", "head_dim_v"):
            value = getattr(self, field)
            if type(value) is not int or not 1 <= value <= MAX_HEAD_DIM:
                raise InputError(
                    f"1 <= {field} <= {MAX_HEAD_DIM} must hold, but got {field}={value!r}. "
                    "Split wider heads, or use torch's scaled_dot_product_attention for them."
                )
        for field in (*FEATURES, *SERVING[:2]):
            wanted = str if field in _TEXTS else bool
            if type(getattr(self, field)) is not wanted:
                what = "text" if wanted is str else "true or false"
                raise InputError(f"{field} must be {what}, but got {getattr(self, field)!r}.")
        check_coherent(self)

    @property
    def block_d(self) -> int:
        """Width of the q and k tiles: head_dim padded as `parts_of` says."""
        return sum(width for _, width in self.parts)

    @property
    def block_dv(self) -> int:
        """Width of the v and o tiles."""
        return sum(width for _, width in self.parts_v)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The tiles of q and k: (first column, width); tensor cores add up 32 products of fp8 at a time."""
        return parts_of(self.head_dim, 32 if self.dtype == "fp8" else 16)

    @property
    def parts_v(self) -> tuple[tuple[int, int], ...]:
        """The tiles of v and o."""
        return parts_of(self.head_dim_v)

    @property
    def wide(self) -> bool:
        """Whether a head may be more than one tile, so that kernels hold tuples of them."""
        return max(self.head_dim, self.head_dim_v) > MAX_TILE_WIDTH

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def kv_dtype(self) -> str:
        """Element type of keys and values, by the names of KV_DTYPES."""
        return self.dtype if self.cache == "none" else self.cache

    @property
    def out_dtype(self) -> DType:
        """Element type of the output."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    @property
    def features(self) -> tuple[str, ...]:
        """Which of FEATURES it has, in their order."""
        return tuple(name for name in FEATURES if getattr(self, name) not in (False, "none"))

    @property
    def serving(self) -> tuple[str, ...]:
        """Which of SERVING it has."""
        return tuple(name for name in SERVING if getattr(self, name) not in (False, "none"))

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The names of what its kernels take for its features, as flashgen.modifiers.Modifiers.arguments gives them."""
        scaling = DESCALES if self.dtype == "fp8" else () if self.cache == "none" else DESCALES[1:]
        taken = {**MODIFIERS, "varlen": SERVED_LENGTHS} if self.op == "decode" else MODIFIERS
        names = [*scaling, *(name for feature in self.features for name in taken[feature])]
        for index, (_, rank) in enumerate(self.tensors):
            names += [f"mod{index}", *(f"mod{index}_size_{axis}" for axis in range(rank))]
        return tuple(names)

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        """Type and rank of every tensor that its expressions read."""
        listed = [] if self.mod_tensors == "none" else self.mod_tensors.split(" ")
        return tuple((name, int(rank)) for name, rank in (each.removesuffix("]").split("[") for each in listed))

    @property
    def stated(self) -> dict[str, object]:
        """Its fields by name; of FEATURES only those that it has, so that others leave no trace in files."""
        absent = {name for name, nothing in _PLAIN.items() if getattr(self, name) == nothing}
        return {name: value for name, value in asdict(self.named).items() if name not in absent}

    @property
    def named(self) -> Spec:
        """The same with digests for expressions: what files know of them, which never hold what is run."""
        texts: dict[str, Any] = {
            name: f"#{digest(value if self.mod_tensors == 'none' else f'{value} of {self.mod_tensors}')}"
            for name in EXPRESSIONS
            if (value := getattr(self, name)) != "none" and not value.startswith("#")
        }
        return replace(self, **texts) if texts else self

    @property
    def backward(self) -> Spec:
        """The spec of its gradients, which find the sinks in the log-sum-exp."""
        return replace(self, op="backward", sinks=False)

    @property
    def kind(self) -> Spec:
        """The same with any expressions in the place of its own: such kernels do alike."""
        own: dict[str, Any] = {name: "#" for name in EXPRESSIONS if getattr(self, name) != "none"}
        return replace(self.tuned_as, mod_tensors="none", **own) if own else self.tuned_as

    @property
    def plain(self) -> Spec:
        """The same without FEATURES and SERVING, fp8 with one number for each tensor."""
        return replace(self, **_PLAIN)

    @property
    def plain_of_cache(self) -> Spec:
        """The same of a cache in q's type without ragged queries: what it does to scores."""
        return replace(self, varlen=False, cache="none", descale="tensor")

    @property
    def slug(self) -> str:
        """Readable part of a file name, e.g. `d128_bf16_causal`."""
        width = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        parts = [width, self.dtype]
        if self.precision != "ieee":
            parts.append(self.precision)
        if self.causal != "none":
            parts.append("causal" if self.causal == "bottom_right" else "causal_top_left")
        if self.descale != "tensor":
            parts.append(f"descale_{self.descale}")
        for name in self.features:
            value = getattr(self.named, name)
            own = name != "bias" or value != self.dtype
            parts.append(f"{name}_{value.removeprefix('#')}" if isinstance(value, str) and own else name)
        parts += [f"cache_{self.cache}" if name == "cache" else name for name in self.serving]
        return "_".join(parts)

    @property
    def label(self) -> str:
        """What people read, e.g. `d128_bf16_causal` or `backward d128_bf16_causal`."""
        return self.slug if self.op == "forward" else f"{self.op} {self.slug}"

    @property
    def tuned_as(self) -> Spec:
        """The spec under which tuned configs are kept: the two causal alignments differ by one constant."""
        named = self.named
        return replace(named, causal="bottom_right") if named.causal == "top_left" else named


_TEXTS = ("bias", *EXPRESSIONS)
_PLAIN: dict[str, Any] = {field.name: field.default for field in fields(Spec) if field.name in OPTIONAL}
