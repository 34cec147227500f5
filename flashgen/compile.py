"""Source text -> file -> module -> compiled kernel and what it uses; the only file that knows Triton's compiler."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashgen.errors import MissingDependencyError, RenderError
from flashgen.families import Variant
from flashgen.hardware import Gpu
from flashgen.paths import generated_dir
from flashgen.render import kernel_options, render
from flashgen.space import Rejection
from flashgen.spec import Spec
from flashgen.workers import Failure

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


def require_triton() -> None:
    """Say what is missing where Triton cannot be imported (macOS, Windows)."""
    if importlib.util.find_spec("triton") is None:
        raise MissingDependencyError(
            "generating kernels needs the package triton, which is not installed (it exists for Linux only). "
            "`flashgen.attention` works here on CPU tensors; run the rest on Linux with `pip install triton`."
        )


def write_source(text: str, slug: str, folder: Path | None = None) -> Path:
    """Write `text` to `<folder>/<slug>_<hash>.py` once, atomically, and return the path.

    The name holds a hash of the text, so a path never changes its content: Triton reads kernels back through
    `inspect`, which trusts the path (rewriting one in place gave the old source with the new bytecode).
    """
    folder = generated_dir() if folder is None else folder
    path = folder / f"{slug}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    return path


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


def compile_kernel(
    variant: Variant,
    gpu: Gpu,
    *,
    options: Mapping[str, int] | None = None,
    aligned: bool = True,
    lse: bool = True,
) -> CompiledKernel:
    """Compile a variant for a GPU, present or not.

    Args:
        variant: what to compile.
        gpu: the target.
        options: what the generated file's `plan` returned for one call; default: its CONFIG.
        aligned: every row of every tensor starts on a 16-byte boundary, so loads may be 16 bytes wide.
        lse: the kernel writes the log-sum-exp; without it the argument is None.

    Raises:
        whatever Triton raises; run untried variants in a child process, since some targets abort theirs.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", gpu.sm, 32) if gpu.backend == "cuda" else GPUTarget("hip", gpu.arch, 64)
    options = kernel_options(variant.config) if options is None else options
    source = _source(module_of(variant).kernel, variant.spec, options, aligned=aligned, lse=lse)
    launch = {name: options[name] for name in ("num_warps", "num_stages")}
    return triton.compile(source, target=target, options={**launch, "enable_fp_fusion": True})


def _source(kernel: Any, spec: Spec, options: Mapping[str, int], *, aligned: bool, lse: bool) -> Any:
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
                attributes[(index,)] = [["tt.divisibility", 16 // spec.element_bytes]]
        elif name == "LSE" and not lse:
            signature[name] = "constexpr"
            constants[(index,)] = None
        else:
            signature[name] = "*fp32" if name == "LSE" else f"*{spec.dtype}"
            if aligned or name == "LSE":
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


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
    import io

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
    "HGMMA": "wgmma", "UTCHMMA": "tcgen05", "HMMA": "mma", "MUFU": "exp2", "SHFL": "shuffle", "F2FP": "convert",
    "FADD": "fp32", "FMUL": "fp32", "FFMA": "fp32", "FMNMX": "fp32", "FMNMX3": "fp32", "FSEL": "fp32",
    "FADD2": "fp32x2", "FMUL2": "fp32x2", "FFMA2": "fp32x2",
    "LDS": "shared", "STS": "shared", "LDSM": "ldmatrix", "STSM": "shared", "LDGSTS": "cp_async", "UTMALDG": "cp_async",
    "LDG": "global", "STG": "global", "LDL": "spill", "STL": "spill", "BAR": "barrier", "WARPGROUP": "warpgroup",
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
    """Count the instructions of the innermost loop with the most matrix products, by kind and in total.

    Masked loops do the same products with more instructions around them: of equals the leaner loop is the hot one.
    """
    lines = sass.splitlines()
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.startswith(".L_x_")}
    best: Counter[str] = Counter()
    for number, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if jump is None or labels.get(jump[1], number) >= number:
            continue
        counts: Counter[str] = Counter()
        for inner in lines[labels[jump[1]] : number + 1]:
            opcode = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", inner)
            if opcode is not None:
                counts["total"] += 1
                counts[_KINDS.get(opcode[1], "other")] += 1
        if (_products(counts), -counts["total"]) > (_products(best), -best["total"]):
            best = counts
    return dict(best)


def _products(counts: Counter[str]) -> int:
    return counts["wgmma"] + counts["mma"] + counts["tcgen05"] + (counts["fp32"] > 0)


def compile_resources(variant: Variant, gpu: Gpu) -> Resources:
    """Compile and report; the task that child processes run."""
    return resources_of(compile_kernel(variant, gpu))


# Bytes of stack a thread may spill before a candidate is not worth timing.
MAX_STACK = 256


def judge(variant: Variant, gpu: Gpu, outcome: Resources | Failure) -> Rejection | None:
    """Why a compiled candidate is not worth running, or None."""
    if isinstance(outcome, Failure):
        return Rejection("compile", f"compile: {outcome.kind}", f"does not compile for {gpu.arch}: {outcome.reason}")
    if outcome.shared > gpu.shared_per_block:
        reason = f"uses {outcome.shared} bytes of shared memory, {gpu.name} allows {gpu.shared_per_block}"
        return Rejection("resources", "shared memory", reason)
    if outcome.stack > MAX_STACK:
        return Rejection("resources", "spills", f"spills {outcome.stack} bytes of registers a thread")
    return None
