"""Contexts of longrope models end where the factors change; a longer one is refused by name."""

import json
from pathlib import Path

import pytest

from sitsc.core.errors import OptionError
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.lowering import model_facts
from tests.compiled_families import FAMILIES


def test_a_context_past_the_switch_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["phi3_longrope"]))
    checkpoint = open_checkpoint(tmp_path)
    assert model_facts(checkpoint, CompileOptions()).tokens.max_context == 64
    assert model_facts(checkpoint, CompileOptions(max_context=64)).tokens.max_context == 64
    with pytest.raises(OptionError, match="65 is beyond position 64, where longrope"):
        model_facts(checkpoint, CompileOptions(max_context=65))
