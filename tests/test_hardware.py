"""The GPUs that flashgen knows, and how a driver's report is matched with them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from flashgen import hardware
from flashgen.errors import GpuError, UnknownNameError
from flashgen.hardware import KNOWN_GPUS, Gpu, current_gpu, gpu_of, identify

GIB = 2**30

# Dense 16-bit FLOP per clock and multiprocessor with fp32 accumulation; GeForce halves it (GA102 and Ada whitepapers).
TENSOR_RATE = {70: 1024, 75: 1024, 80: 2048, 86: 1024, 89: 1024, 90: 4096, 94: 2048, 100: 8192, 120: 1024}
FP32_LANES = {70: 64, 75: 64, 80: 64, 86: 128, 89: 128, 90: 128, 94: 128, 100: 128, 120: 128}

SHARED_MEMORY = {
    "v100": 98304,
    "t4": 65536,
    "a100": 166912,
    "a30": 166912,
    "a10": 101376,
    "rtx3090": 101376,
    "rtx4090": 101376,
    "l4": 101376,
    "l40s": 101376,
    "rtx5090": 101376,
    "h100": 232448,
    "h200": 232448,
    "b200": 232448,
    "mi300x": 65536,
}

every_gpu = pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=lambda gpu: gpu.name)


def _report(label: str, num_sms: int, gib: float, capability: tuple[int, int], shared: int) -> Gpu:
    """Identify a CUDA GPU from what its driver reports."""
    return identify(
        backend="cuda",
        label=label,
        capability=capability,
        num_sms=num_sms,
        shared_per_block=shared,
        memory_bytes=round(gib * GIB),
        l2_bytes=40 * 2**20,
    )


def _hopper(label: str, num_sms: int, gib: float) -> Gpu:
    return _report(label, num_sms, gib, (9, 0), 232448)


def _ampere(label: str, num_sms: int, gib: float) -> Gpu:
    return _report(label, num_sms, gib, (8, 0), 166912)


@every_gpu
def test_names_ignore_case_and_separators(gpu: Gpu) -> None:
    for spelling in (
        gpu.name,
        gpu.name.upper(),
        gpu.name.replace("-", "_"),
        gpu.name.replace("-", " "),
        gpu.label,
        gpu.label.lower().replace(" ", "-"),
        gpu.label.removeprefix("NVIDIA ").removeprefix("AMD "),
    ):
        assert Gpu.named(spelling) is gpu, spelling


def test_every_spelling_means_one_gpu() -> None:
    spellings = [
        (hardware._normalised(text), gpu.name) for gpu in KNOWN_GPUS.values() for text in (gpu.name, gpu.label)
    ]
    meaning = dict(spellings)
    assert all(meaning[spelling] == name for spelling, name in spellings)


@pytest.mark.parametrize(("typed", "meant"), [("h2000", "h200"), ("A-1000", "a100"), ("rtx 4080", "rtx4090")])
def test_a_typo_is_answered_with_the_closest_name(typed: str, meant: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        Gpu.named(typed)
    assert str(error.value) == f"no GPU is known as {typed!r}. Did you mean {meant!r}?"


def test_an_unknown_name_is_answered_with_all_names() -> None:
    with pytest.raises(UnknownNameError) as error:
        Gpu.named("quartz")
    assert all(name in str(error.value) for name in KNOWN_GPUS)


@every_gpu
def test_names_are_safe_as_file_names(gpu: Gpu) -> None:
    assert re.fullmatch(r"[a-z0-9-]+", gpu.name)
    assert KNOWN_GPUS[gpu.name] is gpu


@pytest.mark.parametrize(("name", "bytes_per_block"), SHARED_MEMORY.items())
def test_shared_memory_of_one_block(name: str, bytes_per_block: int) -> None:
    assert Gpu.named(name).shared_per_block == bytes_per_block


@every_gpu
def test_peaks_follow_from_the_multiprocessors_and_the_clock(gpu: Gpu) -> None:
    """A figure copied wrongly breaks the product; 10% covers parts that boost higher outside the tensor cores."""
    rate = TENSOR_RATE[gpu.sm] / (2 if "GeForce" in gpu.label else 1)
    assert gpu.tensor_tflops == pytest.approx(gpu.num_sms * gpu.clock_ghz * rate / 1e3, rel=0.02)
    assert gpu.fp32_tflops == pytest.approx(gpu.num_sms * gpu.clock_ghz * FP32_LANES[gpu.sm] * 2 / 1e3, rel=0.1)


@every_gpu
def test_known_gpus_hold_together(gpu: Gpu) -> None:
    assert gpu.shared_per_block <= gpu.shared_per_sm
    assert gpu.threads_per_sm in (1024, 1536, 2048)
    assert gpu.l2_bytes < gpu.memory_bytes
    assert gpu.source


def test_arch_is_what_the_compiler_calls_the_target() -> None:
    assert {name: Gpu.named(name).arch for name in ("t4", "a100", "h200", "rtx5090", "mi300x")} == {
        "t4": "sm_75",
        "a100": "sm_80",
        "h200": "sm_90",
        "rtx5090": "sm_120",
        "mi300x": "gfx942",
    }


@every_gpu
def test_a_known_gpu_is_recognised_under_any_label(gpu: Gpu) -> None:
    found = identify(
        backend=gpu.backend,
        label="Graphics Device",
        capability=gpu.capability,
        num_sms=gpu.num_sms,
        shared_per_block=gpu.shared_per_block,
        memory_bytes=round(gpu.memory_bytes * 1.06),
        l2_bytes=gpu.l2_bytes,
    )
    assert found is gpu


def test_labels_of_one_product_line() -> None:
    assert _hopper("NVIDIA H200", 132, 139.8).name == "h200"
    assert _hopper("NVIDIA H200 NVL", 132, 139.8).name == "h200"
    assert _ampere("NVIDIA A100-SXM4-80GB", 108, 79.2).name == "a100"
    assert _ampere("NVIDIA A100-PCIE-40GB", 108, 39.4).name == "a100-40gb"


def test_memory_tells_h100_from_h200() -> None:
    h100, h200 = _hopper("NVIDIA H100 80GB HBM3", 132, 79.2), _hopper("NVIDIA H200", 132, 139.8)
    assert (h100.name, h200.name) == ("h100", "h200")
    assert h100.identity == h200.identity
    assert h100.dram_gbs < h200.dram_gbs


def test_two_gpus_of_one_machine_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rtx3090 = {"name": "NVIDIA GeForce RTX 3090", "major": 8, "minor": 6, "multi_processor_count": 82}
    rtx3090 |= {"shared_memory_per_block_optin": 101376, "total_memory": 24 * GIB, "L2_cache_size": 6 * 2**20}
    a100 = {"name": "NVIDIA A100-SXM4-40GB", "major": 8, "minor": 0, "multi_processor_count": 108}
    a100 |= {"shared_memory_per_block_optin": 166912, "total_memory": 40 * GIB, "L2_cache_size": 40 * 2**20}
    devices = [SimpleNamespace(**rtx3090), SimpleNamespace(**a100)]
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    gpu_of.cache_clear()
    try:
        assert (gpu_of(0).name, gpu_of(1).name) == ("rtx3090", "a100-40gb")
        assert current_gpu().name == "a100-40gb"
        assert current_gpu(0).name == current_gpu(torch.device("cuda:0")).name == "rtx3090"
        assert current_gpu(torch.device("cuda")).name == "a100-40gb"
    finally:
        gpu_of.cache_clear()


@pytest.mark.parametrize(
    ("label", "num_sms", "gib", "name"),
    [
        ("NVIDIA H200 MIG 1g.18gb", 16, 16.5, "sm90-16sm-18gb"),
        ("NVIDIA H200 MIG 3g.71gb", 60, 69.5, "sm90-60sm-75gb"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 39.5, "sm90-60sm-42gb"),
    ],
)
def test_a_mig_slice_has_its_own_name_and_its_share_of_the_rates(
    label: str, num_sms: int, gib: float, name: str
) -> None:
    whole, part = Gpu.named("h200"), _hopper(label, num_sms, gib)
    assert part.name == name
    assert re.fullmatch(r"[a-z0-9-]+", part.name)
    assert (part.label, part.num_sms, part.memory_bytes) == (label, num_sms, round(gib * GIB))
    assert part.tensor_tflops == pytest.approx(whole.tensor_tflops * num_sms / 132)
    assert part.fp32_tflops == pytest.approx(whole.fp32_tflops * num_sms / 132)
    assert part.dram_gbs < whole.dram_gbs
    assert part.shared_per_block == whole.shared_per_block
    assert part.shared_per_sm == whole.shared_per_sm
    assert part.clock_ghz == whole.clock_ghz
    assert part.identity != whole.identity
    assert "scaled" in part.source


def test_an_unknown_chip_takes_the_limits_that_its_driver_reports() -> None:
    found = _report("NVIDIA GB10", 48, 119.7, (12, 1), 101376)
    assert (found.name, found.arch, found.shared_per_block) == ("sm121-48sm-129gb", "sm_121", 101376)


def test_without_a_gpu_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuError, match="--gpu a100"):
        current_gpu()
