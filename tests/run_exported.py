"""Runs an exported file on the CPU, in Triton's interpreter, where flashgen cannot be imported.

The file is the user's: only its device, and the lengths of its self-check, are others here. Usage: run_exported.py FILE
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class NoFlashgen(importlib.abc.MetaPathFinder):
    """Refuses what an exported file must not need."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name.partition(".")[0] in ("flashgen", "jinja2", "optuna", "yaml"):
            raise ModuleNotFoundError(f"{name} is hidden")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_cpu(path: Path) -> Path:
    text = path.read_text()
    for old, new in (
        ('device="cuda"', 'device="cpu"'),
        ("with torch.cuda.device(q.device):", "if True:"),
        ("((1, 129), (113, 241), (512, 512))", "((1, 17), (19, 37), (37, 19))"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    copy = path.with_name(f"{path.stem}_on_cpu.py")
    copy.write_text(text)
    return copy


def check(module: Any) -> None:
    """What the self-check leaves out: scales, the log-sum-exp, strides, grouped heads, and nothing to do."""
    import torch

    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, seq, width).half() for heads, seq, width in ((4, 19, 24), (2, 21, 24), (2, 21, 40))
    )
    for scale in (None, 0.5, 0.0, -0.3):
        out = module.attention(q, k, v, scale=scale)
        expected = module.reference(q, k, v, 24**-0.5 if scale is None else scale)
        assert out.dtype == torch.float16 and out.shape == (1, 4, 19, 40)
        assert (out.double() - expected).abs().max() < 4e-3, scale
    out, lse = module.attention(q, k, v, scale=0.0, return_lse=True)
    # Equal scores: the logarithm of how many keys each row sees, which all end at the same diagonal.
    seen = torch.arange(19) + 3.0
    assert lse.dtype == torch.float32 and (lse - seen.log()).abs().max() < 1e-5
    strided = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (q, k, v)]
    assert torch.equal(module.attention(*strided), module.attention(q, k, v))
    shared = module.attention(q, k[:, :1].expand(1, 4, 21, 24), v[:, :1].expand(1, 4, 21, 40))
    assert torch.equal(shared, module.attention(q, k[:, :1], v[:, :1]))
    assert module.attention(q[:, :, :0], k, v).shape == (1, 4, 0, 40)
    out, lse = module.attention(q, k[:, :, :2], v[:, :, :2], return_lse=True)
    assert not out[:, :, :17].any() and (lse[:, :, :17] == -math.inf).all() and out[:, :, 17:].all(-1).all()


def check_options(module: Any) -> None:
    """The same of a file with options."""
    import torch

    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, seq, width).half() for heads, seq, width in ((4, 19, 24), (2, 21, 24), (2, 21, 40))
    )
    given = module.some_options(q, k)
    for scale in (None, 0.5, 0.0, -0.3):
        out, lse = module.attention(q, k, v, scale=scale, return_lse=True, **given)
        expected = module.reference(q, k, v, 24**-0.5 if scale is None else scale, **given)
        assert (out.double() - expected).abs().max() < 4e-3, scale
        assert lse.isfinite().all()
    for sides in ((None, 0), (3, None), (0, 0)):
        out = module.attention(q, k, v, **{**given, "window": sides})
        expected = module.reference(q, k, v, 24**-0.5, **{**given, "window": sides})
        assert (out.double() - expected).abs().max() < 4e-3, sides
    # Rows that see nothing, for want of keys or because of the window, are left with the sink.
    out, lse = module.attention(q[:, :, :3], k[:, :, :0], v[:, :, :0], return_lse=True, **cut(given, 3, 0))
    assert not out.any()
    torch.testing.assert_close(lse, given["sinks"][:, None].expand(1, 4, 3), rtol=1e-6, atol=1e-6)
    assert module.attention(q[:, :, :0], k, v, **cut(given, 0, 21)).shape == (1, 4, 0, 40)
    # Any layout of what is broadcast.
    turned = {name: value.T.contiguous().T if name in ("bias", "mask") else value for name, value in given.items()}
    assert torch.equal(module.attention(q, k, v, **turned), module.attention(q, k, v, **given))


def cut(given: dict[str, Any], rows: int, keys: int) -> dict[str, Any]:
    """Options for the first rows and keys."""
    places = {"bias": (rows, keys), "mask": (rows, keys), "segment_ids_q": (1, rows), "segment_ids_kv": (1, keys)}
    return {
        name: value[: places[name][0], : places[name][1]] if name in places else value for name, value in given.items()
    }


def main() -> None:
    sys.meta_path.insert(0, NoFlashgen())
    module: Any = load(on_cpu(Path(sys.argv[1])))
    assert type(module.kernel).__name__ == "InterpretedFunction", "TRITON_INTERPRET was not set"
    module.self_check()
    (check_options if hasattr(module, "some_options") else check)(module)
    print("checked")


if __name__ == "__main__":
    main()
