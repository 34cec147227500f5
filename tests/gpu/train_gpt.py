"""A small GPT, trained from one seed with flashgen and with SDPA's backends: `python tests/gpu/train_gpt.py` on a GPU.

Bytes of Python's own library are the text. Prints the losses side by side, the time of a step and the peak memory,
which must grow with the length and not with its square.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, WIDTH, LAYERS = 8, 512, 6


def _sdpa(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def _flashgen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = flashgen.attention(q, k, v, causal=True)
    assert isinstance(o, Tensor)
    return o


SUBJECTS: dict[str, Attention] = {
    "flashgen": _flashgen,
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
}


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, attention: Attention, seq: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(seq, WIDTH)
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        return self.head(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class Run:
    """Losses of every step, milliseconds of a step after the first ones, peak memory in MB."""

    losses: list[float]
    step_ms: float
    peak_mb: float


def train(attention: Attention, steps: int, batch: int, seq: int) -> Run:
    """Train from seed 0 on one GPU, in bf16 autocast."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).cuda()
    torch.manual_seed(0)
    model = GPT(attention, seq).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    picker = torch.Generator().manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    losses, start = [], 0.0
    for step in range(steps):
        if step == min(10, steps - 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
        places = torch.randint(len(text) - seq - 1, (batch, 1), generator=picker).cuda()
        window = text[places + torch.arange(seq + 1, device="cuda")].long()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    step_ms = 1000 * (time.perf_counter() - start) / max(1, steps - min(10, steps - 1))
    return Run([loss.item() for loss in losses], step_ms, torch.cuda.max_memory_allocated() / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {LAYERS} layers of {WIDTH}, {HEADS} heads, bf16")
    runs = {name: train(attention, options.steps, 16, 1024) for name, attention in SUBJECTS.items()}
    print("loss, mean of the last 10 steps")
    print("step  " + "".join(f"{name:>10}" for name in runs))
    for step in range(0, options.steps + 1, max(1, options.steps // 10)):
        window = slice(max(0, step - 10), max(1, step))
        means = (sum(run.losses[window]) / len(run.losses[window]) for run in runs.values())
        print(f"{step:4}  " + "".join(f"{mean:10.4f}" for mean in means))
    print("ms    " + "".join(f"{run.step_ms:10.1f}" for run in runs.values()))
    print("peak memory of a step, MB, 16,384 tokens")
    print("seq   " + "".join(f"{name:>10}" for name in runs))
    for seq in (1024, 2048, 4096, 8192, 16384):
        peaks = (train(attention, 2, 16384 // seq, seq).peak_mb for attention in SUBJECTS.values())
        print(f"{seq:5} " + "".join(f"{peak:10.0f}" for peak in peaks))


if __name__ == "__main__":
    main()
