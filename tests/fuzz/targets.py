"""What the fuzzers call: bytes become a model that is opened, checked and read in full.

Only a clean one-line SitscError may come out. While a target runs, an audit hook refuses every
file that is opened outside its folder, every program started, and every pickle or code object made
from data: those end the run as a finding.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sitsc.core.errors import SitscError
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.config_knowledge import untested_family
from sitsc.frontend.lint import lint_checkpoint

FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class")
FILES = ("config.json", "model.safetensors.index.json", "generation_config.json") + (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
)
OWN = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2] / "sitsc"))
SEPARATOR = b"\x00\xff\x00"


class EscapeError(Exception):
    """A reader left the model folder or started something."""


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
    import torch  # noqa: PLC0415
    from safetensors.torch import save  # noqa: PLC0415

    (root / "a.safetensors").write_bytes(save({"a": torch.ones(2)}))
    (root / "b.safetensors").write_bytes(save({"b": torch.ones(2)}))
    return read_all(root, root)


TARGETS: dict[str, Callable[[bytes, Path], bool]] = {
    "safetensors": safetensors,
    "gguf": gguf,
    "folder": folder,
}


def run_one(kind: str, data: bytes) -> bool:
    """One input in a fresh folder; whether it was accepted."""
    with tempfile.TemporaryDirectory() as name:
        return TARGETS[kind](data, Path(name))
