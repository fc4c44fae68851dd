"""An opened ONNX file made ready to be interpreted: nodes decoded, weights told from constants.

In: an `OnnxFile`. Out: `Program`: steps in order, the weights with the orientation in which they
are used, and constants with their values. All operators that are not supported are named at once.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.core.weights import dtype_name
from sitsc.export.moe_form import DOMAIN
from sitsc.frontend.onnx_file import OnnxFile, OnnxTensor, counted, inline_tensor
from sitsc.frontend.onnx_ops import OPERATORS
from sitsc.frontend.safe_files import shown

LINEAR, MOE = "Linear.sitsc", "Moe.sitsc"
_MAX_CONSTANT_BYTES = 64 << 20
_HOST_ITEMS = 16
_MAX_NAME = 160


@dataclass(frozen=True, slots=True)
class Step:
    """One node: operator, names of inputs ("" where one is left out) and outputs, attributes."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OnnxWeight:
    """A weight as the graph uses it: an initializer, or the transposed of one.

    `wide`: of half precision, but cast to float32 before anything reads it.
    """

    tensor: OnnxTensor
    transposed: bool
    wide: bool = False

    @property
    def source(self) -> tuple[str, bool, bool]:
        """What tells it from other weights."""
        return self.tensor.name, self.transposed, self.wide

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as used."""
        return self.tensor.shape[::-1] if self.transposed else self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its type as used."""
        return torch.float32 if self.wide else self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as used."""
        rows = self.tensor.rows(start, stop) if not self.transposed else self._turned(start, stop)
        return rows.to(self.dtype)

    def _turned(self, start: int, stop: int) -> Tensor:
        return self.tensor.read().T[start:stop].contiguous()


@dataclass(frozen=True, slots=True)
class Program:
    """What is interpreted; values by the names of the graph. `constants` are tensors or numbers."""

    file: OnnxFile
    steps: tuple[Step, ...]
    weights: Mapping[str, OnnxWeight]
    constants: Mapping[str, Any]

    def digest(self) -> str:
        """A digest of all that decides the graph: the file, and constants of external data."""
        found = hashlib.sha256(self.file.digest.encode())
        for name, tensor in sorted(self.file.tensors.items()):
            if tensor.file is not None and name in self.constants:
                found.update(tensor.read().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def plan_names(self) -> dict[str, OnnxWeight]:
        """The weights that are used by their names in plans: short, unique as identifiers."""
        used = {name for step in self.steps for name in step.inputs}
        found: dict[str, OnnxWeight] = {}
        taken: set[str] = set()
        seen: set[tuple[str, bool, bool]] = set()
        for name, weight in self.weights.items():
            if name not in used or weight.source in seen:
                continue
            seen.add(weight.source)
            stem = re.sub(r"[^\w.]+", ".", weight.tensor.name)[:_MAX_NAME].strip(".") or "weight"
            plain = stem + (".T" if weight.transposed else "")
            unique = next(n for n in _numbered(plain) if re.sub(r"\W", "_", n) not in taken)
            taken.add(re.sub(r"\W", "_", unique))
            found[unique] = weight
        return found


def dtype_of(program: Program) -> str:
    """The dtype that most of the weights are used in ("float32")."""
    sizes: Counter[str] = Counter()
    for weight in program.weights.values():
        if weight.dtype.is_floating_point:
            sizes[dtype_name(weight.dtype)] += weight.tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def logits_index(program: Program) -> int:
    """Which output holds the logits: the one of that name, else the first."""
    names = program.file.outputs
    return names.index("logits") if "logits" in names else 0


def _numbered(name: str) -> Iterator[str]:
    """A name, then the name with numbers."""
    yield name
    yield from (f"{name}.{number}" for number in itertools.count(2))


def make_program(file: OnnxFile) -> Program:
    """Raises UnsupportedModelError for operators, CheckpointError for a graph that is not one."""
    _refuse_unknown(file)
    experts = _expert_weights(file)
    constants = {
        name: as_value(tensor.read())
        for name, tensor in file.tensors.items()
        if _is_constant(tensor) and name not in experts
    }
    weights = {n: OnnxWeight(t, False) for n, t in file.tensors.items() if n not in constants}
    steps: list[Step] = []
    for node in file.nodes:
        step = _step(node, file)
        if step.op == "Constant":
            constants[step.outputs[0]] = _constant(step)
        elif step.op == "Identity" and step.inputs[0] in weights:
            weights[step.outputs[0]] = weights[step.inputs[0]]
        elif step.op == "Transpose" and _is_matrix(weights.get(step.inputs[0])):
            found = weights[step.inputs[0]]
            weights[step.outputs[0]] = replace(found, transposed=not found.transposed)
        elif _widens(step, weights):
            weights[step.outputs[0]] = replace(weights[step.inputs[0]], wide=True)
        else:
            steps.append(_as_linear(step, weights))
    steps = _with_biases(steps, weights, file.outputs)
    _check_order(file, steps, weights, constants)
    return Program(file, tuple(steps), weights, constants)


def _expert_weights(file: OnnxFile) -> set[str]:
    """Initializers that experts read, cast or not: weights of any rank."""
    names: set[str] = set()
    for node in file.nodes:
        if is_own(node, file):
            names.update(node.input)
    for node in file.nodes:
        if node.op_type == "Cast" and names & set(node.output):
            names.update(node.input)
    return names


def is_own(node: Any, file: OnnxFile) -> bool:
    """Whether a node calls a function of our exporter."""
    return node.domain == DOMAIN and node.op_type in file.functions


def _widens(step: Step, weights: Mapping[str, OnnxWeight]) -> bool:
    """Whether a node casts a weight of half precision to float32."""
    found = weights.get(step.inputs[0]) if step.op == "Cast" else None
    half = (torch.float16, torch.bfloat16)
    return found is not None and found.tensor.dtype in half and step.attributes.get("to") == 1


def _refuse_unknown(file: OnnxFile) -> None:
    """Name every operator that is not supported, with counts."""
    found: Counter[str] = Counter()
    for node in file.nodes:
        if is_own(node, file):
            continue
        standard = node.domain in ("", "ai.onnx")
        known = node.op_type in OPERATORS or node.op_type == "Constant"
        if not standard or not known or node.op_type in (LINEAR, MOE):
            found[node.op_type if standard else f"{node.domain}.{node.op_type}"] += 1
    if found:
        raise UnsupportedModelError(
            f"operators that are not supported: {counted(found)}",
            where=file.path.name,
            hint="export without an optimiser of ONNX Runtime and without merging graphs (If)",
        )


def _is_constant(tensor: OnnxTensor) -> bool:
    """Whether an initializer is part of the computation, not a weight of a layer."""
    if tensor.nbytes > _MAX_CONSTANT_BYTES:
        return False
    count = tensor.nbytes // tensor.dtype.itemsize
    floating, rank = tensor.dtype.is_floating_point, len(tensor.shape)
    return not floating or count <= 1 or rank > 2 or tensor.name.endswith("inv_freq")


def as_value(tensor: Tensor) -> Any:
    """A small constant as numbers (see `onnx_host`), another one as it is."""
    integers = tensor.dtype == torch.int64 and tensor.numel() <= _HOST_ITEMS
    scalar = tensor.numel() == 1 and (tensor.is_floating_point() or tensor.dtype == torch.bool)
    return tensor.tolist() if tensor.dim() < 2 and (integers or scalar) else tensor


def _step(node: Any, file: OnnxFile) -> Step:
    where = shown(node.name or node.op_type)[1:-1]
    if not node.output or (not node.input and node.op_type != "Constant"):
        raise CheckpointError(f"node {where} has no input or output", hint="the file is damaged")
    if is_own(node, file):
        form = file.functions[node.op_type]
        return Step(MOE, where, tuple(node.input), tuple(node.output), {"form": form})
    attributes = {a.name: _attribute(a, where) for a in node.attribute}
    if node.op_type == "ConstantOfShape" and isinstance(attributes.get("value"), Tensor):
        attributes["value"] = _fill(attributes["value"], where)
    return Step(node.op_type, where, tuple(node.input), tuple(node.output), attributes)


def _attribute(proto: Any, where: str) -> Any:
    """An attribute as a plain value, a list, or a tensor. Raises UnsupportedModelError."""
    if proto.type == 4:
        return inline_tensor(proto.t, where)
    fields = {1: "f", 2: "i", 3: "s", 6: "floats", 7: "ints", 8: "strings"}
    if proto.type not in fields:
        raise UnsupportedModelError(
            f"attribute {shown(proto.name)} is of no known kind", where=where
        )
    value = getattr(proto, fields[proto.type])
    return list(value) if proto.type > 4 else value


def _fill(value: Tensor, where: str) -> tuple[Any, torch.dtype]:
    """The one number of a tensor, and its type."""
    if value.numel() != 1:
        raise CheckpointError("ConstantOfShape has not one value", where=where)
    return value.reshape(-1)[0].item(), value.dtype


def _constant(step: Step) -> Any:
    if len(step.attributes) != 1:
        raise UnsupportedModelError("a Constant has one value", where=step.name)
    ((key, value),) = step.attributes.items()
    if isinstance(value, Tensor):
        return as_value(value)
    if key not in ("value_float", "value_int", "value_ints", "value_floats"):
        raise UnsupportedModelError(f"a Constant given as {shown(key)}", where=step.name)
    return torch.tensor(value) if key == "value_floats" and len(value) > 1 else value


def _is_matrix(weight: OnnxWeight | None) -> bool:
    return weight is not None and len(weight.tensor.shape) == 2


def _as_linear(step: Step, weights: dict[str, OnnxWeight]) -> Step:
    """A product with a weight as a linear layer of the weight [out, in]."""
    if step.op not in ("MatMul", "Gemm") or len(step.inputs) < 2:
        return step
    found = weights.get(step.inputs[1])
    if found is None or not _is_matrix(found) or step.inputs[0] in weights:
        return step
    turned = bool(step.attributes.get("transB", 0))
    if step.op == "Gemm":
        usual = (("alpha", 1), ("beta", 1), ("transA", 0))
        plain = all(step.attributes.get(key, value) == value for key, value in usual)
        width = found.shape[0 if turned else 1]
        biases = [weights.get(name) for name in step.inputs[2:] if name]
        if not plain or any(bias is None or bias.shape != (width,) for bias in biases):
            return step
    used = found if turned else replace(found, transposed=not found.transposed)
    name = f"{step.inputs[1]} of {step.name or step.op} as [out, in]"
    weights[name] = used
    return Step(LINEAR, step.name, (step.inputs[0], name, *step.inputs[2:]), step.outputs, {})


def _with_biases(
    steps: list[Step], weights: Mapping[str, OnnxWeight], outputs: tuple[str, ...]
) -> list[Step]:
    """Additions of a vector to a linear layer's only use become its bias."""
    uses = Counter(name for step in steps for name in step.inputs) + Counter(outputs)
    layers = {s.outputs[0]: s for s in steps if s.op == LINEAR and len(s.inputs) == 2}
    made: dict[str, Step] = {}
    for step in steps:
        if step.op != "Add" or len(step.inputs) != 2:
            continue
        for product, other in (step.inputs, step.inputs[::-1]):
            layer, bias = layers.get(product), weights.get(other)
            if layer is None or bias is None or uses[product] != 1:
                continue
            if bias.shape == weights[layer.inputs[1]].shape[:1]:
                inputs = (*layer.inputs, other)
                made[product] = Step(LINEAR, layer.name, inputs, step.outputs, {})
                break
    gone = {step.outputs for step in made.values()}
    kept = [s for s in steps if not (s.op == "Add" and s.outputs in gone)]
    return [made.get(s.outputs[0], s) if s.op == LINEAR else s for s in kept]


def _check_order(
    file: OnnxFile,
    steps: list[Step],
    weights: Mapping[str, OnnxWeight],
    constants: Mapping[str, Any],
) -> None:
    """Raises CheckpointError unless every value is made once, before it is used."""
    known = {"", *(i.name for i in file.inputs), *weights, *constants}
    for step in steps:
        missing = next((name for name in step.inputs if name not in known), None)
        again = next((name for name in step.outputs if name and name in known), None)
        if missing is not None or again is not None:
            name = shown(again if missing is None else missing)
            what = "is made twice" if missing is None else "is used before it is made"
            raise CheckpointError(
                f"value {name} {what}", where=step.name, hint="the file is damaged"
            )
        known.update(step.outputs)
    if missing := [name for name in file.outputs if name not in known]:
        raise CheckpointError(f"output {shown(missing[0])} is never made", where=file.path.name)
