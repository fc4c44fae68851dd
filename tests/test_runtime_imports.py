"""An artifact runs where nothing that only compiling needs can be imported, and no compiler is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = (
    "transformers triton onnx networkx gguf fastapi uvicorn prometheus_client "
    "sitsc.passes sitsc.codegen sitsc.frontend sitsc.models sitsc.pipeline"
).split()

REFUSE = f"""
import sys

ABSENT = {ABSENT!r}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in ABSENT):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Refuse())
"""

GENERATE = """
import json
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.loader import load

session = load(sys.argv[1])
prompts = ["hello", "a longer prompt, of more tokens than one page holds"]
answers = session.engine.generate_batch(prompts, SamplingOptions(max_tokens=6))
loaded = [n for n in sys.modules if any(n == a or n.startswith(a + ".") for a in ABSENT)]
print(json.dumps([[list(a.token_ids), a.finish_reason] for a in answers] + [loaded]))
"""

COMMAND = """
from sitsc.cli import main
sys.exit(main(["run", sys.argv[1], "hello", "--max-tokens", "6", "--chat", "--json"]))
"""


def python(code: str, artifact: Path, folder: Path) -> str:
    """Run code in a process that finds no program, in a folder without our sources."""
    env = {key: value for key, value in os.environ.items() if key not in ("CXX", "SITSC_CACHE")}
    env |= {"PATH": "/nowhere", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", REFUSE + code, str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generation_needs_none_of_them(tiny_artifact: Path, tmp_path: Path):
    *answers, loaded = json.loads(python(GENERATE, tiny_artifact, tmp_path))
    assert [len(ids) for ids, _ in answers] == [6, 6]
    assert [reason for _, reason in answers] == ["length", "length"]
    assert loaded == []
    assert list(tmp_path.iterdir()) == []


def test_the_command_needs_none_of_them(tiny_artifact: Path, tmp_path: Path):
    made = json.loads(python(COMMAND, tiny_artifact, tmp_path))
    assert len(made["token_ids"]) == 6


@pytest.mark.parametrize("name", ABSENT)
def test_the_hook_refuses(name: str):
    done = subprocess.run(
        [sys.executable, "-c", f"{REFUSE}\nimport {name}"], capture_output=True, text=True
    )
    assert f"No module named '{name}'" in done.stderr
