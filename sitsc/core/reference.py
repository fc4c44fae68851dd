"""The computation of an artifact as a file: what its kernels must equal, executed with plain torch.

In: the final graph of a compile. Out: JSON of operators by name over inputs, weights and earlier
values, kept in the artifact: a machine with the kernels checks them by it, and it can be exported.
Only operators of aten, of sitsc, and Python's arithmetic on sizes are called.
"""

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from sitsc.core.errors import ArtifactError

FILE = "reference.json"
SCHEMA = 2
_NAMESPACES = ("aten", "sitsc")
_GETITEM, _PYTHON = "getitem", "operator"
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg")
_LAYOUTS = (torch.memory_format, torch.layout)
Override = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Reference:
    """Calls in order, with arguments and keywords: plain values, {"value": earlier call},
    {"input": name}, {"weight": name}, {"dtype": name} or {"device": null}, that of the inputs.

    `results` are arguments like these; the result is a tuple of them when there are several.
    """

    calls: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...]
    results: tuple[Any, ...]
    weights: frozenset[str] = field(default_factory=frozenset)

    def run(
        self,
        weights: Mapping[str, torch.Tensor],
        inputs: Mapping[str, Any],
        overrides: Mapping[str, Override] | None = None,
        after: Callable[[str, Any], Any] = lambda name, value: value,
    ) -> Any:
        """The result. `overrides` replace operators by name; `after` may change each value.

        Values are dropped after their last use.
        """
        values: dict[int, Any] = {}
        last = self._last_uses()
        for index, (name, arguments, keywords) in enumerate(self.calls):
            given = [_given(a, values, weights, inputs) for a in arguments]
            named = {k: _given(a, values, weights, inputs) for k, a in keywords.items()}
            call = (overrides or {}).get(name) or operator_of(name)
            values[index] = after(name, call(*given, **named))
            for done in last.get(index, ()):
                del values[done]
        found = tuple(_given(item, values, weights, inputs) for item in self.results)
        return found[0] if len(found) == 1 else found

    def operators(self) -> frozenset[str]:
        """Names of all operators that are called."""
        return frozenset(name for name, _, _ in self.calls)

    def _last_uses(self) -> dict[int, list[int]]:
        """Which values are not needed after which call."""
        last: dict[int, int] = {}
        for index, (_, arguments, keywords) in enumerate(self.calls):
            last[index] = index
            for value in _values([arguments, list(keywords.values())]):
                last[value] = index
        for value in _values(self.results):
            last.pop(value, None)
        found: dict[int, list[int]] = {}
        for value, index in last.items():
            found.setdefault(index, []).append(value)
        return found


def reference_value(graph: fx.Graph) -> dict[str, Any]:
    """A graph as a JSON value. Raises ArtifactError for a call that JSON cannot hold."""
    places: dict[fx.Node, Any] = {}
    calls: list[Any] = []
    results: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            spec = node.meta.get("weight")
            places[node] = {"input": node.meta.get("input")} if spec is None else {}
            if spec is not None:
                places[node] = {"weight": spec.name}
        elif node.op == "output":
            found: Any = node.args[0]
            results = [places[n] for n in (found if isinstance(found, tuple) else (found,))]
        else:
            kept = {k: v for k, v in node.kwargs.items() if not isinstance(v, _LAYOUTS)}
            keywords = {key: _written(value, places) for key, value in kept.items()}
            calls.append([_name(node.target), _written(list(node.args), places), keywords])
            places[node] = {"value": len(calls) - 1}
    return {"schema": SCHEMA, "calls": calls, "results": results}


def write_reference(graph: fx.Graph, folder: Path, *, required: bool = False) -> None:
    """Write a graph into an artifact's folder.

    One that JSON cannot hold is left out: the artifact runs, but cannot be exported. Raises
    ArtifactError instead where the graph is `required`.
    """
    try:
        value = reference_value(graph)
    except ArtifactError:
        if required:
            raise
        return
    (folder / FILE).write_text(json.dumps(value, separators=(",", ":")))


def read_reference(value: Any) -> Reference:
    """The reference in a JSON value. Raises ArtifactError for anything else."""
    try:
        if value["schema"] != SCHEMA:
            raise ArtifactError(f"{FILE} has schema {value['schema']}", hint="compile again")
        calls = tuple((str(name), tuple(a), dict(k)) for name, a, k in value["calls"])
        results = tuple(value["results"])
        arguments = [[a, list(k.values())] for _, a, k in calls]
        found = Reference(calls, results, frozenset(_weights([arguments, results])))
        assert results and all(0 <= i < len(calls) for i in _values(results))
        for index, (name, arguments, keywords) in enumerate(calls):
            operator_of(name)
            named = _values([arguments, list(keywords.values())])
            assert all(0 <= i < index for i in named)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{FILE} cannot be read: {type(error).__name__} {error}"
        raise ArtifactError(what, hint="compile again") from None
    return found


def _name(target: Any) -> str:
    if target is operator.getitem:
        return _GETITEM
    if getattr(target, "__module__", "") == "_operator" and target.__name__ in _ARITHMETIC:
        return f"{_PYTHON}.{target.__name__}"
    name = str(target)
    if name.split(".")[0] not in _NAMESPACES or name.count(".") != 2:
        raise ArtifactError(f"operator {name} has no reference", hint="report the model")
    return name


def operator_of(name: str) -> Override:
    """What a call calls. Raises ArtifactError, or AttributeError for one that is not there."""
    if name == _GETITEM:
        return operator.getitem
    if name.partition(".")[::2] in {(_PYTHON, known) for known in _ARITHMETIC}:
        return getattr(operator, name.partition(".")[2])
    namespace, call, overload = name.split(".")
    if namespace not in _NAMESPACES:
        raise ArtifactError(f"{FILE} calls {name}", hint="compile again")
    return getattr(getattr(getattr(torch.ops, namespace), call), overload)


def _written(value: Any, places: dict[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return places[value]
    if isinstance(value, (list, tuple)):
        return [_written(item, places) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArtifactError(f"an argument of type {type(value).__name__} has no text", hint="report it")


def _given(
    value: Any, values: dict[int, Any], weights: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Any:
    if isinstance(value, list):
        return [_given(item, values, weights, inputs) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, what),) = value.items()
    if kind == "dtype":
        return getattr(torch, what)
    if kind == "device":
        return next((v.device for v in inputs.values()), torch.device("cpu"))
    return {"value": values, "weight": weights, "input": inputs}[kind][what]


def _values(arguments: Any) -> list[int]:
    """Indices of the values that arguments name."""
    if isinstance(arguments, dict):
        return [arguments["value"]] if "value" in arguments else []
    if isinstance(arguments, (list, tuple)):
        return [index for item in arguments for index in _values(item)]
    return []


def _weights(arguments: Any) -> list[str]:
    if isinstance(arguments, dict):
        return [arguments["weight"]] if "weight" in arguments else []
    if isinstance(arguments, (list, tuple)):
        return [name for item in arguments for name in _weights(item)]
    return []
