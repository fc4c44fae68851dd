"""What every checkpoint reader hands out: tensor headers, tokenizer files and `Checkpoint`.

Nothing here opens a file; a reader supplies the function that reads rows of one tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sitsc.core.errors import CheckpointError
from sitsc.frontend.safe_files import shown

Rows = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Header of one tensor: stored type (`BF16`, `Q4_1`), shape in torch's order, stored bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Tokenizer and chat template as found, and the ids and tokens a runtime needs.

    `add_bos`: plain text gets `bos_token_id` in front, and `tokenizer_json` as given here does just
    that when it encodes with special tokens. `eos_token_ids`: union of config, generation_config
    and tokenizer, sorted. `special_tokens`: what a chat template sees, e.g. {"bos_token": "<s>"}.
    """

    tokenizer_json: bytes | None = None
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    add_bos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Nested:
    """Where the decoder lies in a model that has other parts: its config, and names in the file.

    `outer` is the whole config.json, `model` stands for the prefix "model." of the decoder's own
    names and `head` for lm_head.weight. `remarks`: what was simplified, for people.
    """

    outer: Mapping[str, Any]
    model: str
    head: str
    remarks: tuple[str, ...] = ()

    def name(self, own: str) -> str:
        """The file's name of a tensor that the decoder calls `own`."""
        if own == "lm_head.weight":
            return self.head
        return self.model + own.removeprefix("model.") if own.startswith("model.") else own


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: configs, headers of all tensors, and `read` for the bytes of one.

    `config` is the decoder's own; `nested` says where it lies in a model with other parts.
    `program` is the graph of an ONNX file (`onnx_program.Program`), None for other formats.
    """

    root: Path
    format: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    tokenizer: TokenizerFiles
    reader: Callable[[str, Rows], torch.Tensor]
    program: Any = None
    nested: Nested | None = None

    @property
    def has_weights(self) -> bool:
        """False for a folder that holds a config alone: enough to plan, not to pack."""
        return bool(self.tensors)

    def read(self, name: str, rows: Rows = None) -> torch.Tensor:
        """Tensor `name`, or its rows [a, b) of dimension 0; GGUF is dequantised to float32.

        The result of an unquantised read is a private mapping of the file: writing to it changes
        nothing on disk, and its pages are given back when it is dropped.
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"the checkpoint has no tensor {shown(name)}",
                where=self.root.name,
                hint="only a config was found" if not self.has_weights else "",
            )
        check_rows(self.tensors[name], rows)
        return self.reader(name, rows)


def check_rows(info: TensorInfo, rows: Rows) -> None:
    """CheckpointError unless `rows` is None or a range [a, b) inside dimension 0."""
    if rows is None:
        return
    num_rows = info.shape[0] if info.shape else 0
    if not 0 <= rows[0] <= rows[1] <= num_rows:
        raise CheckpointError(
            f"rows [{rows[0]}, {rows[1]}) of {info.name} are outside its {num_rows} rows"
        )
