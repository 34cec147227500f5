"""Python text, or a function, to an expression; and back to the one text of its meaning."""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from flashgen.errors import InputError, did_you_mean
from flashgen.expressions.nodes import OPERATIONS, Call, Constant, Name, Node, Read

# What an expression may name, but for tensors; functions take the first ones, in this order, by names of their own.
PLACES = ("batch", "head", "q_idx", "kv_idx")
SIZES = ("seq_q", "seq_kv")
# More is no score's business, and would take Python's recursion to its limit.
MAX_NODES = 300
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide", ast.FloorDiv: "quotient",
    ast.Mod: "remainder", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.Lt: "less", ast.LtE: "less_equal",
    ast.Gt: "greater", ast.GtE: "greater_equal", ast.Eq: "equal", ast.NotEq: "not_equal", ast.USub: "negative",
    ast.Invert: "not",
}  # fmt: skip
_FUNCTIONS = {name: name for name, each in OPERATIONS.items() if not each.infix} | {
    "logical_and": "and", "logical_or": "or", "logical_not": "not", "fdiv": "divide",
}  # fmt: skip

_CONVERSIONS = {"float32": "to_float", "float": "to_float", "int32": "to_int", "int": "to_int"}


def canonical(source: object, names: Sequence[str], scored: bool) -> str:
    """The one text of what an expression means: tensors by number, locals filled in, every operation in parentheses.

    Args:
        source: an expression as text, or a function of (score, batch, head, q_idx, kv_idx, *tensors), plain or of
            triton.jit, whose body is assignments and a return. Of a pair, the second is the first one's derivative.
        names: what the expression calls the tensors.
        scored: whether there is a `score`.

    Raises:
        InputError: it is nothing of this, or says what is not known; with the piece of text.
    """
    if isinstance(source, tuple):
        if len(source) != 2 or not scored:
            what = (
                "score_mod must be one expression or a pair with its derivative" if scored else "mask_mod must be one"
            )
            raise InputError(f"{what}, but got {source!r}.")
        value, derivative = (_from_any(each, names, scored) for each in source)
        return show(Call("with_derivative", (value, derivative)))
    return show(_from_any(source, names, scored))


def parse(text: str, scored: bool) -> Node:
    """A canonical text; InputError for any other."""
    if text.startswith("#"):
        raise InputError(f"{text} is the digest of an expression that only its caller has: pass score_mod or mask_mod.")
    tensors = {name: int(number) for name, number in re.findall(r"\b(mod(\d+))\[", text)}
    return _Reader(tensors, _places(scored), {}).of_text(text)


def show(node: Node) -> str:
    """An expression as canonical text."""
    if isinstance(node, Constant):
        text = repr(node.value)
        return f'float("{text}")' if text.lstrip("-") == "inf" else text
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Read):
        return f"mod{node.tensor}[{', '.join(show(index) for index in node.indices)}]"
    operation = OPERATIONS[node.operation]
    operands = [show(each) for each in node.operands]
    return f"({operation.text.format(*operands)})" if operation.infix else f"{operation.text}({', '.join(operands)})"


def size(node: Node) -> int:
    """How many nodes it has, written out."""
    below = node.operands if isinstance(node, Call) else node.indices if isinstance(node, Read) else ()
    return 1 + sum(size(each) for each in below)


def _places(scored: bool) -> dict[str, Node]:
    return {name: Name(name) for name in (("score",) if scored else ()) + PLACES + SIZES}


def _from_any(source: object, names: Sequence[str], scored: bool) -> Node:
    tensors = {name: index for index, name in enumerate(names)}
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in _places(True):
            raise InputError(f"a name of mod_tensors must be a word that means nothing else here, but got {name!r}.")
    if isinstance(source, str):
        return _Reader(tensors, _places(scored), {}).of_text(source.strip())
    function: Any = function_of(source)
    plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
    if not plain or function.__name__ == "<lambda>":
        raise InputError(
            "score_mod and mask_mod must be text or a function made by def, undecorated or of triton.jit, but got "
            f"{source!r}."
        )
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError) as error:
        raise InputError(f"the source of {function.__name__} cannot be read: {error}. Give it as text.") from None
    if not isinstance(tree, ast.FunctionDef):
        raise InputError(f"{function.__name__} must be made by def.")
    return _of_function(tree, function, tensors, scored)


def function_of(source: object) -> object:
    """What triton.jit has wrapped, or the thing itself."""
    return getattr(source, "fn", source)


def captured(function: Any) -> dict[str, Any]:
    """What a function names beyond its own, as it is now."""
    outer = inspect.getclosurevars(function)
    return {**outer.globals, **outer.nonlocals}


def _of_function(tree: ast.FunctionDef, function: Any, tensors: Mapping[str, int], scored: bool) -> Node:
    given = [each.arg for each in tree.args.args]
    places = (("score",) if scored else ()) + PLACES
    if len(given) < len(places) or tree.args.vararg or tree.args.kwonlyargs:
        wanted, has = ", ".join(places), ", ".join(given)
        raise InputError(f"{tree.name} must take ({wanted}, tensors by name), but takes ({has}).")
    known: dict[str, Node] = {own: Name(place) for own, place in zip(given, places, strict=False)}
    for own in given[len(places) :]:
        if own in SIZES:
            known[own] = Name(own)
        elif own not in tensors:
            raise InputError(
                f"{tree.name} takes {own!r}, which mod_tensors does not have. Known: {', '.join(tensors)}."
            )
    reader = _Reader(tensors, known, captured(function))
    for statement in tree.body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            return reader.read(statement.value)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            known[statement.targets[0].id] = reader.read(statement.value)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            known[statement.target.id] = reader.read(
                ast.BinOp(ast.Name(statement.target.id), statement.op, statement.value)
            )
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            raise InputError(f"{tree.name} may assign names and return, but has `{ast.unparse(statement)}`.")
    raise InputError(f"{tree.name} returns nothing.")


class _Reader:
    """Syntax to nodes, by what names mean."""

    def __init__(self, tensors: Mapping[str, int], known: Mapping[str, Node], outer: Mapping[str, object]) -> None:
        self._tensors, self._known, self._outer = tensors, known, outer

    def of_text(self, text: str) -> Node:
        try:
            tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(f"`{text[:200]}` is no expression: {error}.") from None
        return self.read(tree)

    def read(self, tree: ast.expr) -> Node:
        if sum(isinstance(each, ast.expr) for each in ast.walk(tree)) <= MAX_NODES:
            node = self._read(tree)
            if size(node) <= MAX_NODES:
                return node
        raise InputError(f"an expression may have {MAX_NODES} parts, locals filled in, but this has more.")

    def _read(self, tree: ast.expr) -> Node:
        if isinstance(tree, ast.Constant) and type(tree.value) in (bool, int, float):
            return Constant(tree.value)  # type: ignore[arg-type]
        if isinstance(tree, ast.Name):
            return self._name(tree.id)
        if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
            return Call(_OPERATORS[type(tree.op)], (self._read(tree.left), self._read(tree.right)))
        if isinstance(tree, ast.UnaryOp) and type(tree.op) in _OPERATORS:
            return Call(_OPERATORS[type(tree.op)], (self._read(tree.operand),))
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _OPERATORS:
            return Call(_OPERATORS[type(tree.ops[0])], (self._read(tree.left), self._read(tree.comparators[0])))
        if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Name):
            inside = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
            return Read(self._tensor(tree.value.id), tuple(self._read(each) for each in inside))
        if isinstance(tree, ast.Call) and not tree.keywords:
            return self._call(tree)
        hints = {ast.BoolOp: "join conditions by & and |", ast.IfExp: "use where(condition, a, b)"}
        hints |= {ast.Compare: "compare two at a time and join them by &"}
        raise InputError(f"`{ast.unparse(tree)}` cannot be part of an expression; {hints.get(type(tree), _ALLOWED)}.")

    def _name(self, name: str) -> Node:
        if name in self._known:
            return self._known[name]
        value = getattr(self._outer.get(name), "value", self._outer.get(name))  # of a tl.constexpr
        if type(value) in (bool, int, float):
            return Constant(value)  # type: ignore[arg-type]
        if name in self._tensors:
            raise InputError(f"`{name}` is a tensor: say which element, {name}[…].")
        if value is not None:
            raise InputError(f"`{name}` is a {type(value).__name__}; an expression takes tensors from mod_tensors.")
        raise InputError(f"`{name}` is not known here. {did_you_mean(name, [*self._known, *self._tensors])}")

    def _tensor(self, name: str) -> int:
        if name not in self._tensors:
            raise InputError(f"`{name}` is no tensor. {did_you_mean(name, list(self._tensors))}")
        return self._tensors[name]

    def _call(self, tree: ast.Call) -> Node:
        function = tree.func.attr if isinstance(tree.func, ast.Attribute) else getattr(tree.func, "id", "")
        arguments = tree.args
        if function == "float" and len(arguments) == 1 and isinstance(arguments[0], ast.Constant):
            try:
                number = float(arguments[0].value)  # type: ignore[arg-type]
            except (TypeError, ValueError):
                number = math.nan
            if math.isnan(number):
                raise InputError(f"`{ast.unparse(tree)}` is no number.")
            return Constant(number)
        if function == "load" and len(arguments) == 1:
            # tl.load(tensor + index), of a vector.
            at = arguments[0]
            if isinstance(at, ast.BinOp) and isinstance(at.op, ast.Add) and isinstance(at.left, ast.Name):
                return Read(self._tensor(at.left.id), (self._read(at.right),))
        if function == "to" and isinstance(tree.func, ast.Attribute) and len(arguments) == 1:
            kind = _CONVERSIONS.get(ast.unparse(arguments[0]).rpartition(".")[2])
            if kind is None:
                raise InputError(f"`{ast.unparse(tree)}`: there are conversions to float32 and int32 alone.")
            return Call(kind, (self._read(tree.func.value),))
        operation = _FUNCTIONS.get(function)
        if operation is None or len(arguments) != len(OPERATIONS[operation].takes):
            raise InputError(f"`{ast.unparse(tree)}` cannot be part of an expression; {_ALLOWED}.")
        return Call(operation, tuple(self._read(each) for each in arguments))


_NAMES = ", ".join(name for name in _FUNCTIONS if "_" not in name)
_ALLOWED = f"there are + - * / // %, comparisons, & | ^ ~, tensor[i, j], {_NAMES}"
