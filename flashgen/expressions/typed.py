"""Which operand is a condition, a whole number or a float; conversions are put in where Triton and torch differ."""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.errors import InputError
from flashgen.expressions.nodes import OPERATIONS, Call, Constant, Kind, Name, Node, Read, call
from flashgen.expressions.parse import show

# What tensors of expressions may hold, as specs name it.
TENSOR_TYPES: dict[str, Kind] = {
    "fp16": "float", "bf16": "float", "fp32": "float", "fp64": "float", "int32": "int", "int64": "int", "bool": "bool",
}  # fmt: skip


def typed(node: Node, tensors: Sequence[tuple[str, int]]) -> Node:
    """The same with every conversion written out.

    Args:
        node: what `parse` returned.
        tensors: (type, rank) of each, types of TENSOR_TYPES.

    Raises:
        InputError: an operand is of the wrong kind, or a tensor of another rank; with the piece of text.
    """
    if isinstance(node, Read):
        if not node.tensor < len(tensors):
            raise InputError(f"`{show(node)}` reads a tensor that is not there.")
        if len(node.indices) != tensors[node.tensor][1]:
            raise InputError(
                f"a tensor of mod_tensors has {tensors[node.tensor][1]} dimensions, but is read by "
                f"{len(node.indices)} indices: `{show(node)}`."
            )
        indices = tuple(typed(each, tensors) for each in node.indices)
        if any(kind(each, tensors) != "int" for each in indices):
            raise InputError(f"indices must be whole numbers in `{show(node)}`.")
        return Read(node.tensor, indices)
    if not isinstance(node, Call):
        return node
    operands = [typed(each, tensors) for each in node.operands]
    kinds = [kind(each, tensors) for each in operands]
    takes = OPERATIONS[node.operation].takes
    alike = {each for each, wanted in zip(kinds, takes, strict=True) if wanted in ("number", "any")}
    for index, wanted in enumerate(takes):
        if wanted == "bool" and kinds[index] != "bool":
            raise InputError(f"`{show(operands[index])}` must be a condition in `{show(node)}`.")
        if wanted == "int" and kinds[index] != "int":
            raise InputError(f"`{show(operands[index])}` must be a whole number in `{show(node)}`.")
        if wanted == "float" or (wanted in ("number", "any") and "float" in alike):
            operands[index] = _to("float", operands[index], kinds[index])
        elif wanted == "number" or (wanted == "any" and "int" in alike):
            operands[index] = _to("int", operands[index], kinds[index])
    if node.operation == "where" and kinds[1:] == ["bool", "bool"]:
        condition, either, other = operands
        chosen = call("and", condition, either), call("and", call("not", condition), other)
        return call("or", *chosen)
    return call(node.operation, *operands)


def kind(node: Node, tensors: Sequence[tuple[str, int]]) -> Kind:
    """What a typed node is."""
    if isinstance(node, Constant):
        return node.kind
    if isinstance(node, Name):
        return "float" if node.name == "score" else "int"
    if isinstance(node, Read):
        return TENSOR_TYPES[tensors[node.tensor][0]]
    gives = OPERATIONS[node.operation].gives
    if gives == "any" or gives == "number":
        found = {kind(each, tensors) for each in node.operands[-2:]}
        return "float" if "float" in found else "int" if "int" in found else "bool"
    return gives  # type: ignore[return-value]


def check_score(text: str, node: Node, tensors: Sequence[tuple[str, int]]) -> Node:
    """A typed score_mod, which must be a number, as a float."""
    found = kind(node, tensors)
    if found == "bool":
        raise InputError(f"score_mod must be a number, but `{text}` is a condition: use mask_mod, or where.")
    return _to("float", node, found)


def check_mask(text: str, node: Node, tensors: Sequence[tuple[str, int]]) -> Node:
    """A typed mask_mod, which must be a condition."""
    if kind(node, tensors) != "bool":
        raise InputError(f"mask_mod must be a condition, but `{text}` is a number.")
    return node


def _to(wanted: Kind, node: Node, has: Kind) -> Node:
    if has == wanted:
        return node
    if isinstance(node, Constant):
        return Constant(float(node.value) if wanted == "float" else int(node.value))
    if (
        wanted == "float"
        and isinstance(node, Call)
        and node.operation in _SPREADS
        and _places(node) == {"q_idx", "kv_idx"}
    ):
        # Rows and keys become floats by themselves: a conversion for every pair takes as long as an exponential.
        return call(node.operation, *(_to("float", each, "int") for each in node.operands))
    return call(f"to_{wanted}", node)


# Of whole numbers below 2**24 these are the same of floats.
_SPREADS = ("add", "subtract", "negative", "abs", "minimum", "maximum")


def _places(node: Node) -> set[str]:
    """Which of both indices it depends on."""
    if isinstance(node, Name):
        return {node.name} & {"q_idx", "kv_idx"}
    below = node.operands if isinstance(node, Call) else node.indices if isinstance(node, Read) else ()
    return {name for each in below for name in _places(each)}
