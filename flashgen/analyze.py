"""What attention costs on a GPU before anything runs: operations, bytes, the limit that binds, and the SRAM budget."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.errors import InputError
from flashgen.hardware import Gpu
from flashgen.problem import Problem
from flashgen.space import Config
from flashgen.spec import Spec


@dataclass(frozen=True)
class Transfer:
    """One tensor's way through HBM: `name` such as "write scores", and its size in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Limit:
    """The time `us` in microseconds that one resource needs at its peak if nothing else takes any."""

    name: str
    us: float


@dataclass(frozen=True)
class Method:
    """The cost of one way to compute attention.

    Attributes:
        flops: floating-point operations of both products, 2 * (head_dim + head_dim_v) for each pair of row and key.
            Flash counts the visible pairs; standard attention multiplies the masked ones as well.
        exps: evaluations of exp, one a pair; in flash one more for each row and block of block_kv keys that the row
            sees, to rescale its accumulator (FlashAttention-2, algorithm 1).
        traffic: what moves between HBM and the chip, in order.
        extra_bytes: memory in bytes beyond inputs and outputs.
        limits: what each resource alone would need: "tensor cores" ("fp32 units" where the products cannot use
            them), "exp unit", "HBM".
    """

    flops: int
    exps: int
    traffic: tuple[Transfer, ...]
    extra_bytes: int
    limits: tuple[Limit, ...]

    @property
    def hbm_bytes(self) -> int:
        """Bytes read from and written to HBM, the sum of the traffic."""
        return sum(transfer.bytes for transfer in self.traffic)

    @property
    def hbm_intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte of HBM (Williams et al. 2009); 0 where nothing moves."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else 0.0

    @property
    def binding(self) -> Limit:
        """The limit that takes longest: no kernel of this method can be faster."""
        return max(self.limits, key=lambda limit: limit.us)


@dataclass(frozen=True)
class Analysis:
    """Flash against standard attention for one problem on one GPU.

    Attributes:
        problem, spec, gpu, config: what was analysed.
        visible_pairs: pairs (row i, key j) that the mask shows, over the batch and all query heads.
        flops_convention: 2 * (head_dim + head_dim_v) * batch * heads * seq_q * seq_kv, halved when causal: for equal
            widths 4 * B * H * N^2 * D, by which the papers report TFLOP/s. Exact causal counts differ.
        ridge: FLOP per byte of HBM above which the products bind and not HBM: peak FLOP/s over bytes/s
            (roofline model, Williams et al. 2009).
        flash: compulsory traffic only: q, o and lse, and once for each key/value head the keys and values that some
            row sees. True as long as a head's K and V stay in L2 while its blocks of rows read them.
        standard: attention that writes its seq_q x seq_kv matrices to HBM (FlashAttention, algorithm 0), in the
            inputs' dtype as torch.matmul and torch.softmax do. Scale and mask count as part of the first product;
            where either is a kernel of its own, the scores travel twice more.
        l2_bytes: bytes between L2 and the multiprocessors in flash: q, o and lse once, and K and V again for every
            block of block_q rows of every query head, up to the last block of block_kv keys that one of its rows
            sees. FlashAttention, section 3.2, counts these as HBM accesses, for a chip without a cache between.
    """

    problem: Problem
    spec: Spec
    gpu: Gpu
    config: Config
    visible_pairs: int
    flops_convention: int
    ridge: float
    flash: Method
    standard: Method
    l2_bytes: int

    @property
    def l2_intensity(self) -> float:
        """FLOP per byte that flash moves through L2; 0 where nothing moves."""
        return self.flash.flops / self.l2_bytes if self.l2_bytes else 0.0


def analyze(problem: Problem, spec: Spec, gpu: Gpu, config: Config) -> Analysis:
    """Count the work of one problem and say which limit of the GPU binds.

    Args:
        problem: the sizes of the call.
        spec: what is computed.
        gpu: the machine, from `Gpu.named` or `current_gpu`.
        config: block_q decides the L2 traffic, block_kv how often flash rescales; other keys do not matter.

    Raises:
        InputError: the config has no positive block_q or block_kv.
    """
    for name in ("block_q", "block_kv"):
        if config.get(name, 0) < 1:
            raise InputError(f"{name} >= 1 must hold, but got {config!r}. A family's default(spec, gpu) has both.")
    block_q, block_kv = config["block_q"], config["block_kv"]
    seq_q, seq_kv = problem.seq_q, problem.seq_kv
    # Row i sees the keys j <= i + diagonal; without a mask the first row already sees all.
    diagonal = {"none": seq_kv, "bottom_right": seq_kv - seq_q, "top_left": 0}[spec.causal]
    heads = problem.batch * problem.heads
    pairs = problem.visible_pairs(spec.causal)
    seen_blocks = heads * _sum_of_keys(seq_q, diagonal + 1, 1, block_kv, seq_kv + -seq_kv % block_kv) // block_kv
    reads = heads * _sum_of_keys(_ceil_div(seq_q, block_q), diagonal + block_q, block_q, block_kv, seq_kv)
    keys_seen = min(max(seq_q + diagonal, 0), seq_kv)

    q, k, v, o, lse = _tensor_bytes(problem, spec, keys_seen)
    traffic = {"read q": q, "read k": k, "read v": v, "write o": o, "write lse": lse}
    width = spec.head_dim + spec.head_dim_v
    all_pairs = heads * seq_q * seq_kv
    return Analysis(
        problem,
        spec,
        gpu,
        config,
        visible_pairs=pairs,
        flops_convention=2 * width * all_pairs // (1 if spec.causal == "none" else 2),
        ridge=_products(spec, gpu)[1] / (gpu.dram_gbs * 1e9),
        flash=_method(spec, gpu, pairs, pairs + seen_blocks, traffic, 0),
        standard=_standard(problem, spec, gpu),
        l2_bytes=q + o + lse + reads * width * spec.element_bytes,
    )


def _standard(problem: Problem, spec: Spec, gpu: Gpu) -> Method:
    pairs = problem.batch * problem.heads * problem.seq_q * problem.seq_kv
    matrix = pairs * spec.element_bytes
    q, k, v, o, _ = _tensor_bytes(problem, spec, problem.seq_kv)
    first = {"read q": q, "read k": k, "write scores": matrix}
    softmax = {"read scores": matrix, "write probabilities": matrix}
    second = {"read probabilities": matrix, "read v": v, "write o": o}
    traffic = first | softmax | second
    return _method(spec, gpu, pairs, pairs, traffic, 2 * matrix)


def _method(spec: Spec, gpu: Gpu, pairs: int, exps: int, traffic: dict[str, int], extra_bytes: int) -> Method:
    flops = 2 * (spec.head_dim + spec.head_dim_v) * pairs
    units, peak = _products(spec, gpu)
    limits = (
        Limit(units, flops / peak * 1e6),
        Limit("exp unit", exps / _exp_rate(gpu) * 1e6),
        Limit("HBM", sum(traffic.values()) / (gpu.dram_gbs * 1e9) * 1e6),
    )
    transfers = tuple(Transfer(name, size) for name, size in traffic.items())
    return Method(flops, exps, transfers, extra_bytes, limits)


def _tensor_bytes(problem: Problem, spec: Spec, keys: int) -> tuple[int, int, int, int, int]:
    """Bytes of q, of the first `keys` keys and values of every key/value head, of o and of lse (fp32)."""
    rows = problem.batch * problem.heads * problem.seq_q
    kv_rows = problem.batch * problem.kv_heads * keys if rows else 0
    qk_bytes, v_bytes = spec.head_dim * spec.element_bytes, spec.head_dim_v * spec.element_bytes
    return rows * qk_bytes, kv_rows * qk_bytes, kv_rows * v_bytes, rows * v_bytes, rows * 4


def _products(spec: Spec, gpu: Gpu) -> tuple[str, float]:
    """Which units multiply, and their peak in FLOP/s. TF32 runs at half the rate of 16-bit inputs."""
    if spec.dtype == "fp16" or (spec.dtype == "bf16" and gpu.sm >= 80):
        return "tensor cores", gpu.tensor_tflops * 1e12
    if spec.precision == "tf32" and gpu.sm >= 80:
        return "tensor cores", gpu.tensor_tflops * 1e12 / 2
    return "fp32 units", gpu.fp32_tflops * 1e12


def _exp_rate(gpu: Gpu) -> float:
    """fp32 exp2 results a second. CUDA C++ Programming Guide, "Arithmetic Instructions": 16 per SM and clock.

    Blackwell Ultra (sm_103) doubled it; AMD's compute units give a quarter of their 64 lanes, the same 16.
    """
    per_clock = 32 if gpu.backend == "cuda" and gpu.sm == 103 else 16
    return per_clock * gpu.num_sms * gpu.clock_ghz * 1e9


def _sum_of_keys(count: int, first: int, step: int, unit: int, top: int) -> int:
    """Sum over n < count of first + n * step, each rounded up to a multiple of unit, then clamped to 0..top.

    Terms that lie unit apart leave the same remainder, so they form an arithmetic series.
    """
    total = 0
    for start in range(min(unit, count)):
        terms = _ceil_div(count - start, unit)
        lowest = _ceil_div(first + start * step, unit) * unit
        total += _sum_of_clamped(terms, lowest, step * unit, top)
    return total


def _sum_of_clamped(count: int, first: int, step: int, top: int) -> int:
    """Sum over n < count of min(max(first + n * step, 0), top)."""
    rise = min(max(_ceil_div(1 - first, step), 0), count)
    full = min(max(_ceil_div(top - first, step), rise), count)
    between = full - rise
    return between * first + step * between * (rise + full - 1) // 2 + (count - full) * top


def _ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)
