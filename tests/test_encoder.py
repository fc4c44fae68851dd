"""Text encoders from safetensors and from ONNX, compiled and run, against transformers."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sitsc import export_onnx
from sitsc.core.errors import (
    ArtifactError,
    CheckpointError,
    ConfigError,
    OptionError,
    RequestError,
    UnsupportedModelError,
)
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.encoder import load_encoder, read_pooling
from sitsc.pipeline import compile_model, lint_model
from sitsc.runtime.embedding import load_embedder
from sitsc.runtime.loader import load
from tests.commands.command_line import call

TEXTS = ["one two three", "two", "three three one two one one three two two"]


class _Hidden(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def _pooled(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Mean over the mask, then length one, by transformers itself."""
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch)[0]
    mask = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with random weights and a tokenizer of words."""
    from transformers import BertConfig, BertModel, BertTokenizer  # noqa: PLC0415

    root = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    (root / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(vocab=dict(zip(words, range(8), strict=True)))
    tokenizer.save_pretrained(root)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=24,
    )
    BertModel(config).eval().save_pretrained(root)
    return root


@pytest.fixture(scope="module")
def artifact(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("encoder") / "bert.sitsc"
    return compile_model(bert, out, CompileOptions()).root


def test_vectors_are_those_of_transformers(bert: Path, artifact: Path):
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

    embedder = load_embedder(artifact)
    wanted = _pooled(
        AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert), TEXTS
    )
    alone = torch.cat([embedder.embed([text]) for text in TEXTS])
    assert (embedder.embed(TEXTS) - wanted).abs().max() < 1e-5
    assert (alone - wanted).abs().max() < 1e-5


def test_the_command_prints_the_vector(artifact: Path, capfd: pytest.CaptureFixture[str]):
    done = call(capfd, "run", artifact, "--embed", "one two", "--json")
    vector = json.loads(done.out)["embedding"]
    assert len(vector) == 32
    assert abs(sum(value * value for value in vector) - 1) < 1e-5


def test_what_an_encoder_cannot_do_is_an_error(artifact: Path, tiny_artifact: Path):
    with pytest.raises(RequestError, match="32 tokens, the model reads 24"):
        load_embedder(artifact).embed(["one " * 30])
    with pytest.raises(ArtifactError, match="--embed"):
        load(artifact)
    with pytest.raises(ArtifactError, match="no vectors"):
        load_embedder(tiny_artifact)


def test_an_exported_encoder_gives_the_same_vectors(bert: Path, tmp_path: Path):
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

    model = AutoModel.from_pretrained(bert).eval()
    ids = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
    mask = (ids != 0).long()
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Hidden(model),
            (ids, mask),
            str(tmp_path / "model.onnx"),
            input_names=["input_ids", "attention_mask"],
            output_names=["last_hidden_state"],
            dynamic_shapes={"input_ids": free, "attention_mask": free},
            dynamo=True,
            opset_version=18,
            verbose=False,
        )
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bert / name).read_bytes())
    made = compile_model(tmp_path / "model.onnx", tmp_path / "art", CompileOptions())
    assert made.plan.kind == "plain"
    wanted = _pooled(model, AutoTokenizer.from_pretrained(bert), TEXTS)
    assert (load_embedder(made.root).embed(TEXTS) - wanted).abs().max() < 1e-5


def test_an_encoder_is_exported_and_read_again(bert: Path, artifact: Path, tmp_path: Path):
    import onnxruntime  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    export_onnx(artifact, tmp_path / "model.onnx")
    batch = AutoTokenizer.from_pretrained(bert)(TEXTS, padding=True, return_tensors="np")
    feed = {name: batch[name] for name in ("input_ids", "attention_mask")}
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    found = torch.from_numpy(session.run(["embeddings"], feed)[0])
    wanted = load_embedder(artifact).embed(TEXTS)
    assert (found - wanted).abs().max() < 1e-5
    again = load_encoder(open_checkpoint(tmp_path / "model.onnx"), frozenset())
    with torch.no_grad():
        back = again(*(torch.from_numpy(value) for value in feed.values()))["embeddings"]
    assert (back - wanted).abs().max() < 1e-5


def _pooling(root: Path, path: str = "1_Pooling", **modes: bool) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": path}]
    (root / "modules.json").write_text(json.dumps(modules))
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def test_pooling_is_what_the_folder_says(tmp_path: Path):
    assert read_pooling(tmp_path, 100).mode == "mean"
    _pooling(tmp_path, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    found = read_pooling(tmp_path, 100)
    assert (found.mode, found.normalise, found.max_tokens) == ("cls", False, 64)


def test_pooling_that_is_unknown_or_outside_is_refused(tmp_path: Path):
    (tmp_path / "a").mkdir()
    _pooling(tmp_path / "a", pooling_mode_max_tokens=True)
    with pytest.raises(ConfigError, match="mean_tokens"):
        read_pooling(tmp_path / "a", 100)
    (tmp_path / "b").mkdir()
    _pooling(tmp_path / "b", path="../a/1_Pooling", pooling_mode_cls_token=True)
    with pytest.raises(CheckpointError, match="no folder of the model"):
        read_pooling(tmp_path / "b", 100)


def test_an_unknown_key_is_an_error(bert: Path, tmp_path: Path):
    for file in bert.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((bert / "config.json").read_text()) | {"new_scaling": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="new_scaling"):
        load_encoder(open_checkpoint(tmp_path), frozenset())
    assert lint_model(tmp_path, ("new_scaling",)).ok
    with pytest.raises(OptionError, match=r"'old_scaling' is no key.*unknown: new_scaling"):
        lint_model(tmp_path, ("old_scaling",))


def test_lint_tells_every_key_and_tensor(bert: Path, tmp_path: Path):
    report = lint_model(bert)
    assert report.ok and report.model_type == "bert"
    assert set(report.left_out.values()) == {"the pooler is no part of the vectors"}
    assert report.tensors["consumed"] == 37 and len(report.left_out) == 2
    uses = {key.key: key.use for key in report.keys}
    assert uses["hidden_size"] == "consumed" and uses["hidden_dropout_prob"] == "inert"
    for file in bert.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((bert / "config.json").read_text())
    wrong = {"odd": 1, "position_embedding_type": "relative_key", "is_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    found = lint_model(tmp_path).findings
    assert [f.level for f in found] == ["error"] * 3
    assert all(any(key in f.what for f in found) for key in wrong)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    unused = [f.what for f in lint_model(tmp_path).findings]
    assert len(unused) == 16 and all("has no use" in what for what in unused)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_weights_of_another_kind_are_refused(dtype: torch.dtype, bert: Path, tmp_path: Path):
    for file in bert.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("query.weight"))
    save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
    (finding,) = lint_model(tmp_path).findings
    assert finding.level == "error" and "query.weight is stored as" in finding.what
    with pytest.raises(UnsupportedModelError, match=r"query\.weight is stored as"):
        compile_model(tmp_path, tmp_path / "out", CompileOptions())


def test_minilm_has_the_vectors_of_transformers(tmp_path: Path):
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

    folder = os.environ.get("SITSC_MINILM", "")
    if not folder:
        pytest.skip("SITSC_MINILM does not name the model (make test fetches it)")
    texts = ["Hello world", "A cat sits on the mat, and looks at the moon.", "x"]
    made = compile_model(folder, tmp_path / "art", CompileOptions())
    wanted = _pooled(
        AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder), texts
    )
    assert (load_embedder(made.root).embed(texts) - wanted).abs().max() < 1e-5
