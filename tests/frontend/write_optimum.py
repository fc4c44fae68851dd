"""Writes the samples of optimum's exporter in tests/frontend/optimum: python write_optimum.py.

Needs optimum-onnx 0.1 and its own transformers, in an environment apart; tests read the files.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from optimum.exporters.onnx import (  # pyright: ignore[reportMissingImports]
    onnx_export_from_model,
)
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertModel

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
PAST = "text-generation-with-past"
CASES: tuple[Any, ...] = (("llama", {}, PAST, 18), ("mistral", {"sliding_window": 7}, PAST, 18))
BERT: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
}
OUT = Path(__file__).parent / "optimum"


def write(model: torch.nn.Module, name: str, task: str, opset: int) -> None:
    """One sample: model.onnx under the name of its case."""
    folder = OUT / f"_{name}"
    onnx_export_from_model(
        model.eval(), folder, task=task, opset=opset, do_validation=False, preprocessors=[]
    )
    shutil.move(folder / "model.onnx", OUT / f"{name}.onnx")
    shutil.rmtree(folder)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for family, changes, task, opset in CASES:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SIZES | changes)
        write(AutoModelForCausalLM.from_config(config), family, task, opset)
    torch.manual_seed(0)
    small: dict[str, Any] = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24}
    write(BertModel(BertConfig(**small, **BERT)), "bert", "feature-extraction", 18)
