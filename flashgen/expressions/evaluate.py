"""An expression in torch, for tensors of any shapes that broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashgen.expressions.nodes import OPERATIONS, Constant, Name, Node, Read, as_tensor


def evaluate(node: Node, places: Mapping[str, Tensor], tensors: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """What a typed expression comes to.

    Args:
        places: by name what the expression may name.
        tensors: the caller's.
        wide: the type of floats.
    """
    known: dict[Node, Tensor] = {}
    device = next(iter(places.values())).device

    def value(node: Node) -> Tensor:
        if node not in known:
            known[node] = compute(node)
        return known[node]

    def compute(node: Node) -> Tensor:
        if isinstance(node, Constant):
            number = as_tensor(node.value).to(device)
            return number.to(wide) if node.kind == "float" else number
        if isinstance(node, Name):
            return places[node.name]
        if isinstance(node, Read):
            table = tensors[node.tensor]
            inside = [value(each).clamp(0, size - 1) for each, size in zip(node.indices, table.shape, strict=True)]
            read = table[tuple(inside)]
            return read.to(wide) if read.is_floating_point() else read
        if node.operation == "to_float":
            return value(node.operands[0]).to(wide)
        if node.operation == "divide":
            # Of whole numbers too, in the width of floats.
            return torch.true_divide(*(value(each).to(wide) for each in node.operands))
        return OPERATIONS[node.operation].compute(*(value(each) for each in node.operands))  # type: ignore[no-any-return]

    return value(node)
