"""What the compiler made of a kernel: shared memory, registers, spills and the instructions of its hot loop."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel


@dataclass(frozen=True)
class Resources:
    """What the compiler made of a kernel.

    Attributes:
        shared: dynamic shared memory, bytes per block.
        registers: registers per thread; misleading where stack is large.
        stack: bytes of stack frame per thread; more than 0 means spilled registers.
        loop: instruction counts of the SASS loop that holds most matrix products, by kind; per warp, once through.
            Empty on AMD.
    """

    shared: int
    registers: int
    stack: int
    loop: dict[str, int]


def resources_of(compiled: CompiledKernel) -> Resources:
    """Read what a compiled kernel uses, without a GPU."""
    metadata: Any = compiled.metadata
    if "cubin" not in compiled.asm:
        return Resources(metadata.shared, 0, 0, {})
    cubin = compiled.asm["cubin"]
    registers, stack = _cubin_usage(cubin)
    return Resources(metadata.shared, registers, stack, loop_instructions(disassemble(cubin)))


_EIATTR_FRAME_SIZE, _EIATTR_REGCOUNT = 0x11, 0x2F


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) per thread, from the cubin's `.nv.info` section; outlined functions: the largest."""
    from elftools.elf.elffile import ELFFile

    values: dict[int, list[int]] = {_EIATTR_FRAME_SIZE: [0], _EIATTR_REGCOUNT: [0]}
    section: Any = ELFFile(io.BytesIO(cubin)).get_section_by_name(".nv.info")
    data: bytes = section.data()
    position = 0
    while position < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if form == 4:  # a sized value: (symbol, number)
            if attribute in values and size == 8:
                values[attribute].append(struct.unpack_from("<II", data, position)[1])
            position += size
    return max(values[_EIATTR_REGCOUNT]), max(values[_EIATTR_FRAME_SIZE])


# SASS opcode -> what it keeps busy; everything else counts as "other".
_KINDS = {
    "HGMMA": "wgmma", "QGMMA": "wgmma", "UTCHMMA": "tcgen05", "HMMA": "mma", "MUFU": "exp2", "SHFL": "shuffle",
    "F2FP": "convert",
    "FADD": "fp32", "FMUL": "fp32", "FFMA": "fp32", "FMNMX": "fp32", "FMNMX3": "fp32", "FSEL": "fp32",
    "FADD2": "fp32x2", "FMUL2": "fp32x2", "FFMA2": "fp32x2",
    "LDS": "shared", "STS": "shared", "LDSM": "ldmatrix", "STSM": "shared", "LDGSTS": "cp_async", "UTMALDG": "cp_async",
    "LDG": "global", "STG": "global", "LDL": "spill", "STL": "spill", "BAR": "barrier", "WARPGROUP": "warpgroup",
    "PRMT": "permute",
}  # fmt: skip


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, by the disassembler that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def loop_instructions(sass: str) -> dict[str, int]:
    """Count the instructions of the hot loop, by kind and in total: of the innermost loops, the leanest with products.

    Masked loops do the same products with more instructions around them, and outer ones (a persistent grid) hold
    several. Where warps are specialised, a wait for a barrier stands behind the code and jumps back without a
    condition: what lies between is no loop, so jumps with a condition count alone if they enclose products.
    """
    lines = sass.splitlines()
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.startswith(".L_x_")}
    loops: dict[tuple[int, int], Counter[str]] = {}
    conditional: dict[tuple[int, int], Counter[str]] = {}
    for number, line in enumerate(lines):
        jump = re.search(r"(@!?U?P\w+ +)?BRA\b.*`\((\.L_x_\d+)\)", line)
        if jump is not None and labels.get(jump[2], number) < number:
            counts = _count(lines[labels[jump[2]] : number + 1])
            if _products(counts) + counts["fp32"]:
                loops[labels[jump[2]], number] = counts
            if _products(counts) and jump[1]:
                conditional[labels[jump[2]], number] = counts
    loops = conditional or loops
    innermost = [
        counts
        for (start, stop), counts in loops.items()
        if not any(start <= low and high <= stop and (low, high) != (start, stop) for low, high in loops)
    ]
    innermost.sort(key=lambda counts: (-_products(counts), counts["total"]))
    return dict(innermost[0]) if innermost else {}


def _count(lines: list[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        opcode = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", line)
        if opcode is not None:
            counts["total"] += 1
            counts[_KINDS.get(opcode[1], "other")] += 1
    return counts


def _products(counts: Counter[str]) -> int:
    return counts["wgmma"] + counts["mma"] + counts["tcgen05"]
