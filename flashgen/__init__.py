"""flashgen generates flash-attention kernels and finds the fastest one for your GPU.

The files in reading order: errors, hardware, paths, descales, dropout, expressions, judging, modifiers, problem, tiles,
features, coherence, spec, reference, reference_backward, tensors, cpu, caches, serving, kvcache_cpu, space, families,
render, starting, workers, compile, resources, gate, descriptors, bound, launch, cases, check, decode_cases,
check_decode, benchmark, graphs, bandwidth, decode_inputs, queueing, model, evaluate, untrusted, records, choice,
store, select, plans, gradients, modified, varlen, kvcache_plans, kvcache, dispatch, autograd, flat, modified_vmap,
modified_autograd, varlen_autograd, varlen_api, kvcache_autograd, kvcache_api, fp8, merging, api, nn, candidates,
search, compilations, tune, mods, peers, agreement, compare, decode_peers, compare_decode, export, analyze, budget,
combinations, plot, report, report_decode, cli.
"""

from __future__ import annotations

from flashgen import nn as nn
from flashgen.api import attention
from flashgen.dispatch import explain, forget
from flashgen.errors import FlashgenError
from flashgen.kvcache_api import attention_kvcache, explain_kvcache
from flashgen.merging import merge
from flashgen.varlen_api import attention_varlen
from flashgen.version import VERSION as __version__

__all__ = [
    "FlashgenError", "__version__", "attention", "attention_kvcache", "attention_varlen", "explain", "explain_kvcache",
    "forget", "merge", "nn",
]  # fmt: skip
