"""How long a compiled kernel should take on a GPU that is not here. A ranking aid: always called `estimated`."""

from __future__ import annotations

from flashgen.hardware import Gpu
from flashgen.resources import Resources
from flashgen.space import Config
from flashgen.spec import Problem, Spec


def predict_us(spec: Spec, config: Config, resources: Resources, problem: Problem, gpu: Gpu) -> float:
    """Estimated time of one launch in microseconds."""
    pairs = problem.visible_pairs(spec.causal)
    products = 2.0 * pairs * (spec.block_d + spec.block_dv)
    return 1e6 * products / (gpu.tensor_tflops * 1e12)
