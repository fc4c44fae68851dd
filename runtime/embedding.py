"""Texts to vectors with the artifact of an encoder: its tokenizer, its compiled function.

In: texts. Out: one vector a text, pooled and normalised as the model was compiled.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sitsc.core import artifact as files
from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError, RequestError
from sitsc.core.plan import PLAIN
from sitsc.runtime.plain import PlainModel, load_plain
from sitsc.runtime.tokenizer import Tokenizer

_INPUTS, _OUTPUT = ("input_ids", "attention_mask"), "embeddings"


class Embedder:
    """A loaded encoder."""

    def __init__(self, model: PlainModel, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_tokens = model.artifact.plan.model.dimensions.get("tokens_max", 0)

    def token_ids(self, text: str) -> list[int]:
        """Ids of a text with the model's marks. Raises RequestError when it is too long."""
        ids = self.tokenizer.encode(text)
        if self.max_tokens and len(ids) > self.max_tokens:
            raise RequestError(
                f"the text has {len(ids)} tokens, the model reads {self.max_tokens}",
                hint="cut it into parts",
            )
        return ids

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Vectors [texts, width] float32. Raises RequestError for a text that is too long."""
        rows = [self.token_ids(text) for text in texts]
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        return self.model(input_ids=ids, attention_mask=mask)[_OUTPUT]


def is_embedder(artifact: Artifact) -> bool:
    """Whether an artifact gives vectors for texts."""
    plan = artifact.plan
    if plan.kind != PLAIN:
        return False
    launch = plan.regimes[0].groups[0].launches[0]
    names = tuple(argument.name for argument in launch.arguments)
    return names == _INPUTS and [o.name for o in launch.outputs] == [_OUTPUT]


def load_embedder(root: Path | str, *, verify: bool = True) -> Embedder:
    """Load an encoder. Raises ArtifactError for an artifact of another kind."""
    artifact = files.open_artifact(root)
    if not is_embedder(artifact):
        raise ArtifactError(
            "the artifact gives no vectors for texts",
            where=artifact.root.name,
            hint="--embed is for encoders; leave it out",
        )
    if not artifact.has(files.TOKENIZER):
        raise ArtifactError("the artifact has no tokenizer", where=artifact.root.name)
    tokenizer = Tokenizer.from_file(artifact.file(files.TOKENIZER))
    return Embedder(load_plain(root, verify=verify), tokenizer)
