"""One node of an ONNX graph as it is interpreted: operator, values, attributes.

Attributes are read with a default and counted; one that nothing has read is an error, so that no
variant of an operator is computed as another one.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sitsc.core.errors import UnsupportedModelError
from sitsc.frontend.onnx_host import as_tensor
from sitsc.frontend.safe_files import shown

ABSENT: Any = object()


@dataclass(slots=True)
class Call:
    """An operator, its inputs (None: left out), and the dtype to compute half precision in."""

    op: str
    name: str
    inputs: list[Any]
    attributes: dict[str, Any]
    num_outputs: int
    half: torch.dtype
    read: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = ABSENT) -> Any:
        """An attribute. Raises UnsupportedModelError when it has neither value nor default."""
        self.read.add(name)
        value = self.attributes.get(name, default)
        if value is ABSENT:
            raise UnsupportedModelError(f"{self.op} lacks its attribute {name}", where=self.name)
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def has(self, index: int) -> bool:
        """Whether input `index` is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def value(self, index: int, default: Any = ABSENT) -> Any:
        """Input `index`, a host value or a tensor. Raises UnsupportedModelError without one."""
        if self.has(index):
            return self.inputs[index]
        if default is ABSENT:
            raise UnsupportedModelError(f"{self.op} lacks input {index}", where=self.name)
        return default

    def tensor(self, index: int) -> Tensor:
        """Input `index` as a tensor."""
        return as_tensor(self.value(index))

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which values of a type are computed."""
        return self.half if dtype in (torch.float16, torch.bfloat16) else dtype

    def check_read(self) -> None:
        """Raises UnsupportedModelError for an attribute that was not looked at."""
        if unread := sorted(set(self.attributes) - self.read):
            raise UnsupportedModelError(
                f"{self.op} with {shown(unread[0])} is not supported", where=self.name
            )

    def require(self, condition: bool, what: str) -> None:
        """Raises UnsupportedModelError for a variant of the operator that is not computed."""
        if not condition:
            raise UnsupportedModelError(f"{self.op} with {what} is not supported", where=self.name)
