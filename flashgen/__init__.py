"""flashgen generates flash-attention kernels and finds the fastest one for your GPU.

The files in reading order: errors, hardware, paths, spec, reference, tensors, space, families, render, workers,
compile, resources, launch, check, benchmark, model, evaluate, records, choice, store, select, candidates, search, tune,
dispatch, ops, compare, export, analyze, budget, plot, report, cli.
"""

from __future__ import annotations

from flashgen import ops as ops
from flashgen.dispatch import attention, explain, forget
from flashgen.errors import FlashgenError
from flashgen.version import VERSION as __version__

__all__ = ["FlashgenError", "__version__", "attention", "explain", "forget"]
