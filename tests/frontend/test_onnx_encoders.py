"""Encoders of optimum's exporter, read as modules: vectors against onnxruntime."""

from pathlib import Path

import onnxruntime
import torch

from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.encoder import is_encoder, load_encoder


def test_bert_as_optimum_exports_it():
    path = Path(__file__).parent / "optimum" / "bert.onnx"
    checkpoint = open_checkpoint(path)
    assert is_encoder(checkpoint)
    ids = torch.tensor([[2, 5, 6, 7, 3], [2, 7, 3, 0, 0]])
    mask = (ids != 0).long()
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    session = onnxruntime.InferenceSession(str(path))
    hidden = torch.from_numpy(session.run(None, {k: v.numpy() for k, v in feed.items()})[0])
    kept = mask[..., None].float()
    wanted = torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)
    with torch.no_grad():
        found = load_encoder(checkpoint, frozenset())(ids, mask)["embeddings"]
    assert (found - wanted).abs().max() < 1e-5
