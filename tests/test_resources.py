"""What is read back from a compiled kernel, against the compiler's own tools and known kernels."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from variants import variant

from flashgen.compile import compile_kernel
from flashgen.families import Variant
from flashgen.gate import MAX_STACK, judge
from flashgen.hardware import Gpu
from flashgen.resources import Resources, disassemble, loop_instructions, resources_of
from flashgen.spec import Spec

A100, H100, B200, MI300X = (Gpu.named(name) for name in ("a100", "h100", "b200", "mi300x"))
WIDE = variant(Spec(dtype="fp16"), 128, 64, 8, 2)
NARROW = variant(Spec(head_dim=64, head_dim_v=64, dtype="fp16", causal="bottom_right"), 64, 32, 4, 2)


@functools.cache
def _compiled(which: Variant, gpu: Gpu) -> Any:
    return compile_kernel(which, gpu)


# Matrix products of one pass of the hot loop come in the architecture's own instruction.
@pytest.mark.parametrize(("gpu", "products"), [(A100, "mma"), (H100, "wgmma"), (B200, "tcgen05")])
@pytest.mark.parametrize("which", [NARROW, WIDE], ids=["narrow", "wide"])
def test_hot_loop_is_one_block_of_keys(which: Variant, gpu: Gpu, products: str) -> None:
    loop = loop_instructions(disassemble(_compiled(which, gpu).asm["cubin"]))
    assert loop[products] > 0
    # One power of two per score, spread over the threads, and a few per row.
    scores = which.config["block_q"] * which.config["block_kv"] // (32 * which.config["num_warps"])
    assert scores <= loop["exp2"] <= 1.5 * scores
    assert loop["total"] == sum(count for kind, count in loop.items() if kind != "total")
    assert loop.get("spill", 0) == 0


def test_a_loop_that_is_not_there() -> None:
    assert loop_instructions("") == {}
    assert loop_instructions("        /*0000*/                   EXIT ;\n") == {}


# Dynamic shared memory, bytes, as measured for kernels of these tiles on every version of Triton from 3.6 to 3.9.
@pytest.mark.parametrize(
    ("which", "gpu", "shared"),
    [
        (WIDE, A100, 65536),
        (WIDE, H100, 98304),
        (variant(Spec(head_dim=64, head_dim_v=64, dtype="fp16"), 128, 64, 8, 3), A100, 49152),
        (variant(Spec(head_dim=64, head_dim_v=64, dtype="fp16"), 128, 64, 8, 3), H100, 65536),
    ],
)
def test_resources_of_known_kernels(which: Variant, gpu: Gpu, shared: int) -> None:
    resources = resources_of(_compiled(which, gpu))
    assert resources.shared == shared
    assert resources.stack <= MAX_STACK["forward"]
    assert judge(which, gpu, (resources,)) is None


# The last one keeps too much for the registers of 4 warps.
@pytest.mark.parametrize(
    ("which", "spills"), [(NARROW, False), (WIDE, False), (variant(WIDE.spec, 128, 128, 4, 2), True)]
)
@pytest.mark.parametrize("gpu", [A100, H100], ids=lambda gpu: gpu.name)
def test_registers_and_stack_as_cuobjdump_reads_them(which: Variant, spills: bool, gpu: Gpu, tmp_path: Path) -> None:
    import triton

    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(_compiled(which, gpu).asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [tool, "--dump-resource-usage", cubin]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()  # type: ignore[union-attr]
    resources = resources_of(_compiled(which, gpu))
    assert (resources.registers, resources.stack) == (int(registers), int(stack))
    assert (resources.stack > 0) == spills


def test_amd_reports_shared_memory_only() -> None:
    resources = resources_of(_compiled(NARROW, MI300X))
    low, high = NARROW.family.shared_memory(NARROW.spec, NARROW.config, MI300X)
    assert low <= resources.shared <= high and resources.shared > 0
    assert resources == Resources(resources.shared, 0, 0, {})
