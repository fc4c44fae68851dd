"""Fixtures that every test may use: golden texts, and tiny traced graphs shared by a session."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import fx, nn

GOLDEN = Path(__file__).parent / "golden"

# How long one example takes says nothing on a machine that others use too.
settings.register_profile("sitsc", deadline=None)
settings.load_profile("sitsc")

Traced = Callable[[dict[str, Any], str], fx.GraphModule]


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
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random float32 weights; read it, do not change it."""
    from sitsc.models.random_checkpoint import write_random  # noqa: PLC0415

    return write_random("tiny-llama", tmp_path_factory.mktemp("tiny") / "model", dtype="float32")


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama, compiled once a session; copy it before changing anything."""
    from sitsc.core.options import CompileOptions  # noqa: PLC0415
    from sitsc.pipeline import compile_model  # noqa: PLC0415

    out = tmp_path_factory.mktemp("compiled") / "tiny.sitsc"
    return compile_model(tiny_checkpoint, out, CompileOptions()).root
