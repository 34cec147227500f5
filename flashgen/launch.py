"""Compiled kernels + tensor layout -> a bound launch that repeats none of that work."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashgen import descriptors
from flashgen.bound import Bound, Run, with_spare
from flashgen.compile import Launch, compile_kernel, launches, module_of
from flashgen.errors import UnsupportedError
from flashgen.families import Variant
from flashgen.families.serving import planned
from flashgen.features import DESCALES
from flashgen.hardware import gpu_of
from flashgen.serving import check_splits
from flashgen.spec import Spec

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

MAX_GRID = 2**31 - 1

_ARGUMENTS = {
    "forward": ("q", "k", "v", "o", "lse"),
    "backward": ("q", "k", "v", "o", "lse", "do", "dlse", "dq", "dk", "dv"),
    "decode": ("q", "k", "v", "o", "lse", "workspace", "counters", "cache_seqlens"),
}
_LAID_OUT = {"forward": ("q", "k", "v", "o"), "backward": ("q", "k", "v", "o", "do", "dq", "dk", "dv")}
# Modifiers, and the gradient of one, that kernels read by strides of their own.
_STRIDED = ("alibi_slopes", "bias", "mask", "dbias")


@functools.cache
def arguments_of(spec: Spec) -> tuple[str, ...]:
    """What the generated `launch` of a spec takes, in order. Kernels name the same, pointers in capitals."""
    named = _ARGUMENTS[spec.op]
    if spec.op == "backward":
        named += ("dbias", "workspace") if "bias" in spec.features else ("workspace",)
    named += ("block_table",) * spec.paged + ("k_new", "v_new") * spec.appended
    return (*named, *spec.modifiers, "scale")


@functools.cache
def laid_out(spec: Spec) -> tuple[str, ...]:
    """Those whose layout a kernel is bound to; the others are contiguous, or numbers."""
    if spec.op == "decode":
        return planned(spec)
    strided = _STRIDED if spec.descale == "tensor" else (*_STRIDED, *DESCALES)
    return (*_LAID_OUT[spec.op], *(name for name in arguments_of(spec) if name in strided))


_compiling = threading.Lock()


def _bound(variant: Variant, device: int, launch: Launch, aligned: bool) -> Bound:
    """One launch of a variant, compiled and loaded."""
    return Bound(loaded(variant, launch.kernel, device, tuple(sorted(launch.options.items())), aligned), device, launch)


def bind(variant: Variant, *tensors: Tensor, num_splits: int = 1) -> Callable[..., None]:
    """Compile (once) and load a variant for tensors of these shapes, strides, alignment and device.

    Args:
        variant: what to run; its spec must be that of the tensors.
        tensors: `laid_out` of the variant's spec; those [batch, heads, seq, head_dim] with contiguous rows.
        num_splits: of decode, how many programs share the keys of a row (`split_for`).

    Returns:
        a function of `arguments_of` that launches every kernel, in order.

    Raises:
        UnsupportedError: the call needs more blocks than one launch can have.
        whatever Triton raises when the variant does not compile or fit.
    """
    device = tensors[0].device.index
    spec = variant.spec
    aligned = is_aligned(*tensors[: 4 + 2 * spec.appended if spec.op == "decode" else len(_LAID_OUT[spec.op])])
    if variant.family.aligned and not aligned:
        raise UnsupportedError(f"{variant.slug} needs rows that start on 16-byte boundaries.")
    numbers = {"num_splits": num_splits} if spec.op == "decode" else {}
    calls = launches(variant, *tensors, **numbers)
    for each in calls:
        if each.grid[0] > MAX_GRID:
            raise UnsupportedError(
                f"the call needs {each.grid[0]} blocks of {variant.slug}'s {each.kernel}, one launch has at most "
                f"{MAX_GRID}. Split the batch."
            )
    described = hasattr(module_of(variant), "BLOCKS")
    if spec.op != "backward":
        bound = _bound(variant, device, calls[0], aligned)
        return descriptors.forward(bound, tensors, counts=variant.config["schedule"] == 2) if described else bound

    def run_of(launch: Launch) -> Run:
        bound = _bound(variant, device, launch, aligned)
        return descriptors.describing(bound, _layouts(variant, launch.kernel, tensors)) if described else bound

    def complete(launch: Launch) -> Run:
        run = run_of(launch)
        if not launch.options.get("launch_cooperative_grid"):
            return run
        # The last of the sizes says whether all blocks run at once.
        options = {**launch.options, "launch_cooperative_grid": False}
        other = launch._replace(sizes=(*launch.sizes[:-1], 0), options=options)
        return with_spare(run, functools.cache(lambda: run_of(other)))

    if described and 0 in (tensors[0].numel(), tensors[1].numel()):
        return _clear
    runs = [(complete(each), _pick(variant, each.kernel)) for each in calls]

    def launch_all(*arguments: Tensor | float | None) -> None:
        for run, pick in runs:
            run(*pick(arguments))

    return launch_all


def _clear(*arguments: Any) -> None:
    """The gradients of nothing, which TMA does not describe."""
    for name in ("dq", "dk", "dv"):
        arguments[_ARGUMENTS["backward"].index(name)].zero_()


def _names(variant: Variant, kernel: str) -> list[str]:
    """The parameters of a kernel that are `arguments_of` its spec, in its own order and by its own names."""
    parameters = (parameter.name for parameter in getattr(module_of(variant), kernel).params)
    return [name for name in parameters if _argument(name) in arguments_of(variant.spec)]


def _argument(parameter: str) -> str:
    """What a kernel takes by this name; fp32 sums are a part of the workspace, described in their own way."""
    name = parameter.lower().removesuffix("_desc")
    return "workspace" if name == "sums" else name


def _layouts(variant: Variant, kernel: str, tensors: tuple[Tensor, ...]) -> list[descriptors.Layout | None]:
    """(shape, strides) of what the kernel takes as descriptors, in the order of its parameters; None for the others."""
    named = zip(laid_out(variant.spec), tensors, strict=True)
    layouts: dict[str, descriptors.Layout] = {
        f"{name}_desc": (list(tensor.shape), list(tensor.stride())) for name, tensor in named
    }
    batch, heads, seq_q, _ = tensors[0].shape
    # Log-sum-exps and deltas, padded; they come first.
    length = -(-seq_q // 128) * 128
    layouts["workspace_desc"] = [2 * batch * heads, length], [length, 1]
    layouts["sums_desc"] = [workspace_size(variant, tensors[0]) // 256, 256], [256, 1]
    return [layouts.get(name) for name in _names(variant, kernel)]


def _pick(variant: Variant, kernel: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Which of `arguments_of` its spec a kernel takes, in its own order."""
    known = arguments_of(variant.spec)
    return operator.itemgetter(*(known.index(_argument(name)) for name in _names(variant, kernel)))


def is_aligned(*tensors: Tensor) -> bool:
    """Every row of every tensor starts on a 16-byte boundary."""
    return all(
        tensor.data_ptr() % 16 == 0 and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:3])
        for tensor in tensors
    )


def loaded(
    variant: Variant, kernel: str, device: int, options: tuple[tuple[str, int], ...], aligned: bool
) -> CompiledKernel:
    """The compiled kernel, loaded on a device; one per variant and kind of layout, never one per length."""
    with _compiling:
        return _loaded(variant, kernel, device, options, aligned)


@functools.cache
def _loaded(
    variant: Variant, kernel: str, device: int, options: tuple[tuple[str, int], ...], aligned: bool
) -> CompiledKernel:
    chosen: Mapping[str, int] = dict(options)
    with torch.cuda.device(device):
        compiled = compile_kernel(variant, gpu_of(device), kernel=kernel, options=chosen, aligned=aligned)
        compiled.run  # noqa: B018 (the first access loads the binary)
        return compiled


class Split(NamedTuple):
    """How the keys of a decode are shared, and what its kernel needs for that.

    Attributes:
        splits: programs that share the keys of a row.
        workspace: fp32 numbers of scratch memory; what is left in it does not matter.
        counters: int32 numbers, 0 before the kernel and after it (`flashgen.descriptors.zeros_of`).
    """

    splits: int
    workspace: int
    counters: int


def split_for(variant: Variant, *tensors: Tensor, num_splits: int | None = None, multiprocessors: int = 0) -> Split:
    """How a decode of `laid_out` tensors is split: as the caller says, or so that its programs fill their GPU, or one
    of so many multiprocessors.

    Raises:
        InputError: more splits than the kernel has room for, or none.
    """
    module = module_of(variant)
    named = dict(zip(laid_out(variant.spec), tensors, strict=True))
    sized = [named[name] for name in ("q", "k", "block_table") if name in named]
    check_splits(num_splits)
    if num_splits is None:
        num_splits = module.split_count(*sized, multiprocessors or gpu_of(tensors[0].device.index).num_sms)
    return Split(num_splits, *module.workspace_size(*sized, num_splits))


def launcher(variant: Variant) -> Callable[..., None]:
    """A function of `arguments_of` that binds on every call; for checking and timing one variant on many layouts.

    That of a decode takes neither workspace nor counters, and may take num_splits.
    """
    names = arguments_of(variant.spec)
    pick = operator.itemgetter(*(names.index(name) for name in laid_out(variant.spec)))

    def launch(*arguments: Tensor | float | None) -> None:
        bind(variant, *pick(arguments))(*arguments)

    def launch_split(*arguments: Tensor | float | None, num_splits: int | None = None) -> None:
        given = [*arguments[:5], None, None, *arguments[5:]]
        split = split_for(variant, *pick(given), num_splits=num_splits)
        given[5:7] = scratch_for(split, given[0].device)  # type: ignore[union-attr]
        bind(variant, *pick(given), num_splits=split.splits)(*given)

    return launch_split if variant.spec.op == "decode" else launch


def scratch_for(split: Split, device: torch.device) -> tuple[Tensor, Tensor]:
    """Workspace and counters for launches on the current stream of a device."""
    workspace = torch.empty(split.workspace, dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    return workspace, descriptors.zeros_of(device.index, stream, split.counters)


def workspace_size(variant: Variant, q: Tensor) -> int:
    """How many fp32 numbers a backward variant needs as workspace for this q."""
    return int(module_of(variant).workspace_size(q))
