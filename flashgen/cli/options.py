"""Options that several commands share, and how their text becomes Specs and Problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

import click
import torch
from click.core import ParameterSource

from flashgen.errors import InputError, did_you_mean
from flashgen.expressions.given import judge, written
from flashgen.features import EXPRESSIONS, FEATURES
from flashgen.hardware import Gpu, current_gpu
from flashgen.problem import Problem
from flashgen.spec import MAX_HEAD_DIM, TORCH_DTYPES, Cache, Causal, DType, Op, Spec

# FlashAttention's benchmark set: 16,384 tokens, heads * head_dim = 2,048.
TOKENS = 16384
WIDTH = 2048


class IntegerList(click.ParamType[tuple[int, ...]]):
    """Positive integers separated by commas: 1024,4096."""

    name = "integers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 1024,4096.", param, ctx)
        if any(number < 1 for number in numbers):
            self.fail(f"every number must be at least 1, but got {value!r}.", param, ctx)
        return tuple(dict.fromkeys(numbers))


class Heads(click.ParamType[tuple[int, int]]):
    """Query heads, or query/key heads: 32 or 32/8."""

    name = "heads"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        first, _, second = str(value).partition("/")
        try:
            heads, kv_heads = int(first), int(second or first)
        except ValueError:
            self.fail(f"{value!r} is not a number of heads such as 32, or 32/8 for 8 key heads.", param, ctx)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            self.fail(f"heads must be a positive multiple of kv_heads, but got {heads}/{kv_heads}.", param, ctx)
        return heads, kv_heads


class DTypes(click.ParamType[tuple[str, ...]]):
    """Element types separated by commas: fp16,bf16."""

    name = "dtypes"

    def __init__(self, known: tuple[str, ...] = ("fp16", "bf16", "fp32")) -> None:
        self.known = known

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(str(value).split(",")))
        for name in names:
            if name not in self.known:
                self.fail(f"{name!r} is not one of {', '.join(self.known)}.", param, ctx)
        return names


# Lengths of sequences that lie behind each other are no choice of a kernel's: the plain spec's config serves.
# Expressions have options of their own.
TUNABLE = tuple(name for name in FEATURES if name not in ("varlen", *EXPRESSIONS))


class Features(click.ParamType[tuple[str, ...]]):
    """Names of TUNABLE separated by commas: window,softcap."""

    name = "features"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(name for name in str(value).split(",") if name))
        for name in names:
            if name not in TUNABLE:
                self.fail(f"{name!r} is not known. {did_you_mean(name, TUNABLE)}", param, ctx)
        return names


OPS: dict[str, tuple[Op, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "training": ("forward", "backward"),
    "decode": ("decode",),
}
CAUSAL_CHOICES = {"true": ("bottom_right",), "false": ("none",), "both": ("none", "bottom_right")}

gpu_option = click.option(
    "--gpu", required=True, help="Target: a known name such as a100 or h200, or auto for the GPU of this machine."
)
head_dim_option = click.option("--head-dim", type=click.IntRange(1, MAX_HEAD_DIM), required=True, help="Width of q, k.")
head_dim_v_option = click.option(
    "--head-dim-v", type=click.IntRange(1, MAX_HEAD_DIM), help="Width of v and the output; default: --head-dim."
)
dtype_option = click.option("--dtype", type=DTypes(), help="fp16, bf16, fp32 or several; default: bf16.")
kernel_dtype_option = click.option(
    "--dtype", type=DTypes(tuple(TORCH_DTYPES)), help="fp16, bf16, fp32, fp8 or several; default: bf16."
)
op_option = click.option("--op", type=click.Choice(list(OPS)), default="forward", show_default=True)
causal_option = click.option(
    "--causal", type=click.Choice(list(CAUSAL_CHOICES)), help="Default: both, of a decode true."
)
OF_DECODE = ("batch", "seq_q", "seq_kv", "page_size", "cache")
batch_option = click.option("--batch", type=IntegerList(), help="Of a decode: numbers of sequences.")
seq_q_option = click.option("--seq-q", type=IntegerList(), help="Of a decode: new tokens of each; default: 1.")
seq_kv_option = click.option("--seq-kv", type=IntegerList(), help="Of a decode: keys of each sequence.")
cache_option = click.option(
    "--cache", type=click.Choice(get_args(Cache)), default="none", help="Of a decode: type of the cache; none: q's."
)
page_size_option = click.option("--page-size", type=click.IntRange(16, 2**20), help="Of a decode: tokens of a page.")
heads_option = click.option(
    "--heads", type=Heads(), help="Heads, or heads/kv_heads; default: 2048 / head_dim, of a decode 32/8."
)
with_option = click.option(
    "--with",
    "features",
    type=Features(),
    default="",
    help=f"What else the scores go through: of {', '.join(TUNABLE)}, separated by commas.",
)
score_mod_option = click.option(
    "--score-mod", metavar="EXPRESSION", help="What becomes of scores, such as 'score + (q_idx - kv_idx)'; no tensors."
)
mask_mod_option = click.option(
    "--mask-mod", metavar="EXPRESSION", help="What is seen, such as '(kv_idx <= q_idx) | (kv_idx < 256)'; no tensors."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")


def gpu_from(name: str) -> Gpu:
    """The GPU that `--gpu` means."""
    return current_gpu() if name == "auto" else Gpu.named(name)


def specs_from(
    gpu: Gpu,
    head_dim: int,
    head_dim_v: int | None,
    dtypes: tuple[str, ...] | None,
    causal: str | None,
    op: str = "forward",
    features: tuple[str, ...] = (),
    mods: tuple[str | None, str | None] = (None, None),
) -> list[Spec]:
    """Every spec that the options name; a bias has the inputs' dtype, `mods` are score_mod and mask_mod."""
    score, mask, _ = written(*mods, None)
    judge(score, mask, (), torch.device("cpu"))
    expressions = {"score_mod": score or "none", "mask_mod": mask or "none"}
    if dtypes is None:
        dtypes = ("fp16",) if gpu.backend == "cuda" and gpu.sm < 80 else ("bf16",)

    def flags(op: str, dtype: str) -> dict[str, Any]:
        # A backward finds sinks in the log-sum-exp.
        names = [name for name in features if (name, op) != ("sinks", "backward")]
        added = "bf16" if dtype == "fp8" else dtype
        flags: dict[str, Any] = {name: added if name == "bias" else True for name in names}
        return flags | expressions

    return [
        Spec(each, head_dim, head_dim_v or head_dim, cast(DType, dtype), cast(Causal, mask), **flags(each, dtype))
        for dtype in dtypes
        for mask in CAUSAL_CHOICES[causal or ("true" if op == "decode" else "both")]
        for each in OPS[op]
    ]


def own_options(op: str, of_others: tuple[str, ...]) -> None:
    """Refuse options, by the names of their parameters, that say nothing about what is computed."""
    for option in click.get_current_context().command.params:
        if option.name in (of_others if op == "decode" else OF_DECODE) and was_given(option.name):
            raise InputError(f"{option.opts[0]} says nothing about --op {op}: leave it out.")


def was_given(name: str) -> bool:
    """Whether an option of the running command, by the name of its parameter, is not what it is by default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def decode_problems(given: Mapping[str, Any], batches: tuple[int, ...], lengths: tuple[int, ...]) -> list[Problem]:
    """Every batch with every length that the options name, or these; heads are 32 and of the keys 8."""
    heads, kv_heads = given["heads"] or (32, 8)
    return [
        Problem(batch, heads, kv_heads, seq_q, seq_kv, given["page_size"] or 0)
        for seq_q in given["seq_q"] or (1,)
        for seq_kv in given["seq_kv"] or lengths
        for batch in given["batch"] or batches
    ]


def problem_from(
    seq: int, heads: tuple[int, int] | None, head_dim: int, tokens: int = TOKENS, seq_q: int | None = None
) -> Problem:
    """One problem of about `tokens` tokens; `seq_q` rows of each sequence, as many as keys where nothing is said."""
    if seq > 2**24:
        raise InputError(f"--seq must be at most {2**24}, but got {seq}.")
    query, key = heads or (max(1, WIDTH // head_dim),) * 2
    return Problem(max(1, tokens // seq), query, key, seq_q or seq, seq)
