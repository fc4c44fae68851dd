"""Match activations: formulas that stand for an activation become one call of it.

Known: the tanh form of GELU (0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))) and its exact form
(0.5·x·(1 + erf(x/√2))), factors in any order. Others stay as aten operators.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, arguments, aten, call, calls, is_op, replace

_CUBIC, _OUTER, _INNER = 0.044715, math.sqrt(2 / math.pi), math.sqrt(0.5)
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class MatchActivation:
    """See the module."""

    name: ClassVar[str] = "match_activation"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "mul"):
            if (found := _gelu(node)) is not None:
                x, kind = found
                with graph.inserting_before(node):
                    new = call(graph, aten.gelu.default, (x,), node, approximate=kind)
                replace(node, new)


def _factors(node: Node) -> tuple[float, list[Node]]:
    """A product as its constant and its other factors."""
    if is_op(node, "div") and _number(node.args[1]):
        constant, rest = _factors(node.args[0])
        return constant / node.args[1], rest
    if not is_op(node, "mul"):
        return (float(node), []) if _number(node) else (1.0, [node])
    left, right = (_factors(a) for a in node.args[:2])
    return left[0] * right[0], left[1] + right[1]


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _gelu(node: Node) -> tuple[Node, str] | None:
    """(x, "tanh" or "none") of 0.5 · x · (1 + f), or None."""
    constant, factors = _factors(node)
    if len(factors) != 2 or not math.isclose(constant, 0.5, rel_tol=_TOLERANCE):
        return None
    for x, total in (factors, factors[::-1]):
        inside = _one_more(total)
        if is_op(inside, "tanh") and _is_cubic(inside.args[0], x):
            return x, "tanh"
        if is_op(inside, "erf"):
            scale, of = _factors(inside.args[0])
            if of == [x] and math.isclose(scale, _INNER, rel_tol=_TOLERANCE):
                return x, "none"
    return None


def _one_more(node: Node) -> Node:
    """f of 1 + f."""
    if not is_op(node, "add") or arguments(node).get("alpha", 1) != 1:
        return None
    a, b = node.args[:2]
    return a if _number(b) and b == 1 else b if _number(a) and a == 1 else None


def _is_cubic(node: Node, x: Node) -> bool:
    """Whether a value is √(2/π) · (x + 0.044715 · x³)."""
    scale, inside = _factors(node)
    if len(inside) != 1 or not is_op(inside[0], "add"):
        return False
    if not math.isclose(scale, _OUTER, rel_tol=_TOLERANCE):
        return False
    if arguments(inside[0]).get("alpha", 1) != 1:
        return False
    for plain, cubic in (inside[0].args[:2], inside[0].args[1::-1]):
        factor, of = _factors(cubic)
        if plain is x and math.isclose(factor, _CUBIC, rel_tol=_TOLERANCE) and _cube(of) is x:
            return True
    return False


def _cube(factors: list[Node]) -> Node | None:
    """x of x³, as a power or a product."""
    if len(factors) == 1 and is_op(factors[0], "pow") and factors[0].args[1] == 3:
        return factors[0].args[0]
    same = len(factors) == 3 and factors[0] is factors[1] is factors[2]
    return factors[0] if same else None
