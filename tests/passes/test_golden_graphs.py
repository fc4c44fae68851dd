"""Golden texts of graphs, and that they are the same in every process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sitsc.core.printer import print_graph
from sitsc.models.presets import preset
from sitsc.passes import CPU, CPU_INT8, FUSED
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes

Golden = Callable[[str, str], None]
MATCHED = next(i for i, item in enumerate(FUSED) if item.name == "match_glu") + 1
CONFIG = preset("tiny-llama") | {"num_hidden_layers": 1}


def _text(traced: Any, passes: tuple, dtype: str, weights: str = "none") -> str:
    module = traced(CONFIG, dtype)
    run_passes(module, passes, PassContext(dtype, weights, dtype, 16, "cpu"))
    return print_graph(module.graph)


def test_the_graph_after_matching(traced: Any, golden: Golden):
    golden("tiny-llama_matched_float32.txt", _text(traced, FUSED[:MATCHED], "float32"))


def test_the_final_graph_in_float32(traced: Any, golden: Golden):
    golden("tiny-llama_cpu_float32.txt", _text(traced, CPU, "float32"))


def test_the_final_graph_in_bfloat16_with_int8_weights(traced: Any, golden: Golden):
    golden("tiny-llama_cpu_int8.txt", _text(traced, CPU_INT8, "bfloat16", "int8"))


_PRINT = """
import sys, torch
from sitsc.core.printer import print_graph
from sitsc.frontend.trace import trace
from sitsc.models.presets import preset
from sitsc.passes import CPU_INT8
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
module = trace(preset("tiny-llama") | {"num_hidden_layers": 1}, torch.bfloat16)
run_passes(module, CPU_INT8, PassContext("bfloat16", "int8", "bfloat16", 16, "cpu"))
sys.stdout.write(print_graph(module.graph))
"""


def test_another_process_prints_the_same(golden: Golden, tmp_path: Path):
    """With another hash seed and from another folder."""
    done = subprocess.run(
        [sys.executable, "-c", _PRINT],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    golden("tiny-llama_cpu_int8.txt", done.stdout)
