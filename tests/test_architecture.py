"""ARCHITECTURE.md holds: every path it names exists, and imports go the way its table says."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
TOP_LEVEL = ("passes", "codegen", "runtime", "models")
PIPELINE = ("pipeline.py", "plain_pipeline.py", "decoder_pipeline.py", "encoder_pipeline.py")
PIPELINE += (
    "lowering.py",
    "packer.py",
    "build_info.py",
    "partition_pipeline.py",
    "record_cache.py",
    "simulate_pipeline.py",
    "calibration_pipeline.py",
    "cpu_calibration.py",
    "actual_pipeline.py",
    "rank_lowering.py",
    "model_graphs.py",
    "plan_pipeline.py",
    "report_pipeline.py",
    "golden_pipeline.py",
    "golden_search.py",
    "golden_data.py",
)
COMPILE_ONLY = {"transformers", "triton", "onnx", "networkx", "gguf"}
STANDARD = sys.stdlib_module_names | {"sitsc"}
HTTP = {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}
ALLOWED_PACKAGES = {  # what lies on a serving host, and what core may build on
    "core": {"torch", "numpy", "safetensors"},
    "runtime": {"torch", "numpy", "safetensors", "tokenizers", "jinja2", "cuda"},
    "models": {"torch", "numpy", "safetensors", "tokenizers"},
}
SERVER = ROOT / "runtime" / "server"


def sources() -> list[Path]:
    """Every source file of the package, by its real place."""
    folders = [ROOT / "sitsc", *(ROOT / name for name in TOP_LEVEL)]
    return [p for folder in folders for p in sorted(folder.rglob("*.py"))]


def room(path: str) -> str:
    """The part of the project that a dotted or slashed path belongs to."""
    parts = [part for part in re.split(r"[./]", path) if part not in ("sitsc", "py", "")]
    first = parts[0] if parts else "sitsc"
    if f"{first}.py" in PIPELINE:
        return "pipeline"
    if first == "__init__":  # sitsc itself: it gives out the API
        return "api"
    return "commands" if first in ("cli", "commands") else first


def imports(path: Path) -> list[str]:
    """Full names of the modules that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            joined = [f"{module}.{alias.name}" for alias in node.names]
            found += joined if module == "sitsc" else [module]
    return found


def table() -> dict[str, set[str]]:
    """Who may import whom, from the table of ARCHITECTURE.md."""
    text = TEXT[TEXT.index("| may import") :].partition("\n\n")[0]
    lines = [line.strip("| ") for line in text.splitlines()]
    header, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {
        row[0]: {to for to, cell in zip(header[1:], row[1:], strict=True) if cell == "yes"}
        for row in rows
    }


def test_every_path_exists():
    """A path is what has a slash, but for `cpu/…`, which lies in artifacts."""
    named = [name for name in re.findall(r"`([\w./-]*/[\w./-]*)`", TEXT) if name[:4] != "cpu/"]
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists(), name


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


def test_readme_names_every_target_and_no_other():
    limits = (ROOT / "README.md").read_text().partition("## Limits today")[2]
    named = limits[limits.index("- Targets:") : limits.index("- Models:")]
    targets = {path.stem for path in (ROOT / "sitsc" / "data" / "targets").glob("*.json")}
    assert set(re.findall(r"`(?:--target )?([a-z]+[0-9]*[a-z0-9]*)`", named)) == targets


def test_imports_follow_the_table():
    allowed = table()
    for path in sources():
        name = str(path.relative_to(ROOT))
        here = room(name)
        for module in imports(path):
            if module.split(".")[0] != "sitsc":
                continue
            there = room(module)
            if there not in ("sitsc", "__version__", here):
                assert there in allowed[here], f"{name} imports {module}"


@pytest.mark.parametrize("here", ALLOWED_PACKAGES)
def test_packages_that_a_part_needs(here: str):
    for path in sources():
        name = str(path.relative_to(ROOT))
        if room(name) == here:
            packages = {module.split(".")[0] for module in imports(path)} - STANDARD
            allowed = ALLOWED_PACKAGES[here] | (HTTP if path.parent == SERVER else set())
            assert packages <= allowed, name
            assert not packages & COMPILE_ONLY


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_a_bare_import_is_refused(name: str):
    assert all(module.split(".")[0] != name for path in sources() for module in imports(path))
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"import this package as sitsc.{name}" in done.stderr
    assert (ROOT / "sitsc" / name).is_symlink()
