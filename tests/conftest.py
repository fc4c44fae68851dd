"""Fixtures that every test may use: golden texts, tiny traced graphs, one compiled model.

What takes long is made once a run and shared by the worker processes of `pytest -n`.
"""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from torch import fx, nn

GOLDEN = Path(__file__).parent / "golden"

# How long one example takes says nothing on a machine that others use too.
settings.register_profile("sitsc", deadline=None)
settings.load_profile("sitsc")

Shared = Callable[[str, Callable[[Path], Any]], Path]
Traced = Callable[[dict[str, Any], str], fx.GraphModule]


# Files that take longest, so that they begin first and no process is left alone with one.
FIRST = ("test_smollm2", "test_cpu_families", "test_decoder_modules", "test_several_artifacts")
LAST = ("test_demo",)  # it finds what test_smollm2 has compiled in the cache


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return -1 if name in FIRST else int(name in LAST)

    items.sort(key=place)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write golden texts instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): `text` equals tests/golden/<name>, or is written to it on demand."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden text {name}; run pytest --update-golden"
        assert text == path.read_text(), f"{name} differs; if that is wanted: --update-golden"

    return check


@pytest.fixture(scope="session")
def traced() -> Traced:
    """traced(config, dtype): a fresh copy of the traced graph; each is traced once a session."""
    from sitsc.frontend.trace import trace  # noqa: PLC0415  (seconds, only where it is used)

    known: dict[str, fx.GraphModule] = {}

    def get(config: dict[str, Any], dtype: str) -> fx.GraphModule:
        key = json.dumps([config, dtype], sort_keys=True)
        if key not in known:
            known[key] = trace(config, getattr(torch, dtype))
        return fx.GraphModule(nn.Module(), copy.deepcopy(known[key].graph))

    return get


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """shared(name, make): the folder that `make` has filled, made once by whichever worker asks.

    Several tests and processes read it: what is there must not be changed.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers of this run

    def get(name: str, make: Callable[[Path], Any]) -> Path:
        folder = root / f"shared-{name}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                partial = tmp_path_factory.mktemp(name)
                make(partial)
                partial.rename(folder)
        return folder

    return get


@pytest.fixture(scope="session")
def tiny_checkpoint(shared: Shared) -> Path:
    """A small Llama with random float32 weights; read it, do not change it."""
    from sitsc.models.random_checkpoint import write_random  # noqa: PLC0415

    def make(folder: Path) -> None:
        write_random("tiny-llama", folder / "model", dtype="float32")

    return shared("tiny", make) / "model"


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path, shared: Shared) -> Path:
    """The small Llama, compiled once a run; copy it before changing anything."""
    from sitsc.core.options import CompileOptions  # noqa: PLC0415
    from sitsc.pipeline import compile_model  # noqa: PLC0415

    def make(folder: Path) -> None:
        compile_model(tiny_checkpoint, folder / "tiny.sitsc", CompileOptions())

    return shared("compiled", make) / "tiny.sitsc"
