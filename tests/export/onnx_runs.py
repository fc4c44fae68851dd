"""Graphs written as ONNX models without compiling them, and running models by onnxruntime."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from sitsc.core.reference import read_reference, reference_value
from sitsc.core.weights import materialise
from sitsc.export.onnx_export import model_of
from sitsc.export.onnx_graph import GraphWriter
from sitsc.export.onnx_write import write_model
from sitsc.frontend.checkpoint import Checkpoint
from sitsc.passes.planner import weights_of
from sitsc.passes.schedule import kv_groups


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a checkpoint as the interpreter of graphs reads them."""

    checkpoint: Checkpoint

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        return self.checkpoint.read(name, (start, stop))


def write_decoder(graph: fx.Graph, weights: Any, out: Path, kv_dtype: str = "float32") -> Path:
    """The model of a decoder's final graph; `weights.read` gives rows of the checkpoint."""
    model = SimpleNamespace(parameters=weights_of(graph), architecture="test", dimensions={})
    plan: Any = SimpleNamespace(
        model=model,
        kind="decoder",
        kv=kv_groups(graph, 16, kv_dtype),
        tokens=SimpleNamespace(max_context=64),
    )
    reference = read_reference(json.loads(json.dumps(reference_value(graph))))
    written = GraphWriter(reference, plan, lambda spec: materialise(spec, weights.read)).write()
    artifact: Any = SimpleNamespace(plan=plan, manifest=SimpleNamespace(built_with={}))
    promises = list(written.builder.promises.values())
    write_model(model_of(artifact, written), promises, out, lambda share: None)
    return out


@dataclass(slots=True)
class Runner:
    """A decoder in onnxruntime, with the keys and values of its last run."""

    session: Any
    past: list[np.ndarray]

    @classmethod
    def of(cls, path: Path, batch: int = 1) -> "Runner":
        """A new session with an empty past."""
        import onnxruntime  # noqa: PLC0415

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        runner = cls(session, [])
        runner.forget(batch)
        return runner

    def forget(self, batch: int = 1) -> None:
        """Begin again with `batch` sequences."""
        shapes = [i.shape for i in self.session.get_inputs() if i.name.startswith("past")]
        self.past = [np.zeros((batch, s[1], 0, s[3]), np.float32) for s in shapes]

    def step(self, ids: list[list[int]], mask: Any = None, positions: Any = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of new tokens."""
        before = self.past[0].shape[2] if self.past else 0
        batch, count = np.array(ids).shape
        whole = np.ones((batch, before + count), np.int64)
        places = np.tile(np.arange(before, before + count), (batch, 1))
        feed = {
            "input_ids": np.array(ids),
            "attention_mask": whole if mask is None else np.array(mask),
            "position_ids": places if positions is None else np.array(positions),
        }
        inputs = [i.name for i in self.session.get_inputs()]
        names = [name for name in inputs if name.startswith("past")]
        feed |= dict(zip(names, self.past, strict=True))
        logits, *self.past = self.session.run(None, {k: feed[k] for k in inputs})
        return torch.from_numpy(logits)

    def decode(self, ids: list[int], first: int) -> Tensor:
        """Logits [tokens, vocabulary] of one sequence: `first` tokens at once, then one by one."""
        self.forget()
        parts = [self.step([ids[:first]])[0]]
        parts += [self.step([[token]])[0] for token in ids[first:]]
        return torch.cat(parts)
