"""What the fuzzers call: bytes become a model that is opened, checked and read in full.

Only a clean one-line SitscError may come out. While a target runs, an audit hook refuses every
file that is opened outside its folder, every program started, and every pickle or code object made
from data: those end the run as a finding.
"""

import contextlib
import os
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sitsc.core.errors import SitscError
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.config_knowledge import untested_family
from sitsc.frontend.encoder import is_encoder
from sitsc.frontend.lint import lint_checkpoint
from sitsc.frontend.onnx_module import OnnxModule
from sitsc.frontend.onnx_trace import Step, trace_onnx
from tests.frontend.onnx_files import small_decoder

FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class")
FILES = ("config.json", "model.safetensors.index.json", "generation_config.json") + (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
)
OWN = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2] / "sitsc"))
SEPARATOR = b"\x00\xff\x00"


class EscapeError(BaseException):
    """A reader left the model folder or started something; no `except Exception` hides it."""


class Guard:
    """Watches what the interpreter does while `root` is being read."""

    def __init__(self) -> None:
        self.root: str | None = None
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook; raises EscapeError."""
        if self.root is None:
            return
        if event in FORBIDDEN:
            raise EscapeError(f"{event} {arguments!r}")
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((self.root, *OWN)):
                raise EscapeError(f"open {path}")


_guards: list[Guard] = []


def read_all(path: Path, root: Path) -> bool:
    """Open, check and read the model; whether it was accepted. Anything but SitscError escapes."""
    if not _guards:
        untested_family("stablelm")  # imports transformers before the guard is up
        _guards.append(Guard())
    guard = _guards[0]
    guard.root = str(root.resolve())
    try:
        checkpoint = open_checkpoint(path)
        for name, info in checkpoint.tensors.items():
            assert Path(info.file).name == info.file, info.file
            checkpoint.read(name)
        report = lint_checkpoint(checkpoint, dtype="float16", read_weights=True)
        assert all("\n" not in f.what + f.hint for f in report.findings)
    except SitscError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000, len(str(error))
        return False
    finally:
        guard.root = None
    return report.ok


def safetensors(data: bytes, root: Path) -> bool:
    """A folder with this model.safetensors; an even first byte: with the header's right length."""
    if data and data[0] % 2 == 0:
        header, _, tail = data[1:].partition(SEPARATOR)
        raw = len(header).to_bytes(8, "little") + header + tail
    else:
        raw = data[1:]
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "model.safetensors").write_bytes(raw)
    return read_all(root, root)


def gguf(data: bytes, root: Path) -> bool:
    """One GGUF file."""
    path = root / "model.gguf"
    path.write_bytes(data)
    return read_all(path, root)


def folder(data: bytes, root: Path) -> bool:
    """A folder's JSON files, one after the other, beside two good shards."""
    for name, part in zip(FILES, data.split(SEPARATOR), strict=False):
        if part:
            (root / name).write_bytes(part)
    from safetensors.torch import save  # noqa: PLC0415

    (root / "a.safetensors").write_bytes(save({"a": torch.ones(2)}))
    (root / "b.safetensors").write_bytes(save({"b": torch.ones(2)}))
    return read_all(root, root)


def onnx(data: bytes, root: Path) -> bool:
    """One ONNX file and, after a separator, its external data; what opens is interpreted.

    One in sixteen is traced for a compile, which takes most of a second.
    """
    if not _guards:
        _trace_first(root)
        _guards.append(Guard())
    model, _, outside = data.partition(SEPARATOR)
    (root / "model.onnx").write_bytes(model)
    (root / "model.onnx.data").write_bytes(outside)
    guard = _guards[0]
    guard.root = str(root.resolve())
    try:
        checkpoint = open_checkpoint(root / "model.onnx")
        for name, info in checkpoint.tensors.items():
            assert Path(info.file).name == info.file, info.file
            checkpoint.read(name)
        if not is_encoder(checkpoint):
            _interpret(checkpoint, whole=zlib.crc32(data) % 16 == 0)
    except SitscError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000, len(str(error))
        return False
    finally:
        guard.root = None
    return True


def _interpret(checkpoint: Checkpoint, *, whole: bool) -> None:
    """Run the graph on the meta device; `whole`: import it. Wild shapes raise what torch raises."""
    if whole:
        trace_onnx(checkpoint, torch.float32)
        return
    ids = torch.zeros(24, dtype=torch.long, device="meta")
    with contextlib.suppress(Exception):  # trace_onnx makes one error of all of them
        Step(OnnxModule(checkpoint.program, torch.float32))(ids, ids, ids[:7])


def _trace_first(root: Path) -> None:
    """What tracing imports is imported before the guard is up."""
    (root / "model.onnx").write_bytes(small_decoder().SerializeToString())
    trace_onnx(open_checkpoint(root / "model.onnx"), torch.float32)


TARGETS: dict[str, Callable[[bytes, Path], bool]] = {
    "safetensors": safetensors,
    "gguf": gguf,
    "folder": folder,
    "onnx": onnx,
}


def run_one(kind: str, data: bytes) -> bool:
    """One input in a fresh folder; whether it was accepted."""
    with tempfile.TemporaryDirectory() as name:
        return TARGETS[kind](data, Path(name))
