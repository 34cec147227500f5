"""Tiles of one consumer beside the tuned configs, and packed tiles beside unpacked ones: one table, on an H200.

python tests/gpu/try_hopper_short.py [results.json]

Everything is compiled in parallel, every config checked against float64, then all that one problem has is timed in
shuffled rounds. A child that hangs is killed; what it was at is reported and left out.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen.benchmark import Measurement, flops, inputs, interleaved
from flashgen.compile import RAGGED, WHOLE, kernel_resources
from flashgen.evaluate import checked
from flashgen.families import FAMILIES, Variant
from flashgen.gate import judge
from flashgen.hardware import Gpu, current_gpu
from flashgen.launch import bind
from flashgen.select import select
from flashgen.space import Config, Rejection
from flashgen.spec import Causal, Problem, Spec
from flashgen.workers import Failure, Workers

FAMILY = FAMILIES["hopper_fwd"]
MASKS: tuple[Causal, ...] = ("none", "bottom_right")
TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048)
PACKED_LENGTHS, GROUP = (32, 64, 128, 256), 4
FINALISTS = 3
COMPILE_S, CHECK_S, TIME_S = 120.0, 60.0, 60.0

PEERS = ("triton_fwd", "cudnn", "fa3")

Times = dict[str, Measurement]


def name_of(variant: Variant) -> str:
    """Of a table's line: the choices in their order."""
    return "-".join(map(str, variant.config.values()))


def changed(variant: Variant, **choices: int) -> Variant:
    return Variant(FAMILY, variant.spec, Config(**{**variant.config, **choices}))


def square_problem(head_dim: int, seq: int) -> Problem:
    heads = WIDTH // head_dim
    return Problem(TOKENS // seq, heads, heads, seq, seq)


def grouped_problem(seq_q: int) -> Problem:
    return Problem(16, 8 * GROUP, 8, seq_q, 4096)


def launch_of(variant: Variant, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    bound = bind(variant, q, k, v, o)
    return lambda: bound(q, k, v, o, lse, variant.spec.head_dim**-0.5)


def portable(spec: Spec, problem: Problem) -> Variant:
    return select(spec, problem, current_gpu(), "triton_fwd").variant


def peers(spec: Spec, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """triton_fwd, cuDNN where it has this mask, and FlashAttention-3 where it is installed; those that run."""
    causal = spec.causal != "none"

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    calls: dict[str, Callable[[], object]] = {"triton_fwd": launch_of(portable(spec, problem), q, k, v)}
    if not causal or q.shape[2] == k.shape[2]:
        calls["cudnn"] = cudnn
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        pass
    else:
        rows_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
        calls["fa3"] = lambda: flash_attn_func(*rows_first, causal=causal)
    for name in list(calls):
        try:
            calls[name]()
        except RuntimeError:
            del calls[name]
    return calls


def check_one(variant: Variant, problems: Sequence[Problem]) -> str | None:
    """What is wrong with a variant, or None; it has then been launched on every problem as well."""
    result = checked(variant)
    if isinstance(result, Rejection):
        return result.reason
    for problem in problems:
        launch_of(variant, *inputs(variant.spec, problem, "cuda"))()
        torch.cuda.synchronize()
    return None


def time_all(spec: Spec, problem: Problem, variants: Sequence[Variant], kept: int) -> Times:
    """All variants and peers in shuffled rounds, then the first, the peers and the fastest `kept` again, for longer."""
    q, k, v = inputs(spec, problem, "cuda")
    calls: dict[str, Callable[[], object]] = {name_of(each): launch_of(each, q, k, v) for each in variants}
    others = peers(spec, problem, q, k, v)
    times = interleaved({**calls, **others}, rounds=2, repeat_ms=10)
    first, *rest = calls
    best = sorted(rest, key=lambda name: times[name].median_us)[:kept]
    again = {name: calls[name] for name in (first, *best)}
    return {**times, **interleaved({**again, **others}, rounds=5, repeat_ms=20)}


def compiled(variants: Iterable[Variant], group: int, gpu: Gpu, workers: Workers) -> list[Variant]:
    """Those that compile as a hand-written loop should, for whole and ragged lengths; the others are printed."""
    groups = sorted({1, 2, group})  # 2: of the cases that check them
    futures = {
        variant: [
            workers.submit(COMPILE_S, kernel_resources, variant, gpu, "kernel", seq_kv, heads)
            for seq_kv, heads in itertools.product((WHOLE, RAGGED), groups if variant.config.get("pack") else (1,))
        ]
        for variant in dict.fromkeys(variants)
    }
    good = []
    for variant, submitted in futures.items():
        outcomes = [workers.outcome(future) for future in submitted]
        refused = [judge(variant, gpu, used if isinstance(used, Failure) else (used,)) for used in outcomes[:1]]
        failed = [each.reason for each in outcomes if isinstance(each, Failure)]
        failed += [each.reason for each in refused if each is not None]
        if failed:
            print(f"left out: {variant.slug}: {failed[0]}")
        else:
            good.append(variant)
    return good


def run(
    worker: Workers, cells: Mapping[Problem, Variant], variants: Sequence[Variant], kept: int
) -> dict[Problem, Times]:
    """For each problem and what comes first there, the times of all right variants; nothing where the child failed."""
    right = set()
    for variant in dict.fromkeys((*cells.values(), *variants)):
        wrong = worker.outcome(worker.submit(CHECK_S, check_one, variant, list(cells)))
        if wrong is None:
            right.add(variant)
        else:
            print(f"left out: {variant.slug}: {wrong.reason if isinstance(wrong, Failure) else wrong}")
    results = {}
    for problem, base in cells.items():
        entrants = [each for each in dict.fromkeys((base, *variants)) if each in right]
        times = worker.outcome(worker.submit(TIME_S, time_all, base.spec, problem, entrants, kept))
        if isinstance(times, Failure) or base not in right:
            print(f"no times: {base.spec.slug} {problem}: {times.reason if isinstance(times, Failure) else 'no base'}")
        else:
            results[problem] = times
    return results


def label(spec: Spec) -> str:
    return f"d{spec.head_dim}" if spec.causal == "none" else f"d{spec.head_dim} causal"


def line(what: str, name: str, us: Measurement, base: Measurement, tflops: float) -> str:
    ratio = base.median_us / us.median_us
    return f"{what:22}{name:20}{us.median_us:8.1f} +-{us.spread_us:5.1f} us {tflops / us.median_us:5.0f} {ratio:6.3f}"


def print_short(spec: Spec, problem: Problem, times: Times, tuned: str) -> None:
    """The tuned config, the peers and the fastest of one consumer; the last column is the speed-up over the tuned."""
    ours = sorted((name for name in times if "-" in name and name != tuned), key=lambda name: times[name].median_us)
    for name in (tuned, *(each for each in PEERS if each in times), *ours[:FINALISTS]):
        what = f"{label(spec)} {problem.seq_kv}"
        print(line(what, name, times[name], times[tuned], flops(spec, problem) / 1e6))


def print_packed(spec: Spec, problem: Problem, times: Times, pairs: Mapping[str, str]) -> None:
    """The last column is the speed-up of a packed config over the same one unpacked; of others, over the first line."""
    what, total = f"{label(spec)} {problem.seq_q}x{problem.seq_kv}", flops(spec, problem) / 1e6
    first = next(iter(times))
    for name, us in times.items():
        print(line(what, name, us, times[pairs.get(name, first)], total))


def single(spec: Spec, gpu: Gpu) -> list[Variant]:
    """Everything with one consumer, unpacked."""
    usable = FAMILY.space(spec, gpu).usable
    return [Variant(FAMILY, spec, each) for each in usable if each["consumers"] == 1 and not each["pack"]]


def pack_both(spec: Spec, gpu: Gpu) -> list[Variant]:
    """What is tuned for long sequences, the default and two with one consumer; each unpacked, then packed."""
    usual = [select(spec, grouped_problem(4096), gpu, "hopper_fwd").variant.config, FAMILY.default(spec, gpu)]
    few = [
        each.config
        for each in single(spec, gpu)
        if (each.config["stages"], each.config["reuse_q"]) == (2, 0)
        and (each.config["schedule"], each.config["ahead"]) in ((1, 1), (2, 0))
    ]
    bases = [Variant(FAMILY, spec, config) for config in (*usual, *few)]
    return list(dict.fromkeys(changed(base, pack=pack) for base in bases for pack in (0, 1)))


def main() -> None:
    started, gpu = time.monotonic(), current_gpu()
    specs = [
        Spec(head_dim=head_dim, head_dim_v=head_dim, dtype="bf16", causal=causal)
        for head_dim, causal in itertools.product((64, 128), MASKS)
    ]
    tuned: dict[Spec, dict[Problem, Variant]] = {}
    for spec in specs:
        problems = [square_problem(spec.head_dim, seq) for seq in LENGTHS]
        tuned[spec] = {problem: select(spec, problem, gpu, "hopper_fwd").variant for problem in problems}
    short = {spec: single(spec, gpu) for spec in specs}
    packed = {spec: pack_both(spec, gpu) for spec in specs if spec.head_dim == 128}
    with Workers(len(os.sched_getaffinity(0))) as workers:
        everything = [each for spec in specs for each in (*tuned[spec].values(), *short[spec], *packed.get(spec, ()))]
        everything += [portable(spec, problem) for spec in specs for problem in tuned[spec]]
        everything += [portable(spec, grouped_problem(seq)) for spec in packed for seq in PACKED_LENGTHS]
        good = set(compiled(everything, GROUP, gpu, workers))
    print(f"{len(good)} variants compiled after {time.monotonic() - started:.0f} s", flush=True)
    results: dict[str, dict[str, float]] = {}
    with Workers(1, preload="flashgen.evaluate") as worker:
        for spec in specs:
            cells = {problem: base for problem, base in tuned[spec].items() if base in good}
            for problem, times in run(worker, cells, [each for each in short[spec] if each in good], FINALISTS).items():
                results[f"{spec.slug} {problem.seq_q}"] = {name: us.median_us for name, us in times.items()}
                print_short(spec, problem, times, name_of(tuned[spec][problem]))
        for spec, variants in packed.items():
            both = [each for each in variants if each in good]
            pairs = {name_of(each): name_of(changed(each, pack=0)) for each in both if each.config["pack"]}
            cells = {grouped_problem(seq): both[0] for seq in PACKED_LENGTHS}
            for problem, times in run(worker, cells, both, len(both)).items():
                results[f"{spec.slug} {problem.seq_q}x4096"] = {name: us.median_us for name, us in times.items()}
                print_packed(spec, problem, times, pairs)
    print(f"done after {time.monotonic() - started:.0f} s")
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
