"""Source text -> file -> module -> compiled kernel and what it uses; the only file that knows Triton's compiler."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashgen.errors import MissingDependencyError, RenderError
from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.paths import write_source
from flashgen.render import kernel_options, render
from flashgen.resources import Resources, resources_of
from flashgen.spec import KV_DTYPES, Spec

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel


def require_triton() -> None:
    """Say what is missing where Triton cannot be imported (macOS, Windows)."""
    if importlib.util.find_spec("triton") is None:
        raise MissingDependencyError(
            "generating kernels needs the package triton, which is not installed (it exists for Linux only). "
            "`flashgen.attention` works here on CPU tensors; run the rest on Linux with `pip install triton`."
        )


@functools.cache
def load_module(path: Path) -> ModuleType:
    """Import one generated file; every caller in the process gets the same module.

    Raises:
        RenderError: the file does not import.
    """
    require_triton()
    name = f"flashgen_generated.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RenderError(f"{path} does not import: {type(error).__name__}: {error}") from error
    return module


def module_of(variant: Variant) -> ModuleType:
    """Render a variant, write it and import it."""
    return load_module(write_source(render(variant), variant.slug))


class Launch(NamedTuple):
    """One launch of a call: the kernel's name, its grid, the sizes and strides it takes, its constants and options."""

    kernel: str
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    options: Mapping[str, int]


def launches(variant: Variant, *tensors: Tensor, **numbers: int) -> tuple[Launch, ...]:
    """What a call on these tensors launches, in order.

    Args:
        variant: what to run.
        tensors: q, k, v and o; of a backward also the gradients do, dq, dk and dv. On the "meta" device as well.
        numbers: what else the generated `plan` takes; of decode num_splits.
    """
    planned = module_of(variant).plan(*tensors, **numbers)
    if len(variant.family.kernels) == 1:
        return (Launch("kernel", *planned),)
    return tuple(Launch(*each) for each in planned)


# What a plan's options give to the launch; the others are constants of the kernel.
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_cooperative_grid")


def compile_kernel(
    variant: Variant,
    gpu: Gpu,
    *,
    kernel: str = "kernel",
    options: Mapping[str, int] | None = None,
    aligned: bool = True,
) -> CompiledKernel:
    """Compile a variant for a GPU, present or not.

    Args:
        variant: what to compile.
        gpu: the target.
        kernel: which one, where the generated file has several.
        options: what the generated file's `plan` returned for one call; default: its CONFIG.
        aligned: every row of every tensor starts on a 16-byte boundary, so loads may be 16 bytes wide.

    Raises:
        whatever Triton raises; run untried variants in a child process, since some targets abort theirs.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", gpu.sm, 32) if gpu.backend == "cuda" else GPUTarget("hip", gpu.arch, 64)
    options = kernel_options(variant.config) if options is None else options
    module = module_of(variant)
    blocks = blocks_of(module, kernel, options)
    if blocks:
        source = _gluon_source(getattr(module, kernel), blocks, variant.spec, options)
    else:
        source = _source(getattr(module, kernel), variant.spec, options, aligned=aligned)
    launch = {name: options[name] for name in LAUNCH_OPTIONS if name in options}
    return triton.compile(source, target=target, options={**launch, "enable_fp_fusion": True})


# Of the workspace; fp32 is no operand of a product, thus never swizzled.
FLOAT_DESCRIPTORS = ("workspace_desc", "sums_desc")


def blocks_of(module: ModuleType, kernel: str, options: Mapping[str, int]) -> Mapping[str, list[int]]:
    """The shapes that a kernel's descriptors copy, by parameter; none for a kernel that takes pointers.

    A generated file has them as `BLOCKS`: by kernel where there are several, by how many heads its tiles pack.
    """
    blocks: Mapping[object, Mapping[str, list[int]]] = getattr(module, "BLOCKS", {})
    return blocks.get(options.get("PACKED", kernel), {})


def _gluon_source(kernel: Any, blocks: Mapping[str, list[int]], spec: Spec, options: Mapping[str, int]) -> Any:
    """The Gluon kernel with the types of its arguments; `blocks` has the shapes that its descriptors copy."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    elements = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32, "fp8": gl.float8e4nv}
    signature = {"LSE": "*fp32", "WORKSPACE": "*fp32", "COUNTER": "*i32", "scale": "fp32", **_MODIFIER_POINTERS}
    for name, block in blocks.items():
        dtype = "fp32" if name in FLOAT_DESCRIPTORS else spec.out_dtype if name == "o_desc" else spec.dtype
        layout = gl.NVMMASharedLayout.get_default_for(block, elements[dtype])
        if name in FLOAT_DESCRIPTORS:
            layout = gl.NVMMASharedLayout(0, 32, len(block))
        signature[name] = f"tensordesc<{_TYPES.get(dtype, dtype)}[{', '.join(map(str, block))}],{layout!r}>"
    constants = {(each.num,): options[each.name] for each in kernel.params if each.is_constexpr}
    for each in kernel.params:
        signature.setdefault(each.name, "constexpr" if each.is_constexpr else each.annotation_type or "i32")
    ordered = {name: signature[name] for name in kernel.arg_names}
    return GluonASTSource(kernel, ordered, constexprs=constants)


_TYPES = {"fp8": "fp8e4nv", "int8": "i8"}  # Triton's names, where they differ
# Pointers to contiguous fp32, whatever the spec's dtype; all but the last are allocated by us, thus aligned.
FLOAT_POINTERS = ("LSE", "WORKSPACE", "DLSE")
# Of a bias and its gradient the spec has the type.
_MODIFIER_POINTERS = {
    "ALIBI_SLOPES": "*fp32", "BIAS": None, "DBIAS": None, "MASK": "*u8", "SEGMENT_IDS_Q": "*i32",
    "SEGMENT_IDS_KV": "*i32", "DROPOUT_SEED": "*i64", "SINKS": "*fp32", "DESCALE_Q": "*fp32", "DESCALE_K": "*fp32",
    "DESCALE_V": "*fp32", "CU_SEQLENS_Q": "*i32", "CU_SEQLENS_K": "*i32", "SEQUSED_K": "*i32", "COUNTERS": "*i32",
    "CACHE_SEQLENS": "*i32", "BLOCK_TABLE": "*i32",
}  # fmt: skip

_MOD_TYPES = {"int32": "i32", "int64": "i64", "bool": "u8"}


def _dtype(stride: str, spec: Spec) -> str:
    """Element type of the tensor of this stride: its name begins with that of the tensor."""
    return {"o": spec.out_dtype, "k": spec.kv_dtype, "v": spec.kv_dtype}.get(stride[len("stride_")], spec.dtype)


def _source(kernel: Any, spec: Spec, options: Mapping[str, int], *, aligned: bool) -> Any:
    """The kernel with the types of its arguments.

    Triton's own specialisation would compile again for lengths and strides that are 1 or a multiple of 16; here one
    bit decides, so that lengths never cause a compilation.
    """
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constants[(index,)] = options[name]
        elif parameter.annotation_type:
            signature[name] = parameter.annotation_type
            if aligned and name.startswith("stride_"):
                attributes[(index,)] = [["tt.divisibility", 16 // KV_DTYPES[_dtype(name, spec)].itemsize]]
        elif name.startswith("MOD"):
            element = spec.tensors[int(name[3:])][0]
            signature[name] = "*" + _MOD_TYPES.get(element, element)
        elif name in _MODIFIER_POINTERS:
            signature[name] = _MODIFIER_POINTERS[name] or f"*{spec.bias}"
            # The caller's own tensors: of the others nothing is known of where they start.
            if options.get("DENSE") and name in ("BIAS", "DBIAS", "MASK"):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            dtype = _dtype(f"stride_{name.lower()}", spec)
            signature[name] = "*fp32" if name in FLOAT_POINTERS else f"*{_TYPES.get(dtype, dtype)}"
            if name in FLOAT_POINTERS[:2] or (aligned and name != "DLSE"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


# Lengths that stand for all that a kernel is compiled for once: blocks of keys that are whole, and that are not.
WHOLE, RAGGED = 128, 127


def kernel_resources(
    variant: Variant, gpu: Gpu, kernel: str, seq_kv: int = WHOLE, group: int = 1, rows: int = WHOLE
) -> Resources:
    """Compile one kernel as contiguous tensors would launch it, and report; the task that child processes run.

    `group`: query heads that share a K/V head; `rows` of each; `seq_kv` of a cache in pages: the tokens of one.
    """
    spec = variant.spec
    aligned = all(width * spec.element_bytes % 16 == 0 for width in (spec.head_dim, spec.head_dim_v))
    (q, o), (k, v) = (
        [torch.empty(1, heads, seq, width, device="meta") for width in (spec.head_dim, spec.head_dim_v)]
        for heads, seq in ((group, rows), (1, seq_kv))
    )
    tensors: tuple[Tensor, ...] = (q, k, v, o) if spec.op != "backward" else (q, k, v, o, o, q, k, v)
    scores = q.new_empty(1, group, rows, seq_kv)
    strided = [scores for name in ("bias", "mask") if name in spec.features]
    slopes = [q.new_empty(1, group)] if spec.alibi else []
    descales = {"head": [scores[:, :, 0, 0]] * 3, "block": [scores[:, :, :1, 0]] * 3}.get(spec.descale, [])
    gradient = [scores] if spec.op == "backward" and "bias" in spec.features else []
    tensors = (*tensors, *descales, *gradient, *slopes, *strided)
    numbers = {}
    if spec.op == "decode":
        # Of the others only the number of dimensions counts.
        others = variant.family.derived(spec)["planned"][4:]  # type: ignore[index]
        tensors = (q, k, v, o, *({"k_new": k, "v_new": v}.get(name, scores[..., 0]) for name in others))
        numbers = {"num_splits": 1}
    options = next(each.options for each in launches(variant, *tensors, **numbers) if each.kernel == kernel)
    return resources_of(compile_kernel(variant, gpu, kernel=kernel, options=options, aligned=aligned))


def compile_resources(variant: Variant, gpu: Gpu) -> tuple[Resources, ...]:
    """The same for every kernel of a variant, in the family's order."""
    return tuple(kernel_resources(variant, gpu, kernel) for kernel in variant.family.kernels)
