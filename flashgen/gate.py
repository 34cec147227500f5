"""What a compiled candidate must be to deserve time on a GPU."""

from __future__ import annotations

from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.resources import Resources
from flashgen.space import Rejection
from flashgen.workers import Failure

# Bytes of stack a thread may spill before a candidate is not worth timing. The backward's dK and dV spill around their
# loop more than inside: 664 bytes cost 9 % on an H200, where the best tile of head_dim 128 has 168.
MAX_STACK = {"forward": 256, "backward": 1024, "decode": 256}


def judge(variant: Variant, gpu: Gpu, outcome: tuple[Resources, ...] | Failure) -> Rejection | None:
    """Why a compiled candidate is not worth running, or None."""
    if isinstance(outcome, Failure):
        return Rejection("compile", f"compile: {outcome.kind}", f"does not compile for {gpu.arch}: {outcome.reason}")
    kernels = variant.family.kernels
    for kernel, used in zip(kernels, outcome, strict=True):
        who = f"{kernel} " if len(kernels) > 1 else ""
        if used.shared > gpu.shared_per_block:
            reason = f"{who}uses {used.shared} bytes of shared memory, {gpu.name} allows {gpu.shared_per_block}"
            return Rejection("resources", "shared memory", reason)
        if used.stack > MAX_STACK[variant.spec.op]:
            return Rejection("resources", "spills", f"{who}spills {used.stack} bytes of registers a thread")
        undone = _undone(used, kernel) if variant.family.by_hand else None
        if undone is not None:
            return Rejection("resources", "undone by the compiler", undone)
    return None


# WARPGROUP instructions of a loop whose products overlap as written: an arrival and a wait for each of them (two, of a
# backward up to four, where it is fused five of which one has two halves), one to spare.
MAX_WARPGROUP = {"kernel": 5, "dkdv_kernel": 9, "dq_kernel": 9, "gradients_kernel": 11}
# Accesses to spilled registers in a loop: dK, dV, S and dP leave no room for some addresses. At most 8 with Triton 3.6;
# later ones have more in the branch for blocks with hidden pairs, which few blocks of a causal tile take.
MAX_LOOP_SPILLS = {"gradients_kernel": 48}


def _undone(used: Resources, kernel: str) -> str | None:
    """Which of a hand-written loop's overlaps the compiler gave up. Each of them predicted losses on an H200."""
    loop = used.loop
    if loop.get("spill", 0) > MAX_LOOP_SPILLS.get(kernel, 0):
        return f"{loop['spill']} accesses to spilled registers in the loop"
    if loop.get("warpgroup", 0) > MAX_WARPGROUP.get(kernel, 0):
        # What ptxas tells as C7510 to C7515.
        return f"{loop['warpgroup']} WARPGROUP instructions in the loop: ptxas serialises its products"
    if loop.get("permute", 0) > loop.get("convert", 0):
        return f"{loop['permute']} PRMT instructions in the loop: P is carried as single values"
    return None
