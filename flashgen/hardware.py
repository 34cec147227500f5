"""The machine as an argument: what a GPU can hold and how fast it is; `current_gpu()` alone asks CUDA what is there."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from flashgen.errors import GpuError, UnknownNameError, did_you_mean

Backend = Literal["cuda", "hip"]

Identity = tuple[str, tuple[int, int], int, int]


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    Attributes:
        name: how `--gpu` spells it and how its file of winners is called.
        label: the product.
        backend: "cuda" or "hip".
        capability: CUDA compute capability; (9, 4) stands for gfx942.
        num_sms: multiprocessors (compute units on AMD).
        shared_per_block: bytes of shared memory that one block may ask for.
        shared_per_sm: bytes of shared memory of one multiprocessor.
        threads_per_sm: resident threads of one multiprocessor.
        l2_bytes, memory_bytes: sizes in bytes.
        dram_gbs: memory bandwidth, 1e9 bytes a second.
        tensor_tflops: dense fp16/bf16 products with fp32 accumulation, 1e12 FLOP a second.
        fp32_tflops: plain fp32, 1e12 FLOP a second.
        clock_ghz: the boost clock that belongs to these peaks.
        source: where the figures come from.
    """

    name: str
    label: str
    backend: Backend
    capability: tuple[int, int]
    num_sms: int
    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    l2_bytes: int
    memory_bytes: int
    dram_gbs: float
    tensor_tflops: float
    fp32_tflops: float
    clock_ghz: float
    source: str

    registers_per_sm = 65536

    @property
    def sm(self) -> int:
        """Compute capability as one number: 80, 90, 120."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def arch(self) -> str:
        """How the compiler calls the target: `sm_90`, or `gfx942` on AMD."""
        return f"sm_{self.sm}" if self.backend == "cuda" else _HIP_ARCH.get(self.capability, f"gfx{self.sm}")

    @property
    def warp_threads(self) -> int:
        """Threads of a warp, or of what AMD calls a wavefront."""
        return 32 if self.backend == "cuda" else 64

    @property
    def identity(self) -> Identity:
        """What makes tuned configs exchangeable: the silicon, not the product's label."""
        return (self.backend, self.capability, self.num_sms, self.shared_per_block)

    @staticmethod
    def named(name: str) -> Gpu:
        """Look up a known GPU; case and separators do not matter.

        Raises:
            UnknownNameError: no GPU has this name.
        """
        wanted = _normalised(name)
        for gpu in KNOWN_GPUS.values():
            if wanted in (_normalised(gpu.name), _normalised(gpu.label)):
                return gpu
        raise UnknownNameError(f"no GPU is known as {name!r}. {did_you_mean(name.lower(), KNOWN_GPUS)}")


def _normalised(name: str) -> str:
    return re.sub(r"nvidia|geforce|amd|instinct|[^a-z0-9]", "", name.lower())


_HIP_ARCH = {(9, 4): "gfx942"}

# capability: (shared memory per block, per SM, threads per SM). CUDA C++ Programming Guide,
# "Technical specifications per compute capability"; AMD CDNA 3 ISA for the local data share.
_LIMITS = {
    (7, 0): (98304, 98304, 2048),
    (7, 5): (65536, 65536, 1024),
    (8, 0): (166912, 167936, 2048),
    (8, 6): (101376, 102400, 1536),
    (8, 9): (101376, 102400, 1536),
    (9, 0): (232448, 233472, 2048),
    (9, 4): (65536, 65536, 2048),
    (10, 0): (232448, 233472, 2048),
    (12, 0): (101376, 102400, 1536),
}

# name, label, capability, SMs, L2 MB, memory GB, GB/s, tensor TFLOP/s, fp32 TFLOP/s, GHz, source
_TABLE: tuple[tuple[str, str, tuple[int, int], int, int, int, float, float, float, float, str], ...] = (
    ("t4", "NVIDIA T4", (7, 5), 40, 4, 16, 320, 65, 8.1, 1.59, "T4 datasheet, Turing whitepaper"),
    ("v100", "NVIDIA V100 SXM2", (7, 0), 80, 6, 32, 900, 125, 15.7, 1.53, "V100 whitepaper"),
    ("a10", "NVIDIA A10", (8, 6), 72, 6, 24, 600, 125, 31.2, 1.695, "A10 datasheet"),
    ("a30", "NVIDIA A30", (8, 0), 56, 24, 24, 933, 165, 10.3, 1.44, "A30 datasheet"),
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 40, 40, 1555, 312, 19.5, 1.41, "A100 whitepaper"),
    ("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 80, 2039, 312, 19.5, 1.41, "A100 datasheet, whitepaper"),
    ("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 6, 24, 936, 71, 35.6, 1.695, "GA102 whitepaper"),
    ("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 24, 1008, 165.2, 82.6, 2.52, "Ada whitepaper"),
    ("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 32, 1792, 209.5, 104.8, 2.407, "RTX Blackwell whitepaper"),
    ("l4", "NVIDIA L4", (8, 9), 58, 48, 24, 300, 121, 30.3, 2.04, "L4 datasheet"),
    ("l40s", "NVIDIA L40S", (8, 9), 142, 96, 48, 864, 362, 91.6, 2.52, "L40S datasheet"),
    ("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 80, 3350, 989, 67, 1.83, "H100 datasheet, whitepaper"),
    ("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 114, 50, 80, 2000, 756, 51, 1.62, "H100 datasheet, whitepaper"),
    ("h200", "NVIDIA H200", (9, 0), 132, 60, 141, 4800, 989, 67, 1.83, "H200 datasheet; L2 as the driver reports it"),
    ("b200", "NVIDIA B200", (10, 0), 148, 126, 180, 8000, 2250, 75, 1.86, "HGX B200 datasheet"),
    ("mi300x", "AMD Instinct MI300X", (9, 4), 304, 32, 192, 5300, 1307, 163.4, 2.1, "MI300X datasheet"),
)


def _row(row: tuple[str, str, tuple[int, int], int, int, int, float, float, float, float, str]) -> Gpu:
    name, label, capability, num_sms, l2_mb, memory_gb, dram, tensor, fp32, clock, source = row
    per_block, per_sm, threads = _LIMITS[capability]
    backend: Backend = "hip" if capability in _HIP_ARCH and name.startswith("mi") else "cuda"
    return Gpu(
        name, label, backend, capability, num_sms, per_block, per_sm, threads,
        l2_mb * 2**20, memory_gb * 10**9, dram, tensor, fp32, clock, source,
    )  # fmt: skip


KNOWN_GPUS: dict[str, Gpu] = {row[0]: _row(row) for row in _TABLE}


@functools.cache
def gpu_of(device_index: int) -> Gpu:
    """The GPU behind `cuda:<device_index>`, as a known model or described from what the driver reports."""
    properties: Any = torch.cuda.get_device_properties(device_index)  # torch's stub lacks the opt-in size
    hip = torch.version.hip is not None
    return identify(
        backend="hip" if hip else "cuda",
        label=properties.name,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        shared_per_block=65536 if hip else properties.shared_memory_per_block_optin,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
    )


def current_gpu(device: torch.device | int | None = None) -> Gpu:
    """The GPU that `device` (default: the current CUDA device) names.

    Raises:
        GpuError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise GpuError(
            "torch sees no GPU in this machine. Name a target to estimate for it, e.g. --gpu a100, "
            "or run where `torch.cuda.is_available()` is true."
        )
    index = device if isinstance(device, int) else device.index if device is not None else None
    return gpu_of(torch.cuda.current_device() if index is None else index)


def identify(
    *,
    backend: Backend,
    label: str,
    capability: tuple[int, int],
    num_sms: int,
    shared_per_block: int,
    memory_bytes: int,
    l2_bytes: int,
) -> Gpu:
    """Match what a driver reports with a known GPU, by silicon and memory size and never by its marketing name.

    A GPU that is not in the table (a MIG slice, a cut-down chip) takes the rates of the known GPU of the same
    capability, per multiprocessor, under a name of its own.
    """
    same_chip = [gpu for gpu in KNOWN_GPUS.values() if (gpu.backend, gpu.capability) == (backend, capability)]
    for gpu in same_chip:
        if (
            gpu.identity == (backend, capability, num_sms, shared_per_block)
            and abs(memory_bytes / gpu.memory_bytes - 1) < 0.25
        ):
            return gpu
    nearest = min(
        same_chip or [gpu for gpu in KNOWN_GPUS.values() if gpu.backend == backend],
        key=lambda gpu: (
            abs(gpu.sm - capability[0] * 10 - capability[1]),
            # A slice carries the whole product's name; of several the longest, h100-pcie before h100.
            -len(gpu.name) if _normalised(gpu.name) in _normalised(label) else 0,
            -gpu.num_sms,
        ),
    )
    share = num_sms / nearest.num_sms
    prefix = "sm" if backend == "cuda" else "gfx"
    return replace(
        nearest,
        name=f"{prefix}{capability[0]}{capability[1]}-{num_sms}sm-{round(memory_bytes / 1e9)}gb",
        label=label,
        backend=backend,
        capability=capability,
        num_sms=num_sms,
        shared_per_block=shared_per_block,
        shared_per_sm=nearest.shared_per_sm - nearest.shared_per_block + shared_per_block,
        memory_bytes=memory_bytes,
        l2_bytes=l2_bytes,
        dram_gbs=nearest.dram_gbs * min(1.0, memory_bytes / nearest.memory_bytes),
        tensor_tflops=nearest.tensor_tflops * share,
        fp32_tflops=nearest.fp32_tflops * share,
        source=f"rates scaled from {nearest.name} by its number of multiprocessors",
    )


@functools.cache
def driver_version() -> str | None:
    """The GPU driver's version, or None where nvidia-smi does not tell."""
    try:
        output = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=30,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return output.split()[0] if output.split() else None
