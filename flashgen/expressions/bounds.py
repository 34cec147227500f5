"""What a condition is for a whole block of rows and keys, as far as ranges of numbers tell (interval arithmetic)."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.expressions.nodes import FALSE, OPERATIONS, TRUE, Call, Constant, Name, Node, Read, call

Range = tuple[Node, Node]  # the least and the greatest, both reached or not


def block_of(node: Node) -> tuple[Node, Node]:
    """(whether the condition may hold somewhere, whether it holds everywhere) in a block.

    Both are expressions of batch, head, seq_q, seq_kv and the block's corners `q_first`, `q_last`, `kv_first` and
    `kv_last`, included. What cannot be told is (TRUE, FALSE).
    """
    found = _range(node)
    return found or (TRUE, FALSE)


def is_opaque(node: Node) -> bool:
    """Whether ranges leave something out: tensors are read at places that differ within a block."""
    below = node.operands if isinstance(node, Call) else node.indices if isinstance(node, Read) else ()
    return (isinstance(node, Read) and not _is_point(node)) or any(is_opaque(each) for each in below)


def _is_point(node: Node) -> bool:
    """Whether it has one value in a block."""
    if isinstance(node, Name):
        return node.name not in ("q_idx", "kv_idx", "score")
    below = node.operands if isinstance(node, Call) else node.indices if isinstance(node, Read) else ()
    return all(_is_point(each) for each in below)


def _range(node: Node) -> Range | None:
    """(least, greatest) of a whole number; of a condition (may hold, must hold); None where nothing is known."""
    if _is_point(node):
        return node, node
    if isinstance(node, Name):
        side = node.name.removesuffix("_idx")
        return Name(f"{side}_first"), Name(f"{side}_last")
    if not isinstance(node, Call) or node.operation not in (*_RULES, "to_int"):
        return None
    ranges = [_range(each) for each in node.operands]
    if node.operation in ("and", "or", "xor", "not"):
        ranges = [each or (TRUE, FALSE) for each in ranges]
    elif node.operation == "where":
        ranges[0] = ranges[0] or (TRUE, FALSE)
    if node.operation in ("to_float", "to_int"):
        inner = node.operands[0]
        if isinstance(inner, Call) and OPERATIONS[inner.operation].gives == "bool":
            # As numbers the least is what must hold, the greatest what may.
            may, must = ranges[0] or (TRUE, FALSE)
            return call(node.operation, must), call(node.operation, may)
        if node.operation == "to_int":
            return None
    if None in ranges:
        return None
    return _RULES[node.operation](*(each for each in ranges if each is not None))


def _and(a: Node, b: Node) -> Node:
    return call("and", a, b)


def _or(a: Node, b: Node) -> Node:
    return call("or", a, b)


def _not(a: Node) -> Node:
    return call("not", a)


def _conjunction(a: Range, b: Range) -> Range:
    return _and(a[0], b[0]), _and(a[1], b[1])


def _disjunction(a: Range, b: Range) -> Range:
    return _or(a[0], b[0]), _or(a[1], b[1])


def _inverse(a: Range) -> Range:
    return _not(a[1]), _not(a[0])


def _exclusive(a: Range, b: Range) -> Range:
    return _disjunction(_conjunction(a, _inverse(b)), _conjunction(_inverse(a), b))


def _least(*values: Node) -> Node:
    first, *others = values
    for other in others:
        first = call("minimum", first, other)
    return first


def _greatest(*values: Node) -> Node:
    first, *others = values
    for other in others:
        first = call("maximum", first, other)
    return first


def _sum(a: Range, b: Range) -> Range:
    return call("add", a[0], b[0]), call("add", a[1], b[1])


def _difference(a: Range, b: Range) -> Range:
    return call("subtract", a[0], b[1]), call("subtract", a[1], b[0])


def _product(a: Range, b: Range) -> Range:
    corners = [call("multiply", x, y) for x in dict.fromkeys(a) for y in dict.fromkeys(b)]
    return _least(*corners), _greatest(*corners)


def _quotient(a: Range, b: Range) -> Range | None:
    if not _is_positive(b):
        return None
    return call("quotient", a[0], b[0]), call("quotient", a[1], b[0])


def _remainder(a: Range, b: Range) -> Range | None:
    """Of one stretch between two multiples its own; else of the sign of what is divided, below the divisor."""
    if not _is_positive(b):
        return None
    divisor, zero = b[0], Constant(0)
    most = call("subtract", divisor, Constant(1))
    same = _and(
        call("equal", call("quotient", a[0], divisor), call("quotient", a[1], divisor)),
        call("greater_equal", a[0], zero),
    )
    low = call("where", call("less", a[0], zero), call("negative", most), zero)
    return (
        call("where", same, call("remainder", a[0], divisor), low),
        call("where", same, call("remainder", a[1], divisor), most),
    )


def _is_positive(divisor: Range) -> bool:
    return isinstance(divisor[0], Constant) and divisor[0] == divisor[1] and divisor[0].value > 0


def _magnitude(a: Range) -> Range:
    negated = call("negative", a[1])
    return _greatest(Constant(0), a[0], negated), _greatest(call("negative", a[0]), a[1])


def _chosen(condition: Range, a: Range, b: Range) -> Range:
    """Of numbers: typed expressions choose conditions by & and |."""
    return (
        call("where", condition[1], a[0], call("where", condition[0], _least(a[0], b[0]), b[0])),
        call("where", condition[1], a[1], call("where", condition[0], _greatest(a[1], b[1]), b[1])),
    )


def _less_equal(a: Range, b: Range) -> Range:
    return call("less_equal", a[0], b[1]), call("less_equal", a[1], b[0])


def _less(a: Range, b: Range) -> Range:
    return call("less", a[0], b[1]), call("less", a[1], b[0])


def _equal(a: Range, b: Range) -> Range:
    within = _and(call("less_equal", a[0], b[1]), call("less_equal", b[0], a[1]))
    one = _and(call("less_equal", a[1], b[0]), call("less_equal", b[1], a[0]))
    return within, one


_RULES: dict[str, Callable[..., Range | None]] = {
    "and": _conjunction,
    "or": _disjunction,
    "xor": _exclusive,
    "not": _inverse,
    "add": _sum,
    "subtract": _difference,
    "multiply": _product,
    "quotient": _quotient,
    "remainder": _remainder,
    "where": _chosen,
    "negative": lambda a: (call("negative", a[1]), call("negative", a[0])),
    "minimum": lambda a, b: (_least(a[0], b[0]), _least(a[1], b[1])),
    "maximum": lambda a, b: (_greatest(a[0], b[0]), _greatest(a[1], b[1])),
    "abs": _magnitude,
    "less": _less,
    "less_equal": _less_equal,
    "greater": lambda a, b: _less(b, a),
    "greater_equal": lambda a, b: _less_equal(b, a),
    "equal": _equal,
    "not_equal": lambda a, b: _inverse(_equal(a, b)),
    "to_float": lambda a: (call("to_float", a[0]), call("to_float", a[1])),
}
