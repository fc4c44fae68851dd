"""The plan: golden texts, the same bytes everywhere, digests, and that it is what runs."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from sitsc.core.artifact import PLAN, open_artifact, sign
from sitsc.core.errors import PlanError
from sitsc.core.options import CompileOptions
from sitsc.core.plan import SCHEMA, Plan, read_plan
from sitsc.core.sampling import SamplingOptions
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint
from sitsc.runtime.loader import load

OPTIONS = CompileOptions(dtype="float32", max_context=256, max_batch=4, prefill_chunk_tokens=64)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random("tiny-llama", tmp_path_factory.mktemp("plan") / "tiny-llama")


def make(folder: Path, options: CompileOptions) -> Plan:
    return plan_checkpoint(inspect(folder, options), options).plan


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    return make(tiny, OPTIONS)


def test_golden_text(plan, golden):
    golden("plan_tiny-llama_float32.json", plan.text())


def test_golden_text_int8(tiny, golden):
    options = replace(OPTIONS, dtype="bfloat16", weights="int8")
    golden("plan_tiny-llama_int8.json", make(tiny, options).text())


def test_the_same_bytes_in_another_process(tiny, plan):
    program = (
        "import sys; from sitsc.core.options import CompileOptions\n"
        "from sitsc.pipeline import inspect, plan_checkpoint\n"
        f"o = {OPTIONS!r}\n"
        "sys.stdout.write(plan_checkpoint(inspect(sys.argv[1], o), o).plan.text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "77", "PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
    )
    assert done.stdout == plan.text()


def test_a_plan_reads_back_as_itself(plan):
    again = read_plan(plan.text())
    assert again.text() == plan.text() and read_plan(again.text()) == again
    assert again.sha256() == plan.sha256() and again.runs() == plan.runs()


def test_predictions_do_not_change_what_runs(plan):
    faster = {k: replace(p, value=p.value / 2) for k, p in plan.predictions.items()}
    other = replace(plan, predictions=faster)
    assert other.sha256() != plan.sha256() and other.runs() == plan.runs()
    wider = replace(plan, schedule=replace(plan.schedule, max_batch=3))
    assert wider.runs() != plan.runs()


@pytest.mark.parametrize(
    ("edit", "names"),
    [
        (lambda v: v | {"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}"),
        (lambda v: v | {"surprise": 1}, "surprise"),
        (lambda v: {k: x for k, x in v.items() if k != "memory"}, "memory"),
        (lambda v: v | {"memory": v["memory"] | {"arena_bytes": "big"}}, "plan.memory.arena_bytes"),
        (lambda v: [v], "no plan"),
    ],
)
def test_a_malformed_plan_is_refused_by_name(plan, edit, names):
    value = json.loads(plan.text())
    with pytest.raises(PlanError) as caught:
        read_plan(json.dumps(edit(value)))
    assert names in str(caught.value)


def test_a_truncated_plan_is_refused(plan):
    with pytest.raises(PlanError):
        read_plan(plan.text()[: len(plan.text()) // 2])


def test_every_option_changes_the_fingerprint():
    other = {
        "target": "h100",
        "dtype": "float32",
        "weights": "int8",
        "kv_dtype": "float32",
        "residual": "bfloat16",
        "max_context": 128,
        "max_batch": 3,
        "prefill_chunk_tokens": 128,
        "kv_tokens": 4096,
        "page_tokens": 16,
        "pack": False,
        "tp": 2,
        "pp": 2,
        "ep": 2,
        "allow_unknown_keys": ("x",),
    }
    base = CompileOptions(target="h200")
    several = {"devices": 4, "slo": "ttft=100", "workload": '{"prompt_tokens": 9}'}
    assert {f.name for f in fields(CompileOptions)} == set(other | several)
    two = replace(base, devices=2)
    prints = {base.fingerprint(), two.fingerprint()}
    prints |= {replace(base, **{name: value}).fingerprint() for name, value in other.items()}
    prints |= {replace(two, **{name: value}).fingerprint() for name, value in several.items()}
    assert len(prints) == len(other) + len(several) + 2


def test_what_the_plan_says_is_what_runs(tiny_artifact, tmp_path, monkeypatch):
    """Edit the threads of a launch and the chunk of a prefill: the run changes accordingly."""
    root = tmp_path / "edited"
    shutil.copytree(tiny_artifact, root)
    plan = open_artifact(root).plan
    before = load(tiny_artifact)
    prompt = list(range(10, 60))
    wanted = before.engine.generate_batch([prompt], SamplingOptions(max_tokens=6))[0].token_ids

    def with_threads(regime):
        [group] = regime.groups
        one = tuple(replace(launch, grid=(1,)) for launch in group.launches)
        return replace(regime, groups=(replace(group, launches=one),))

    edited = replace(
        plan,
        regimes=tuple(with_threads(r) for r in plan.regimes),
        schedule=replace(plan.schedule, prefill_chunk_tokens=16),
    )
    (root / PLAN).write_text(edited.text())
    sign(root)
    session = load(root)
    steps = []
    execute = session.executor.execute
    monkeypatch.setattr(
        session.executor,
        "execute",
        lambda batch: (steps.append(batch.num_tokens), execute(batch))[1],
    )
    threads = torch.get_num_threads()
    answer = session.engine.generate_batch([prompt], SamplingOptions(max_tokens=6))[0]
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    assert steps[:4] == [16, 16, 16, 2]
    assert answer.token_ids == wanted
