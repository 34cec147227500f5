"""The derivative of an expression by `score`."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.expressions.nodes import ONE, OPERATIONS, ZERO, Call, Constant, Name, Node, call

_LN2 = Constant(0.6931471805599453)


def derivative(node: Node) -> Node:
    """Of a typed expression; where one piece meets another, that of either."""
    if isinstance(node, Name):
        return ONE if node.name == "score" else ZERO
    if not isinstance(node, Call):
        return ZERO  # a tensor's element may jump, but stays where it is
    if node.operation == "with_derivative":
        return node.operands[1]
    if OPERATIONS[node.operation].gives in ("bool", "int"):
        return ZERO  # constant but for where it jumps
    inner = [derivative(each) for each in node.operands]
    if all(each == ZERO for each in inner):
        return ZERO
    return _RULES[node.operation](node, *node.operands, *inner)


def _times(a: Node, b: Node) -> Node:
    return call("multiply", a, b)


def _chain(outer: Callable[[Node, Node], Node]) -> Callable[..., Node]:
    """Of a function of one operand: `outer` is its derivative by the operand, from itself and the operand."""
    return lambda node, a, da: _times(outer(node, a), da)


_RULES: dict[str, Callable[..., Node]] = {
    "add": lambda node, a, b, da, db: call("add", da, db),
    "subtract": lambda node, a, b, da, db: call("subtract", da, db),
    "multiply": lambda node, a, b, da, db: call("add", _times(da, b), _times(a, db)),
    "divide": lambda node, a, b, da, db: call("divide", call("subtract", da, _times(node, db)), b),
    "negative": lambda node, a, da: call("negative", da),
    "where": lambda node, c, a, b, dc, da, db: call("where", c, da, db),
    "minimum": lambda node, a, b, da, db: call("where", call("less_equal", a, b), da, db),
    "maximum": lambda node, a, b, da, db: call("where", call("greater_equal", a, b), da, db),
    "abs": lambda node, a, da: call("where", call("less", a, ZERO), call("negative", da), da),
    "exp": _chain(lambda node, a: node),
    "exp2": _chain(lambda node, a: _times(node, _LN2)),
    "log": _chain(lambda node, a: call("divide", ONE, a)),
    "log2": _chain(lambda node, a: call("divide", Constant(1 / 0.6931471805599453), a)),
    "sqrt": _chain(lambda node, a: call("divide", Constant(0.5), node)),
    "sin": _chain(lambda node, a: call("cos", a)),
    "cos": _chain(lambda node, a: call("negative", call("sin", a))),
    # 2 / sqrt(pi)
    "erf": _chain(lambda node, a: _times(Constant(1.1283791670955126), call("exp", call("negative", _times(a, a))))),
    "sigmoid": _chain(lambda node, a: _times(node, call("subtract", ONE, node))),
    "tanh": _chain(lambda node, a: call("subtract", ONE, _times(node, node))),
    "to_float": lambda node, a, da: da,
}
