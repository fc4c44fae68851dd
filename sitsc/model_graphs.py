"""The graphs of one checkpoint, for one plan or for several: traced once, passed once.

In: a checkpoint. Out: copies that a plan may change, of the traced graph and of the final one of
all layers. Imported late, as lowering is.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx, nn

from sitsc import lowering
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import Checkpoint


@dataclass(slots=True)
class ModelGraphs:
    """Graphs by what decides them: dtypes and the longest context, then passes and their context.

    Targets that share a tuple of passes share a graph.
    """

    checkpoint: Checkpoint
    _traced: dict[Any, fx.GraphModule] = field(default_factory=dict)
    _final: dict[Any, fx.GraphModule] = field(default_factory=dict)

    def traced(
        self, dtypes: lowering.Dtypes, options: CompileOptions, max_context: int
    ) -> fx.GraphModule:
        """The traced graph. Raises UnsupportedModelError."""
        key = self._key(dtypes, max_context)
        if key not in self._traced:
            self._traced[key] = lowering.trace_checkpoint(
                self.checkpoint, dtypes, options, max_context
            )
        return _copy(self._traced[key])

    def final(
        self,
        dtypes: lowering.Dtypes,
        options: CompileOptions,
        max_context: int,
        dump: Path | None = None,
    ) -> fx.GraphModule:
        """The graph after all passes, of all layers; `dump`: texts after every pass go there."""
        context = lowering.pass_context(dtypes, options)
        key = (self._key(dtypes, max_context), lowering.pass_tuple(options), context)
        if dump is not None or key not in self._final:
            module = self.traced(dtypes, options, max_context)
            lowering.run(module, dtypes, options, dump)
            self._final[key] = module
        return _copy(self._final[key])

    def _key(self, dtypes: lowering.Dtypes, max_context: int) -> tuple[str, int]:
        """An ONNX graph is what it is for any context."""
        return dtypes.compute, max_context if self.checkpoint.program is None else 0


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    own = fx.GraphModule(nn.Module(), copy.deepcopy(module.graph))
    own.meta = dict(module.meta)
    return own
