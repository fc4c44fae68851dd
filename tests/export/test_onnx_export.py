"""`sitsc export --onnx` of compiled artifacts: logits, files, and what is refused in one line."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from sitsc import export_onnx
from sitsc.core.artifact import open_artifact, sign
from sitsc.core.errors import ArtifactError, ArtifactExistsError, UnsupportedModelError, VerifyError
from sitsc.core.interpret import relative_error
from sitsc.core.reference import FILE
from sitsc.export.onnx_export import packed_reader, write_onnx
from sitsc.runtime.loader import load
from sitsc.runtime.score import iterate_logits
from tests.commands.command_line import call
from tests.export.onnx_runs import Runner
from tests.test_runtime_imports import REFUSE

IDS = [(7 * i * i + 3 * i) % 250 for i in range(24)]


def test_logits_are_those_of_the_artifact(
    tiny_artifact: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "new" / "model.onnx"
    done = call(capfd, "export", tiny_artifact, "--onnx", "-o", path, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"files": {str(path): path.stat().st_size}}
    ours = torch.cat(list(iterate_logits(load(tiny_artifact).executor, IDS)))
    runner = Runner.of(path)
    assert relative_error(runner.decode(IDS, 17), ours) < 1e-5
    names = [i.name for i in runner.session.get_inputs()]
    assert names[:4] == ["input_ids", "attention_mask", "position_ids", "past_key_values.0.key"]
    assert [o.name for o in runner.session.get_outputs()][:2] == ["logits", "present.0.key"]


def test_large_weights_lie_beside_the_model(tiny_artifact: Path, tmp_path: Path):
    artifact, path = open_artifact(tiny_artifact), tmp_path / "model.onnx"
    written = write_onnx(artifact, path, None, lambda share: None, outside_bytes=1000)
    assert written == [tmp_path / "model.onnx.data", path]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    whole = write_onnx(artifact, tmp_path / "whole.onnx", None, lambda share: None)
    assert whole == [tmp_path / "whole.onnx"]
    one, two = (Runner.of(p).step([IDS]) for p in (path, whole[0]))
    assert torch.equal(one, two)


def test_weights_outside_of_the_artifact(
    tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path
):
    artifact = open_artifact(tiny_artifact)
    bare = replace(artifact, manifest=replace(artifact.manifest, packed=False, checkpoint_hint=""))
    with pytest.raises(ArtifactError, match="--weights"):
        export_onnx(bare, tmp_path / "a.onnx")
    with pytest.raises(ArtifactError, match="lie outside"):
        packed_reader(bare)
    export_onnx(bare, tmp_path / "a.onnx", tiny_checkpoint)
    export_onnx(artifact, tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    with pytest.raises(ArtifactError, match="holds its weights"):
        export_onnx(artifact, tmp_path / "c.onnx", tiny_checkpoint)


def _changed(artifact: Path, folder: Path, value: Any) -> Path:
    """A copy of an artifact with another graph, signed."""
    made = Path(shutil.copytree(artifact, folder / "art"))
    if value is None:
        (made / FILE).unlink()
    else:
        (made / FILE).write_text(json.dumps(value))
    sign(made)
    return made


def test_everything_that_has_no_form_is_named_at_once(tiny_artifact: Path, tmp_path: Path):
    value = json.loads((tiny_artifact / FILE).read_text())
    last = value["results"][0]["value"]
    names = ["aten.digamma.default", "aten.digamma.default", "aten.lgamma.default"]
    for offset, name in enumerate(names):
        value["calls"].append([name, [{"value": last + offset}], {}])
    value["results"] = [{"value": last + len(names)}]
    made = _changed(tiny_artifact, tmp_path, value)
    with pytest.raises(UnsupportedModelError) as caught:
        export_onnx(made, tmp_path / "out.onnx")
    assert "aten.digamma.default ×2, aten.lgamma.default ×1" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["art"]


def test_what_cannot_be_exported_is_told(tiny_artifact: Path, tmp_path: Path):
    with pytest.raises(ArtifactError, match="holds no graph"):
        export_onnx(_changed(tiny_artifact, tmp_path / "a", None), tmp_path / "out.onnx")
    made = Path(shutil.copytree(tiny_artifact, tmp_path / "b"))
    data = bytearray((made / "weights.bin").read_bytes())
    data[100] ^= 1
    (made / "weights.bin").write_bytes(data)
    with pytest.raises(VerifyError, match="weights"):
        export_onnx(made, tmp_path / "out.onnx")
    (tmp_path / "out.onnx.data").write_text("")
    with pytest.raises(ArtifactExistsError, match="exists already"):
        export_onnx(tiny_artifact, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_the_command_wants_a_format(tiny_artifact: Path, capfd: pytest.CaptureFixture[str]):
    done = call(capfd, "export", tiny_artifact)
    assert done.code == 2 and "--onnx" in done.err


def test_it_needs_onnx_and_no_compiler(tiny_artifact: Path, tmp_path: Path):
    """With only onnx it works; without it one line tells so.

    torch asks whether networkx is there, which the hook would answer by an error.
    """
    with_onnx = REFUSE.replace("'onnx', 'networkx', ", "")
    assert with_onnx != REFUSE
    run = "from sitsc.cli import main\nsys.exit(main(['export', sys.argv[1], '--onnx', '-o', 'm']))"
    for hook, wanted in ((with_onnx, 0), (REFUSE, 2)):
        command = [sys.executable, "-c", f"{hook}\n{run}", str(tiny_artifact)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == wanted, done.stderr
        (tmp_path / "m").unlink(missing_ok=True)
    assert "exporting needs the package onnx" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_file_says_what_made_it(tiny_artifact: Path, tmp_path: Path):
    export_onnx(tiny_artifact, tmp_path / "m.onnx")
    model = onnx.load(str(tmp_path / "m.onnx"))
    assert model.producer_name == "sitsc"
    assert {p.key: int(p.value) for p in model.metadata_props}["max_context"] > 0
