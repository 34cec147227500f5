"""Runs every config of `hopper_bwd_fused` on the GPU at hand: right, the same bits, and how fast beside cuDNN.

    python tests/gpu/try_hopper_bwd_fused.py [--head-dim 64 128] [--causal none bottom_right] [--default-only]

Every config is checked in a process of its own, which compiles it and is killed when it hangs; those that pass are then
timed by one process for each head_dim and mask, which finds the compiled kernels in Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashgen.compile import module_of
from flashgen.families import Variant
from flashgen.families.hopper_bwd_fused import CHOICES, HOPPER_BWD_FUSED
from flashgen.hardware import Gpu
from flashgen.launch import bind, workspace_size
from flashgen.reference import plain_attention
from flashgen.space import Config
from flashgen.spec import Spec

H200 = Gpu.named("h200")
# (batch, heads, kv_heads, seq_q, seq_kv): beside the edges of blocks, rows that see nothing, keys that no row sees.
SHAPES = (
    (1, 1, 1, 1, 1), (1, 2, 2, 1, 300), (1, 4, 2, 129, 257), (2, 4, 4, 64, 640), (1, 2, 1, 700, 130),
    (2, 6, 2, 1000, 1000), (1, 3, 3, 2112, 2112),
)  # fmt: skip
# More blocks of keys than there are multiprocessors: no rotation.
LONG = (1, 1, 1, 300, 17100)
# Of all elements together; where a row sees few keys, the rounding of o is much of its gradient.
MOST_RELATIVE_ERROR = 1.5e-2
MOST_RELATIVE_ERROR_OF_FEW_KEYS = 0.2
Run = Callable[[], None]


def spec_of(head_dim: int, causal: Any) -> Spec:
    return Spec("backward", head_dim, head_dim, "bf16", causal)


def variant_of(head_dim: int, causal: str, name: str) -> Variant:
    """A config by the digits of its choices."""
    config = Config(**dict(zip(CHOICES, map(int, name), strict=True)))
    return Variant(HOPPER_BWD_FUSED, spec_of(head_dim, causal), config)


def make(variant: Variant, given: dict[str, Any]) -> tuple[Run, list[torch.Tensor], torch.Tensor]:
    """A bound launch, its gradients and its workspace."""
    q, k, v, o, do = (given[name] for name in ("q", "k", "v", "o", "do"))
    gradients = [torch.full_like(each, torch.nan) for each in (q, k, v)]
    workspace = torch.full((workspace_size(variant, q),), torch.nan, device="cuda")
    bound = bind(variant, q, k, v, o, do, *gradients)
    scale = q.shape[3] ** -0.5
    return (
        lambda: bound(q, k, v, o, given["lse"], do, given["dlse"], *gradients, workspace, scale),
        gradients,
        workspace,
    )


def tensors(shape: tuple[int, ...], head_dim: int, transposed: bool = False) -> dict[str, Any]:
    batch, heads, kv_heads, seq_q, seq_kv = shape

    def of(count: int, seq: int) -> torch.Tensor:
        if transposed:
            return torch.randn(batch, seq, count, head_dim, device="cuda").bfloat16().transpose(1, 2)
        return torch.randn(batch, count, seq, head_dim, device="cuda").bfloat16()

    return {"q": of(heads, seq_q), "k": of(kv_heads, seq_kv), "v": of(kv_heads, seq_kv), "do": of(heads, seq_q)}


def error(variant: Variant, shape: tuple[int, ...], transposed: bool) -> float:
    """The largest relative error of dq, dk and dv, beside autograd in fp32."""
    given = tensors(shape, variant.spec.head_dim, transposed)
    wide = [given[name].float().requires_grad_() for name in ("q", "k", "v")]
    o, lse = plain_attention(*wide, causal=variant.spec.causal)
    dlse = torch.randn_like(lse)
    objective = (o * given["do"].float()).sum() + (torch.where(torch.isfinite(lse), lse, 0.0) * dlse).sum()
    expected = torch.autograd.grad(objective, wide)
    given |= {"o": o.detach().bfloat16(), "lse": lse.detach().contiguous(), "dlse": dlse}
    run, gradients, _ = make(variant, given)
    run()
    torch.cuda.synchronize()
    errors = [
        ((got.float() - right).norm() / (right.norm() + 1e-3 * right.numel() ** 0.5)).item()
        for got, right in zip(gradients, expected, strict=True)
    ]
    return max(errors) if all(math.isfinite(each) for each in errors) else math.inf


def by_itself(variant: Variant) -> bool:
    """Whether the generated file's own `launch` gives the same bits."""
    head_dim = variant.spec.head_dim
    given = tensors((1, 4, 2, 1000, 1100), head_dim)
    lse = torch.full(given["q"].shape[:3], math.log(1100) + 0.5, device="cuda")
    given |= {"o": given["do"].roll(1, 2), "lse": lse, "dlse": None}
    run, gradients, workspace = make(variant, given)
    run()
    first = [each.clone() for each in gradients]
    names = ("q", "k", "v", "o", "lse", "do", "dlse")
    module_of(variant).launch(*(given[name] for name in names), *gradients, workspace.fill_(torch.nan), head_dim**-0.5)
    return all(map(torch.equal, gradients, first))


def repeats(variant: Variant) -> bool:
    """Whether 20 launches at a size that fills the GPU give the same bits."""
    head_dim = variant.spec.head_dim
    given = tensors((4, 2048 // head_dim, 2048 // head_dim, 4096, 4096), head_dim)
    lse = torch.full(given["q"].shape[:3], math.log(4096) + 0.5, device="cuda")
    given |= {"o": given["do"].roll(1, 2), "lse": lse, "dlse": None}
    run, gradients, workspace = make(variant, given)
    run()
    first = [each.clone() for each in gradients]
    same = not any(each.isnan().any() for each in first)
    for _ in range(19):
        for each in (*gradients, workspace):
            each.fill_(torch.nan)
        run()
        same = same and all(map(torch.equal, gradients, first))
    return same


def check(variant: Variant, out: Path) -> None:
    """One config; what is known so far is written down after every step."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(os.getpid())
    found: dict[str, Any] = {"error": 0.0, "why": "it hangs or crashes on the first shape"}
    is_default = variant.config == HOPPER_BWD_FUSED.default(variant.spec, H200)
    shapes = (*SHAPES, LONG) if is_default else SHAPES
    for number, shape in enumerate(shapes):
        out.write_text(json.dumps({**found, "why": f"hangs or crashes with {shape}"}))
        got = error(variant, shape, transposed=number % 2 == 1)
        if not got < (MOST_RELATIVE_ERROR if shape[4] > 64 else MOST_RELATIVE_ERROR_OF_FEW_KEYS):
            out.write_text(json.dumps({**found, "why": f"wrong with {shape}: {got:.2e}"}))
            return
        if shape[4] > 64:
            found["error"] = max(found["error"], got)
    if is_default:
        out.write_text(json.dumps({**found, "why": "hangs or crashes in its own launch"}))
        if not by_itself(variant):
            out.write_text(json.dumps({**found, "why": "other bits by its own launch"}))
            return
    out.write_text(json.dumps({**found, "why": "hangs or crashes while it is repeated"}))
    out.write_text(json.dumps({**found, "why": "" if repeats(variant) else "other bits in another launch"}))


def cudnn(given: dict[str, Any], causal: bool) -> Run:
    """cuDNN's backward by way of SDPA; it also gives the forward's output."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    leaves = [given[name].clone().requires_grad_() for name in ("q", "k", "v")]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = scaled_dot_product_attention(*leaves, is_causal=causal)
    given["o"] = o.detach()

    def run() -> None:
        torch.autograd.grad(o, leaves, given["do"], retain_graph=True)

    return run


def measure(head_dim: int, causal: str, seq: int, variants: dict[str, Variant], rounds: int) -> dict[str, float]:
    """TFLOP/s by name: medians over rounds in random order, as a kernel's clock depends on what ran before."""
    from triton.testing import do_bench

    heads = 2048 // head_dim
    given = tensors((16384 // seq, heads, heads, seq, seq), head_dim)
    runs = {"cuDNN": cudnn(given, causal != "none")}
    given |= {"lse": torch.full(given["q"].shape[:3], math.log(seq) + 0.5, device="cuda"), "dlse": None}
    runs |= {name: make(variant, given)[0] for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(do_bench(runs[name], warmup=4, rep=16, return_mode="median"))
    flops = 10 * 16384 * seq * 2048 * (1.0 if causal == "none" else 0.5)
    return {name: flops / statistics.median(each) / 1e9 for name, each in times.items()}


def time_group(head_dim: int, causal: str, passed: Path, rounds: int) -> None:
    """One table: a row for each config that passed."""
    errors: dict[str, float] = json.loads(passed.read_text())
    variants = {name: variant_of(head_dim, causal, name) for name in errors}
    tables = {seq: measure(head_dim, causal, seq, variants, rounds) for seq in (2048, 8192)}
    print(f"\nhead_dim {head_dim}, {causal}; TFLOP/s (of cuDNN) at 2048 and 8192")
    default = "".join(str(value) for value in HOPPER_BWD_FUSED.default(spec_of(head_dim, causal), H200).values())
    for name in sorted(tables[8192], key=lambda name: -tables[8192][name]):
        cells = (f"{table[name]:5.0f} ({table[name] / table['cuDNN']:.2f})" for table in tables.values())
        note = "" if name == "cuDNN" else f"error {errors[name]:.1e}" + (", default" if name == default else "")
        print(f"{name:>8}  {'  '.join(cells)}  {note}", flush=True)


def configs(arguments: argparse.Namespace, head_dim: int, causal: str) -> list[str]:
    spec = spec_of(head_dim, causal)
    usable = HOPPER_BWD_FUSED.space(spec, H200).usable
    if arguments.default_only:
        usable = (HOPPER_BWD_FUSED.default(spec, H200),)
    return ["".join(str(value) for value in config.values()) for config in usable]


def check_all(tasks: list[tuple[int, str, str]], folder: Path, patience: float, workers: int) -> dict[Any, Any]:
    """What `check` found out, by task; a process has so many seconds."""
    found: dict[Any, Any] = {}
    running: list[tuple[Any, subprocess.Popen[bytes], float, Path]] = []
    waiting = list(tasks)
    while waiting or running:
        while waiting and len(running) < workers:
            task = waiting.pop(0)
            out = folder / "_".join(map(str, task))
            command = [sys.executable, __file__, "--check", *map(str, task), str(out)]
            with open(f"{out}.err", "wb") as errors:
                running.append((task, subprocess.Popen(command, stderr=errors), time.time(), out))
        for entry in list(running):
            task, process, started, out = entry
            if process.poll() is None and time.time() - started < patience:
                continue
            if process.poll() is None:
                process.kill()
                process.wait()
            running.remove(entry)
            result = json.loads(out.read_text()) if out.exists() else {"why": "does not start or compile"}
            if result["why"]:
                result["why"] += " | " + Path(f"{out}.err").read_text()[-300:].replace("\n", " ")
                print("FAILED", *task, result["why"], flush=True)
            found[task] = result
        time.sleep(0.05)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--causal", nargs="+", default=["none", "bottom_right"])
    parser.add_argument("--default-only", action="store_true")
    parser.add_argument("--patience", type=float, default=90, help="seconds that one config may take to pass")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", nargs=4, help="internal: head_dim causal config file")
    parser.add_argument("--time", nargs=3, help="internal: head_dim causal file")
    arguments = parser.parse_args()
    if arguments.check:
        head_dim, causal, name, out = arguments.check
        check(variant_of(int(head_dim), causal, name), Path(out))
        return
    if arguments.time:
        head_dim, causal, passed = arguments.time
        time_group(int(head_dim), causal, Path(passed), arguments.rounds)
        return
    began = time.time()
    groups = list(itertools.product(arguments.head_dim, arguments.causal))
    tasks = [(*group, name) for group in groups for name in configs(arguments, *group)]
    print("configs are digits:", " ".join(CHOICES), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = check_all(tasks, Path(folder), arguments.patience, arguments.workers)
        good = {task: result["error"] for task, result in found.items() if not result["why"]}
        print(f"{len(good)} of {len(tasks)} configs pass, after {time.time() - began:.0f} s", flush=True)
        for group in groups:
            passed = Path(folder) / "passed"
            of_group = {task[2]: each for task, each in good.items() if task[:2] == group}
            if not of_group:
                continue
            passed.write_text(json.dumps(of_group))
            command = [sys.executable, __file__, "--rounds", str(arguments.rounds), "--time", *map(str, group), passed]
            try:
                subprocess.run(command, check=False, timeout=arguments.patience)
            except subprocess.TimeoutExpired:
                print("FAILED", *group, "hangs while it is timed", flush=True)
    print(f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
