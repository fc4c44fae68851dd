"""Two ranks in processes of their own run one package over gloo and give what one rank gives."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from packages import PAGE_TOKENS, Part, pools, step

from sitsc.codegen import cpu_package
from sitsc.core.interpret import RandomTensors, relative_error, run_graph, tensor_shapes
from sitsc.core.parallel import Partition
from sitsc.core.weights import materialise
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.for_rank import stage_passes
from sitsc.passes.runner import run_passes
from sitsc.passes.shard_table import weights_of_rank
from tests.compiled_families import FAMILIES

RANKS = 2
IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(20)]
CONTEXT = PassContext("float32", "none", "float32", PAGE_TOKENS, "cpu")
PAGES = [3, 1]
STEPS = [Part(IDS[:18], 0, PAGES), Part(IDS[18:19], 18, PAGES), Part(IDS[19:], 19, PAGES)]


def test_two_processes_equal_one_rank(traced: Any, tmp_path: Path):
    """Experts by rank, shared experts and attention cut, biases added once, the table in parts."""
    config = FAMILIES["qwen2_moe"]
    whole, cut = traced(config, "float32"), traced(config, "float32")
    weights = RandomTensors(tensor_shapes(whole.graph))
    run_passes(whole, CPU, CONTEXT)
    run_passes(cut, stage_passes(CPU, Partition(tp=RANKS, ep=RANKS), 0, (0, 2)), CONTEXT)
    _write(cut.graph, weights, tmp_path)
    _run(tmp_path)
    found = [torch.load(tmp_path / f"result_{rank}.pt") for rank in range(RANKS)]
    assert torch.equal(found[0], found[1])
    kv = pools(whole.graph, 5)
    wanted = [run_graph(whole.graph, weights, kv | step([part])) for part in STEPS]
    assert relative_error(found[0], torch.cat(wanted)) < 1e-5


def _write(graph: Any, weights: RandomTensors, folder: Path) -> None:
    """The package, and for each rank its weights as the package wants them."""
    cpu_package.compile_package(graph, folder / "step.pt2")
    inputs = [n.meta["input"] for n in graph.find_nodes(op="placeholder") if "input" in n.meta]
    for rank in range(RANKS):
        specs = weights_of_rank(graph, rank)
        made = {cpu_package.weight_key(s.name): materialise(s, weights.read) for s in specs}
        given = {"weights": made, "inputs": inputs, "pools": pools(graph, 5)}
        given["steps"] = [step([part]) for part in STEPS]
        torch.save(given, folder / f"rank_{rank}.pt")


def _run(folder: Path) -> None:
    """All ranks, each a process; a failure of one shows what it wrote."""
    script = Path(__file__).with_name("rank_worker.py")
    command = [sys.executable, str(script), str(folder)]
    jobs = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(RANKS)
    ]
    texts = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * RANKS, "\n".join(texts)
