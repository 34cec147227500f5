"""`hopper_fwd`, which nothing offers yet, on an sm_90 GPU: `python tests/gpu/try_hopper.py`.

Every variant is checked as the tuner checks candidates, in a process of its own with a time limit, then timed beside
`triton_fwd`'s default and cuDNN in shuffled rounds. A variant that hangs or is wrong is a line that says so.
"""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from variants import HOPPER_FWD

from flashgen.benchmark import flops, inputs, interleaved
from flashgen.check import Accuracy, check
from flashgen.compare import PEERS
from flashgen.families import FAMILIES, Variant
from flashgen.hardware import Gpu
from flashgen.launch import bind, launcher
from flashgen.space import Config, Rejection
from flashgen.spec import Causal, Problem, Spec
from flashgen.workers import Failure, Workers

H200 = Gpu.named("h200")
CAUSAL: tuple[Causal, ...] = ("none", "bottom_right")
PATIENCE_S = 60.0


def variants_of(spec: Spec, most: int) -> list[Variant]:
    """The default, then as many of the space, spread over it."""
    usable = HOPPER_FWD.space(spec, H200).usable
    chosen = [HOPPER_FWD.default(spec, H200), *usable[:: max(1, len(usable) // most)]]
    return [Variant(HOPPER_FWD, spec, config) for config in dict.fromkeys(chosen)]


def checked(spec: Spec, config: Config) -> Accuracy | Rejection:
    """Numbers of one variant; the family is not listed, so its parts travel to this process."""
    return check(launcher(Variant(HOPPER_FWD, spec, config)), spec, "cuda")


def timed(spec: Spec, configs: list[Config], seq: int) -> list[tuple[str, float]]:
    """(name, TFLOP/s), fastest first."""
    heads = 2048 // spec.head_dim
    problem = Problem(16384 // seq, heads, heads, seq, seq)
    q, k, v = inputs(spec, problem, "cuda")
    o, scale = torch.empty_like(q), spec.head_dim**-0.5
    calls = {"cudnn": torch.no_grad()(PEERS["cudnn"](q, k, v, spec.causal != "none"))}
    triton_fwd = FAMILIES["triton_fwd"]
    plain = bind(Variant(triton_fwd, spec, triton_fwd.default(spec, H200)), q, k, v, o)
    calls["triton_fwd"] = functools.partial(plain, q, k, v, o, None, scale)
    for config in configs:
        variant = Variant(HOPPER_FWD, spec, config)
        calls[variant.slug] = functools.partial(bind(variant, q, k, v, o), q, k, v, o, None, scale)
    times = interleaved(calls, rounds=3)
    speed = [(name, flops(spec, problem) / each.median_us / 1e6) for name, each in times.items()]
    return sorted(speed, key=lambda each: -each[1])


def main() -> None:
    with Workers(1) as worker:
        for width, causal in itertools.product((128, 64, 256), CAUSAL):
            spec = Spec("forward", width, width, "bf16", causal)
            right = []
            for variant in variants_of(spec, 8):
                outcome = worker.outcome(worker.submit(PATIENCE_S, checked, spec, variant.config))
                if isinstance(outcome, Accuracy):
                    right.append(variant.config)
                else:
                    kind = outcome.kind if isinstance(outcome, (Failure, Rejection)) else "?"
                    print(f"{variant.slug}: {kind}: {outcome.reason[:300]}", flush=True)
            for seq in (2048, 8192) if right else ():
                result = worker.outcome(worker.submit(PATIENCE_S, timed, spec, right, seq))
                print(f"{spec.slug} {seq}: {result}", flush=True)


if __name__ == "__main__":
    main()
