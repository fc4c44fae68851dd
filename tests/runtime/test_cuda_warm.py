"""The GPU is started early for artifacts of one, and nothing of it is imported for others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sitsc.runtime.cuda_warm import warm_up

IMPORTED = """
import sys
import sitsc.cli, sitsc.runtime.loader
names = ("sitsc.runtime.cuda_executor", "sitsc.runtime.cuda_loading", "sitsc.runtime.cuda_weights")
print([name for name in names if name in sys.modules])
"""


def test_the_loader_imports_nothing_for_gpus():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"target": 3}', '{"target": "cpu"}', None])
def test_nothing_is_started_for_other_artifacts(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    assert warm_up(tmp_path) is None


def test_what_goes_wrong_early_is_not_told_yet(tmp_path: Path, capfd):
    (tmp_path / "manifest.json").write_text(json.dumps({"target": "h200"}))
    thread = warm_up(tmp_path)
    assert thread is not None
    thread.join()
    assert capfd.readouterr() == ("", "")
