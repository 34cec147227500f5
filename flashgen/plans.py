"""The slow half of a plan: choose a variant for a call and bind its kernels to the call's layout."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashgen.errors import InputError, UnsupportedError
from flashgen.hardware import gpu_of
from flashgen.launch import bind, is_aligned, laid_out
from flashgen.problem import Problem
from flashgen.select import Selection, give_up, select
from flashgen.spec import Spec

_planning = threading.Lock()


def select_and_bind(
    spec: Spec,
    problem: Problem,
    family: str | None,
    views: Sequence[Tensor],
    nothing: bool,
    bind: Callable[..., Callable[..., None]] = bind,
) -> tuple[Selection, Callable[..., None] | None, bool]:
    """Choose, compile and bind; a tuned variant that this machine cannot compile or load gives way to the default.

    Args:
        spec, problem: the call's.
        family: only this kernel family, or an error; None chooses.
        views: what the kernels are bound to (flashgen.launch.laid_out), all of them as if the layout were "bhsd".
        nothing: whether there is nothing to launch.
        bind: as `flashgen.launch.bind`.

    Returns:
        the selection; the bound kernels, None where there is nothing to launch; and whether both hold for later calls.

    Raises:
        InputError: `bind` says so.
        UnsupportedError: no kernel does this.
    """
    with _planning:
        # A capture must not read files; what is chosen then without them is not kept for later.
        capturing = torch.cuda.is_current_stream_capturing()
        selection = select_for(spec, problem, family, views, read_files=not capturing)
        if nothing:
            return selection, None, not capturing
        try:
            bound = bind(selection.variant, *views)
        except (InputError, UnsupportedError):
            raise
        except Exception as error:  # whatever a compiler does with a config that was tuned under another version
            if selection.method == "default":
                raise
            reason = f"{type(error).__name__}: {error}"
            selection = give_up(selection, spec, family, reason, aligned=_suits_tma(spec, views))
            warnings.warn(f"{selection.notes[0]}. Using {selection.variant.slug}. Tune again.", stacklevel=5)
            bound = bind(selection.variant, *views)
        return selection, bound, not capturing


def select_for(
    spec: Spec, problem: Problem, family: str | None, tensors: Sequence[Tensor], *, read_files: bool = True
) -> Selection:
    """The variant for these tensors, as `select_and_bind` chooses it."""
    gpu = gpu_of(tensors[0].device.index)
    return select(spec, problem, gpu, family, read_files=read_files, aligned=_suits_tma(spec, tensors))


def _suits_tma(spec: Spec, tensors: Sequence[Tensor]) -> bool:
    tensors = tensors[: len(laid_out(spec.plain))]  # modifiers, which come last, are read in other ways
    return is_aligned(*tensors) and all(stride > 0 for tensor in tensors for stride in tensor.stride())


def as_bhsd(layout: str, *tensors: Tensor) -> list[Tensor]:
    """Views [batch, heads, seq, head_dim] of tensors in either layout."""
    return [tensor if layout == "bhsd" else tensor.transpose(1, 2) for tensor in tensors]
