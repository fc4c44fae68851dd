"""An ONNX program as a torch module: interpreting its nodes one after another on the meta device.

In: a `Program`, the dtype to compute half precision in. Out: a module whose forward takes the
inputs of the graph by name and gives its outputs; torch.export makes an FX graph of it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sitsc.core.errors import SitscError, UnsupportedModelError
from sitsc.frontend.onnx_call import Call
from sitsc.frontend.onnx_ops import OPERATORS
from sitsc.frontend.onnx_program import Program, Step

_HALF = (torch.float16, torch.bfloat16)


class OnnxModule(nn.Module):
    """Parameters are w0, w1 …, constants c0, c1 …: `owners` and `values` say what they are.

    With `weights` by their names in plans the module is real, on the CPU.
    """

    def __init__(
        self, program: Program, half: torch.dtype, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.device = torch.device("meta" if weights is None else "cpu")
        self.given = weights
        self.program, self.narrow = program, half
        self.owners: dict[str, str] = {}
        self.values: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        self._last = _last_uses(program)
        self._add_weights()
        self._add_constants()
        self._check_places()

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.narrow if dtype in _HALF else dtype

    def _add_weights(self) -> None:
        """A parameter for each weight that is used, the same for all names of one."""
        keys: dict[tuple[str, bool, bool], str] = {}
        for plan_name, weight in self.program.plan_names().items():
            key = keys[weight.source] = f"w{len(keys)}"
            dtype = self._dtype(weight.dtype)
            value = torch.empty(weight.shape, dtype=dtype, device="meta")
            if self.given is not None:
                value = self.given[plan_name].to(dtype)
            self.register_parameter(key, nn.Parameter(value, requires_grad=False))
            self.owners[key] = plan_name
        for name, weight in self.program.weights.items():
            if weight.source in keys:
                self.names[name] = keys[weight.source]

    def _add_constants(self) -> None:
        for name, value in self.program.constants.items():
            if isinstance(value, Tensor):
                key = f"c{len(self.values)}"
                value = value.to(self._dtype(value.dtype))
                self.values[key] = value
                self.register_buffer(key, value.to(self.device))
                self.names[name] = key

    def _check_places(self) -> None:
        """Raise UnsupportedModelError for a Gather by places from the end: torch takes none."""
        for step in self.program.steps:
            place = step.inputs[1] if step.op.startswith("Gather") else ""
            value = self.program.constants.get(place)
            if isinstance(value, Tensor) and bool((value < 0).any()):
                raise UnsupportedModelError(
                    f"{step.op} with places below 0 is not supported", where=step.name
                )

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """The outputs of the graph, in their order."""
        with self.device:
            return self._forward(inputs)

    def _forward(self, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
        values: dict[str, Any] = dict(self.program.constants)
        values |= {name: getattr(self, key) for name, key in self.names.items()}
        values |= inputs
        for index, step in enumerate(self.program.steps):
            result = self._run(step, [values[name] if name else None for name in step.inputs])
            results = result if isinstance(result, tuple) else (result,)
            values.update(zip(step.outputs, results, strict=False))
            for name in self._last.get(index, ()):
                values.pop(name, None)
        return tuple(values[name] for name in self.program.file.outputs)

    def _run(self, step: Step, inputs: list[Any]) -> Any:
        """The outputs of one node. Raises UnsupportedModelError naming it."""
        attributes = dict(step.attributes)
        call = Call(step.op, step.name, inputs, attributes, len(step.outputs), self.narrow)
        try:
            result = OPERATORS[step.op](call)
        except SitscError:
            raise
        except Exception as error:  # torch refuses bad shapes and types by many classes
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UnsupportedModelError(
                f"{step.op} cannot be computed: {lines[0][:200]}", where=step.name
            ) from error
        call.check_read()
        return result


def _last_uses(program: Program) -> dict[int, list[str]]:
    """Which values no step after a given one needs; outputs are needed at the end."""
    last = {name: index for index, step in enumerate(program.steps) for name in step.inputs}
    found: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in program.file.outputs:
            found.setdefault(index, []).append(name)
    return found
