"""Expressions as trees whose equal parts are equal values; building one folds what needs no computing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from flashgen.errors import InputError

Kind = Literal["bool", "int", "float"]


@dataclass(frozen=True)
class Constant:
    """A number, or whether."""

    value: bool | int | float

    @cached_property
    def kind(self) -> Kind:
        return "bool" if isinstance(self.value, bool) else "int" if isinstance(self.value, int) else "float"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and (self.kind, self.value) == (other.kind, other.value)

    def __hash__(self) -> int:
        return hash((self.kind, self.value))


@dataclass(frozen=True)
class Name:
    """`score`, or a whole number that says where it stands: `batch`, `head`, `q_idx`, `kv_idx`, `seq_q`, `seq_kv`."""

    name: str


class _Tree:
    """Hashed once: what is below is hashed with it."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, eq=True)
class Read(_Tree):
    """An element of the caller's tensor of this number; an index outside reads the nearest inside."""

    tensor: int
    indices: tuple[Node, ...]

    __hash__ = _Tree.__hash__


@dataclass(frozen=True, eq=True)
class Call(_Tree):
    """An operation of OPERATIONS."""

    operation: str
    operands: tuple[Node, ...]

    __hash__ = _Tree.__hash__


Node: TypeAlias = "Constant | Name | Read | Call"


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        text: how Triton and Python write it; a name stands for a call.
        takes: kind of each operand; "number" is int or float, "any" is whatever the others are.
        gives: kind of the result; "number" is float if an operand is.
        compute: the same in torch, for tensors.
    """

    text: str
    takes: tuple[str, ...]
    gives: str
    compute: Callable[..., Any]

    @property
    def infix(self) -> bool:
        return "{0}" in self.text


def _operation(text: str, takes: str, gives: str, compute: Callable[..., Any]) -> Operation:
    return Operation(text, tuple(takes.split()), gives, compute)


OPERATIONS = {
    "add": _operation("{0} + {1}", "number number", "number", torch.add),
    "subtract": _operation("{0} - {1}", "number number", "number", torch.sub),
    "multiply": _operation("{0} * {1}", "number number", "number", torch.mul),
    "divide": _operation("{0} / {1}", "number number", "float", torch.true_divide),
    # As in Triton and C: towards zero, and of the sign of the first.
    "quotient": _operation("{0} // {1}", "int int", "int", lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "remainder": _operation("{0} % {1}", "int int", "int", torch.fmod),
    "negative": _operation("-{0}", "number", "number", torch.neg),
    "less": _operation("{0} < {1}", "number number", "bool", torch.lt),
    "less_equal": _operation("{0} <= {1}", "number number", "bool", torch.le),
    "greater": _operation("{0} > {1}", "number number", "bool", torch.gt),
    "greater_equal": _operation("{0} >= {1}", "number number", "bool", torch.ge),
    "equal": _operation("{0} == {1}", "number number", "bool", torch.eq),
    "not_equal": _operation("{0} != {1}", "number number", "bool", torch.ne),
    "and": _operation("{0} & {1}", "bool bool", "bool", torch.logical_and),
    "or": _operation("{0} | {1}", "bool bool", "bool", torch.logical_or),
    "xor": _operation("{0} ^ {1}", "bool bool", "bool", torch.logical_xor),
    "not": _operation("~{0}", "bool", "bool", torch.logical_not),
    "where": _operation("where", "bool any any", "any", torch.where),
    "minimum": _operation("minimum", "number number", "number", torch.minimum),
    "maximum": _operation("maximum", "number number", "number", torch.maximum),
    "abs": _operation("abs", "number", "number", torch.abs),
    "exp": _operation("exp", "float", "float", torch.exp),
    "exp2": _operation("exp2", "float", "float", torch.exp2),
    "log": _operation("log", "float", "float", torch.log),
    "log2": _operation("log2", "float", "float", torch.log2),
    "sqrt": _operation("sqrt", "float", "float", torch.sqrt),
    "sin": _operation("sin", "float", "float", torch.sin),
    "cos": _operation("cos", "float", "float", torch.cos),
    "erf": _operation("erf", "float", "float", torch.erf),
    "sigmoid": _operation("sigmoid", "float", "float", torch.sigmoid),
    "tanh": _operation("tanh", "float", "float", torch.tanh),
    "to_float": _operation("to_float", "any", "float", lambda a: a.to(torch.float64)),
    "to_int": _operation("to_int", "any", "int", lambda a: a.to(torch.int64)),
    # The first, whose derivative is said to be the second.
    "with_derivative": _operation("with_derivative", "float float", "float", lambda a, b: a),
}

ZERO, ONE = Constant(0.0), Constant(1.0)
TRUE, FALSE = Constant(True), Constant(False)


def call(operation: str, *operands: Node) -> Node:
    """The operation on typed operands, or what it comes to where that needs no computing.

    Raises:
        InputError: it comes to no number, such as 0 / 0.
    """
    folded = _FOLDED.get(operation)
    found = folded(*operands) if folded else None
    if found is None and operation != "with_derivative" and all(isinstance(each, Constant) for each in operands):
        found = _computed(operation, [each for each in operands if isinstance(each, Constant)])
    return Call(operation, operands) if found is None else found


def _computed(operation: str, operands: Sequence[Constant]) -> Node:
    if operation == "sqrt" and operands[0].value >= 0:
        # That of torch is one unit too low on some CPUs.
        return Constant(math.sqrt(operands[0].value))
    values = [as_tensor(float(each.value) if operation == "divide" else each.value) for each in operands]
    nothing = operation in ("quotient", "remainder") and operands[1].value == 0
    value = math.nan if nothing else OPERATIONS[operation].compute(*values).item()
    if isinstance(value, float) and math.isnan(value):
        raise InputError(f"{operation} of {' and '.join(str(each.value) for each in operands)} is no number.")
    return Constant(value)


def as_tensor(value: bool | int | float) -> Tensor:
    """A number in torch, as wide as Python's."""
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    return torch.tensor(value, dtype=dtype, device="cpu")


def _add(a: Node, b: Node) -> Node | None:
    return b if _is(a, 0) else a if _is(b, 0) else None


def _subtract(a: Node, b: Node) -> Node | None:
    return a if _is(b, 0) else call("negative", b) if _is(a, 0) else None


def _multiply(a: Node, b: Node) -> Node | None:
    if _is(a, 0) or _is(b, 0):
        return ZERO if ZERO in (a, b) else Constant(0)
    return b if _is(a, 1) else a if _is(b, 1) else None


def _and(a: Node, b: Node) -> Node | None:
    if FALSE in (a, b):
        return FALSE
    return b if a in (TRUE, b) else a if b == TRUE else None


def _or(a: Node, b: Node) -> Node | None:
    if TRUE in (a, b):
        return TRUE
    return b if a in (FALSE, b) else a if b == FALSE else None


def _not(a: Node) -> Node | None:
    return a.operands[0] if isinstance(a, Call) and a.operation == "not" else None


def _where(condition: Node, a: Node, b: Node) -> Node | None:
    if a == b or condition == TRUE:
        return a
    return b if condition == FALSE else None


def _divide(a: Node, b: Node) -> Node | None:
    return ZERO if a == ZERO and not _is(b, 0) else None


def _negative(a: Node) -> Node | None:
    return a.operands[0] if isinstance(a, Call) and a.operation == "negative" else None


def _extreme(a: Node, b: Node) -> Node | None:
    return a if a == b else None


def _is(node: Node, value: int) -> bool:
    return isinstance(node, Constant) and node.kind != "bool" and node.value == value


_FOLDED: dict[str, Callable[..., Node | None]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "negative": _negative,
    "and": _and,
    "or": _or,
    "not": _not,
    "where": _where,
    "minimum": _extreme,
    "maximum": _extreme,
}
