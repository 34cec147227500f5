"""An expression as Triton."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from flashgen.expressions.nodes import OPERATIONS, Call, Constant, Name, Node, Read

# Longer pieces, and those that are used twice, get a name.
_LINE = 70
# Of fp32: Triton takes no literals beyond.
_LEAST, _GREATEST = 2.0**-126, 3.4028234663852886e38
_METHODS = {"to_float": "{0}.to(tl.float32)", "to_int": "{0}.to(tl.int32)", "with_derivative": "{0}"}


def statements(results: Sequence[Node], tensors: Sequence[tuple[str, int]]) -> tuple[list[str], list[str]]:
    """(lines, results): assignments in order, and the text of each result, in their terms.

    Args:
        results: typed expressions.
        tensors: (type, rank) of each tensor; the kernel has its elements at MOD0 and its sizes as mod0_size_0.
    """
    writer = _Writer(results, tensors)
    texts = [_bare(writer.text(each)) for each in results]
    return writer.lines, texts


class _Writer:
    def __init__(self, results: Sequence[Node], tensors: Sequence[tuple[str, int]]) -> None:
        self.lines: list[str] = []
        self._tensors = tensors
        self._known: dict[Node, str] = {}
        self._uses: Counter[Node] = Counter()
        for each in results:
            self._count(each)

    def _count(self, node: Node) -> None:
        self._uses[node] += 1
        if self._uses[node] == 1:
            for each in _below(node):
                self._count(each)

    def text(self, node: Node) -> str:
        if node in self._known:
            return self._known[node]
        if isinstance(node, Constant):
            value = node.value
            if node.kind == "float" and not _LEAST <= abs(value) <= _GREATEST:
                value = math.copysign(0.0 if abs(value) < _LEAST else math.inf, value)
            return f'float("{value}")' if abs(value) == math.inf else repr(value)
        if isinstance(node, Name):
            return node.name
        text = self._read(node) if isinstance(node, Read) else self._call(node)
        if self._uses[node] > 1 or len(text) > (_LINE // 2 if isinstance(node, Read) else _LINE):
            self._known[node] = text = self._named(_bare(text))
        return text

    def _named(self, text: str) -> str:
        """A name for a piece of text, from here on."""
        self.lines.append(f"v{len(self.lines)} = {text}")
        return f"v{len(self.lines) - 1}"

    def _call(self, node: Call) -> str:
        operation = OPERATIONS[node.operation]
        operands = [self.text(each) for each in node.operands]
        if node.operation in _METHODS:
            return _METHODS[node.operation].format(*operands)
        if operation.infix:
            return f"({operation.text.format(*operands)})"
        name = "tanh_of" if node.operation == "tanh" else f"tl.{operation.text}"
        return f"{name}({', '.join(_bare(each) for each in operands)})"

    def _read(self, node: Read) -> str:
        dtype, _ = self._tensors[node.tensor]
        place = ""
        for axis, index in enumerate(node.indices):
            size = f"mod{node.tensor}_size_{axis}"
            inside = f"tl.minimum(tl.maximum({_bare(self.text(index))}, 0), {size} - 1)"
            if len(node.indices) > 1:
                inside = self._named(inside)
            place = f"({place} * {size} + {inside})" if place else inside
            if len(place) > _LINE:
                place = self._named(_bare(place))
        text = f"tl.load(MOD{node.tensor} + {place})"
        if dtype == "bool":
            return f"({text} != 0)"
        return f"{text}.to(tl.float32)" if dtype in ("fp16", "bf16", "fp64") else text


def _below(node: Node) -> tuple[Node, ...]:
    return node.operands if isinstance(node, Call) else node.indices if isinstance(node, Read) else ()


def _bare(text: str) -> str:
    """Without parentheses around the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1]
