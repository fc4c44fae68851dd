"""Records of models for tests of the cost model: traced with two layers, then as deep as they are.

All layers of these presets are alike, so that the record of a deep model is that of a shallow one
with its first class repeated.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from sitsc import lowering
from sitsc.core.hardware import load_target
from sitsc.core.options import CompileOptions
from sitsc.models.presets import preset
from sitsc.passes.collectives import topology_of
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.partition import Search, machine
from sitsc.passes.record_maker import record_of

GRAPH_CONTEXT = 8192


def final_graph(config: dict[str, Any], target: str) -> Any:
    """A traced graph after the passes of a target."""
    options = CompileOptions(target=target)
    dtypes = lowering.resolve_dtypes(config, options)
    module = lowering.trace(config, dtypes.torch_dtype)
    lowering.run(module, dtypes, options, None)
    return module.graph


@cache
def record(name: str, target: str = "h200") -> ModelRecord:
    """The record of a preset in all its depth."""
    config = preset(name)
    depth = config["num_hidden_layers"]
    graph = final_graph(config | {"num_hidden_layers": 2}, target)
    shallow = record_of(graph, name, config["vocab_size"], GRAPH_CONTEXT)
    first, last = shallow.layers
    return replace(shallow, layers=(first,) * (depth - 1) + (last,))


def search(
    name: str,
    devices: int,
    nodes: int = 1,
    *,
    link: str = "nvlink",
    overlap: bool = False,
    ideal: bool = False,
) -> Search:
    """The search of a preset on H200s."""
    where = topology_of(load_target("h200"), devices, nodes, link, ideal=ideal)
    return Search(record(name), machine(load_target("h200"), where, overlap=overlap))
