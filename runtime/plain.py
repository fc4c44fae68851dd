"""Plain artifacts: a compiled function of tensors, called like the module that it was made from.

In: tensors on the CPU, in order or by name. Out: what the forward returned, a tensor, a tuple or a
dictionary. Sizes and dtypes are compared with the plan before the code runs. Not thread-safe.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sitsc.core.artifact import Artifact, check_target, open_artifact
from sitsc.core.errors import ArtifactError, PlanError, RequestError
from sitsc.core.plan import PLAIN, Argument, Launch
from sitsc.core.weights import dtype_name
from sitsc.runtime.cpu_library import CpuLibrary
from sitsc.runtime.loader import TARGET, checked
from sitsc.runtime.memory import read_weights
from sitsc.runtime.package import bind_package

_SIZE = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)([+-]\d+)?")


class PlainModel:
    """A loaded plain artifact; `model(*tensors)` or `model(name=tensor)`. See the module."""

    def __init__(self, artifact: Artifact, weights: dict[str, Tensor]) -> None:
        self.artifact = artifact
        regime = artifact.plan.regimes[0]
        self._launch: Launch = regime.groups[0].launches[0]
        self._bounds = artifact.plan.model.dimensions
        self._library = CpuLibrary.of(artifact)
        [package] = artifact.plan.packages
        self._weights = weights
        self._runner = bind_package(artifact, package, weights)
        # The plan knows what fixed sizes need; with free ones the kernels' own memory grows.
        planned = artifact.plan.memory.arena[0].bytes
        self._workspace = None if self._bounds else _scratch(planned)

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """Names, dtypes and shapes of the inputs; free sizes by name."""
        return self._launch.arguments

    @property
    def outputs(self) -> tuple[Argument, ...]:
        """Names, dtypes and shapes of the outputs."""
        return self._launch.outputs

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """What the forward of the module returns. Raises RequestError or ExecutionError."""
        given = self._named(args, kwargs)
        sizes: dict[str, int] = {}
        for argument in self.inputs:
            self._check(argument, given[argument.name], sizes)
        for name, size in sizes.items():
            self._check_bounds(name, size)
        tensors = [given[argument.name].detach().contiguous() for argument in self.inputs]
        return self._structured(self._run(tensors))

    def _named(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        names = [argument.name for argument in self.inputs]
        signature = ", ".join(names)
        if len(args) > len(names):
            raise RequestError(f"{len(args)} inputs given", hint=f"it takes {signature}")
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names or name in given:
                what = "given twice" if name in given else "unknown"
                raise RequestError(f"input {name} is {what}", hint=f"it takes {signature}")
            given[name] = value
        if missing := [name for name in names if name not in given]:
            raise RequestError(f"input {missing[0]} is missing", hint=f"it takes {signature}")
        return given

    def _check(self, argument: Argument, value: Tensor, sizes: dict[str, int]) -> None:
        """Compare an input with the plan; free sizes are added to `sizes`."""
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            raise RequestError(f"input {argument.name} is no tensor on the CPU")
        if dtype_name(value.dtype) != argument.dtype:
            what = f"input {argument.name} is of {value.dtype}, compiled for {argument.dtype}"
            raise RequestError(what, hint="convert it")
        wanted = list(argument.shape)
        fits = value.dim() == len(wanted) and all(
            _fits(size, dim, sizes) for size, dim in zip(value.shape, wanted, strict=True)
        )
        if not fits:
            known = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            raise RequestError(
                f"input {argument.name} is {list(value.shape)}, compiled for "
                f"[{', '.join(map(str, wanted))}]{f' with {known}' if known else ''}",
                hint="dynamic_shapes of sitsc.compile frees a size",
            )

    def _check_bounds(self, name: str, size: int) -> None:
        least, most = self._bounds.get(f"{name}_min", 1), self._bounds.get(f"{name}_max", size)
        if not least <= size <= most:
            raise RequestError(f"size {name} is {size}, compiled for {least} to {most}")

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        name, threads = self._launch.kernel, int(self._launch.grid[0])
        return self._library.run(name, self._runner, tensors, self._workspace, threads)

    def _structured(self, results: list[Tensor]) -> Any:
        kinds = {output.source for output in self.outputs}
        tensors = iter(results)
        values = [None if o.dtype == "none" else next(tensors) for o in self.outputs]
        if kinds == {"tensor"}:
            return values[0]
        if kinds == {"key"}:
            return {o.name: value for o, value in zip(self.outputs, values, strict=True)}
        return tuple(values)


def _scratch(nbytes: int) -> Tensor:
    """Memory of its own for the kernels, aligned to 64 bytes."""
    block = torch.empty(nbytes + 64, dtype=torch.uint8)
    start = -block.data_ptr() % 64
    return block[start : start + nbytes]


def _fits(size: int, dim: int | str, sizes: dict[str, int]) -> bool:
    """Whether a size is what the plan says: a number, a free size, or a multiple of one plus some.

    A free size is known from where it is seen first.
    """
    if isinstance(dim, int):
        return size == dim
    found = _SIZE.fullmatch(dim)
    if found is None:
        raise PlanError(f"size {dim!r} of an input cannot be read", where="plan.json")
    factor, added = int(found[1] or 1), int(found[3] or 0)
    value, rest = divmod(size - added, factor)
    return rest == 0 and sizes.setdefault(found[2], value) == value


def load_plain(root: Path | str, *, verify: bool = True) -> PlainModel:
    """Load a plain artifact. Raises ArtifactError for another kind, or for an altered one."""
    artifact = open_artifact(root)
    if artifact.plan.kind != PLAIN:
        raise ArtifactError("a decoder has no plain function", hint="sitsc.load gives an engine")
    check_target(artifact, TARGET)
    with checked(artifact, verify):
        weights = read_weights(artifact)
    return PlainModel(artifact, weights)
