"""A kernel that only Hopper and newer GPUs can run; Triton's compiler aborts its process for older ones."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.9 renamed it.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def kernel(X):
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], X.layout)
    load(X, [0, 0], arrived, tile)
