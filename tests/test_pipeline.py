"""The pipeline as a whole: what it costs, what it caches, and that it leaves nothing half done."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sitsc.codegen import cpu
from sitsc.core import build_cache
from sitsc.core.options import CompileOptions
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import compile_model

PLAN_8B = """
import json, sys, time
from sitsc.core.options import CompileOptions
from sitsc.pipeline import inspect, plan_checkpoint
options = CompileOptions()
plan = plan_checkpoint(inspect(sys.argv[1], options), options).plan
status = open("/proc/self/status").read()  # rusage counts what the parent held, too
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
classes = [len(c.layers) for c in plan.model.layer_classes]
found = {"seconds": time.process_time(), "peak": peak, "classes": classes}
print(json.dumps(found | {"weights": plan.memory.weights_bytes}))
"""


def test_planning_llama3_8b_reads_no_weight(tmp_path):
    folder = write_random("llama3-8b", tmp_path / "llama3-8b", headers_only=True)
    done = subprocess.run(
        [sys.executable, "-c", PLAN_8B, str(folder)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["classes"] == [31, 1]  # the last one computes only rows that need logits
    assert 16.0e9 < found["weights"] < 16.2e9
    # The limits are 2 GiB and a minute; time is the process's own, other tests run beside it.
    assert found["peak"] < 1 << 30
    assert found["seconds"] < 50


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_unchanged_second_compile_is_fast_and_gives_the_same(tmp_path, monkeypatch):
    libraries = cpu.libraries()  # the same for every model
    shutil.copytree(libraries, tmp_path / "cache" / libraries.name)
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "cache"))
    model = write_random("tiny-llama-tied", tmp_path / "model")
    options = CompileOptions(dtype="float32", max_context=128, max_batch=2)
    first = compile_model(model, tmp_path / "first", options)
    start = time.perf_counter()
    second = compile_model(model, tmp_path / "second", options)
    assert time.perf_counter() - start < 5
    assert second.manifest.files == first.manifest.files
    assert second.plan == first.plan


def test_a_damaged_cache_entry_is_made_again(tmp_path, cache):
    made = []

    def generate(folder: Path) -> None:
        made.append(1)
        (folder / "code").write_text("right")

    entry = build_cache.add("key", generate)
    assert build_cache.find("key") == entry
    (entry / "code").write_text("wrong")
    assert build_cache.find("key") is None
    assert (build_cache.add("key", generate) / "code").read_text() == "right"
    assert len(made) == 2


def test_a_failed_entry_is_not_kept(cache):
    def fail(folder: Path) -> None:
        (folder / "part").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        build_cache.add("key", fail)
    assert build_cache.find("key") is None
    assert [p for p in cache.iterdir() if not p.name.startswith(".")] == []
