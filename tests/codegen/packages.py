"""Compiling a tiny graph to a package and running it as the runtime does, for tests."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from sitsc.codegen import cpu, cpu_package
from sitsc.core.weights import materialise

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one sequence in a step: new tokens, tokens in its pages already, its pages."""

    ids: list[int]
    before: int
    pages: list[int]


def step(parts: list[Part]) -> dict[str, Tensor]:
    """Step inputs of a ragged batch that wants the logits of every new token."""
    counts = [len(part.ids) for part in parts]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    width = max(len(part.pages) for part in parts)
    tables = [part.pages + [0] * (width - len(part.pages)) for part in parts]
    positions = [part.before + i for part in parts for i in range(len(part.ids))]
    return {
        "token_ids": torch.tensor([token for part in parts for token in part.ids]),
        "position_ids": torch.tensor(positions),
        "logit_rows": torch.arange(sum(counts)),
        "block_table": torch.tensor(tables, dtype=torch.int32),
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "context_lens": torch.tensor([part.before for part in parts], dtype=torch.int32),
    }


def pools(graph: fx.Graph, pages: int) -> dict[str, Tensor]:
    """Empty KV pools of a graph, full of NaN so that reading what was not written shows."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        name = node.meta.get("input", "")
        if name.startswith("kv_"):
            shape = list(node.meta["val"].shape)
            shape[node.meta["dims"].index("pages")] = pages
            found[name] = torch.full(shape, float("nan"), dtype=node.meta["val"].dtype)
    return found


def load_libraries() -> list[ctypes.CDLL]:
    """Load kernels and shims; keep the result as long as packages run."""
    assert cpu.SPEC.page_tokens == PAGE_TOKENS
    folder = cpu.libraries()
    loaded = [
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        for name in ("kernels.so", "shims.so")
    ]
    loaded[1].sitsc_shim_error.restype = ctypes.c_char_p
    return loaded


class Package:
    """A compiled graph with its weights; libraries must be loaded before."""

    def __init__(self, graph: fx.Graph, weights: Any, path: Path) -> None:
        cpu_package.compile_package(graph, path)
        self.loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)  # pyright: ignore[reportAttributeAccessIssue]
        nodes = graph.find_nodes(op="placeholder")
        specs = [node.meta["weight"] for node in nodes if "weight" in node.meta]
        by_key = {cpu_package.weight_key(spec.name): spec for spec in specs}
        self.weights = {
            key: materialise(by_key[key], weights.read) for key in self.loader.get_constant_fqns()
        }
        self.loader.load_constants(self.weights, False, True, True)
        self.inputs = [node.meta["input"] for node in nodes if "input" in node.meta]

    def run(self, values: dict[str, Tensor]) -> Tensor:
        """Logits [rows, vocabulary] of one step."""
        return self.loader.run([values[name] for name in self.inputs])[0]
