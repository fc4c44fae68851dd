"""`sitsc golden` and `sitsc compile --golden`: measured on the CPU, files, staleness, refusals."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import fx, nn

from sitsc import golden_pipeline, lowering
from sitsc.codegen import cpu
from sitsc.commands import golden_measure, golden_probe
from sitsc.commands.golden_measure import Weights, measure, place_of
from sitsc.core.artifact import open_artifact
from sitsc.core.errors import ExecutionError, GoldenError
from sitsc.core.golden import Golden, finished, read_golden
from sitsc.core.options import CompileOptions
from sitsc.core.records import from_value, to_value
from sitsc.golden_data import data_digests
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint
from tests.commands.command_line import Result, call

LOAD = '{"prompt_tokens": 96, "output_tokens": 16, "concurrency": 4}'
TODAY = date.today()
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def traces() -> dict[str, Any]:
    return {}


@pytest.fixture(autouse=True)
def one_code(tiny_artifact: Path, traces: dict[str, Any], tmp_path_factory, monkeypatch):
    """Graph and code are the same for every batch, chunk and pool: they are not made again."""
    real = lowering.trace_checkpoint

    def traced(checkpoint: Any, dtypes: Any, options: Any, max_context: int) -> fx.GraphModule:
        key = json.dumps([checkpoint.config, dtypes.compute, max_context], sort_keys=True)
        if key not in traces:
            traces[key] = real(checkpoint, dtypes, options, max_context)
        found = fx.GraphModule(nn.Module(), copy.deepcopy(traces[key].graph))
        found.meta = dict(traces[key].meta)
        return found

    monkeypatch.setattr(lowering, "trace_checkpoint", traced)

    def copied(graph: object, folder: Path, progress: Callable[[float], None]) -> None:
        shutil.copytree(tiny_artifact / "cpu", folder / "cpu")
        progress(1.0)

    monkeypatch.setattr(cpu, "generate", copied)
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path_factory.getbasetemp() / "golden-cache"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    (folder / "load.json").write_text(LOAD)
    return folder


def make(capfd: Capture, model: object, place: Path, *more: object) -> Result:
    load = place / "load.json"
    return call(capfd, "golden", model, "--workload", load, "--slo", "ttft=5000,tpot=900", *more)


@pytest.fixture
def made(place: Path, tiny_checkpoint: Path, one_code, capfd) -> Path:
    """A measured golden configuration of the small model, made once."""
    out = place / "deep" / "tiny.toml"
    if not out.exists():
        done = make(capfd, tiny_checkpoint, place, "-o", out)
        assert done.code == 0, done
        (place / "said.txt").write_text(done.out)
    return out


@pytest.fixture
def tell(made: Path, tmp_path: Path) -> Callable[..., Path]:
    """tell(devices=2, …): the file with other values, correctly signed."""

    def write(**values: object) -> Path:
        path = tmp_path / "told.toml"
        path.write_text(finished(replace(read_golden(made.read_text()), **values)).text())
        return path

    return write


# --- choosing and measuring ---------------------------------------------------------------------


def test_the_best_three_are_measured_on_the_cpu(made: Path, place: Path):
    golden, said = read_golden(made.read_text()), (place / "said.txt").read_text()
    assert golden.status == "measured" and len(golden.candidates) == 3
    assert golden.expires - golden.made == timedelta(days=90)
    assert TODAY <= golden.made <= date.today()
    for one in golden.candidates:
        own = one.measured
        assert own is not None and own.figures.tokens_per_s > 0 and own.weights == "checkpoint"
        assert own.sequences == one.options["max_batch"] and own.context > 16
        assert own.date == str(golden.made) and {"python", "torch"} <= set(own.versions)
        assert one.name in said
    speeds = [one.figures.tokens_per_s for one in golden.candidates]
    assert golden.chosen == speeds.index(max(speeds))
    assert golden.options | golden.best.options == golden.options
    assert "chosen " in said and "measured, checkpoint weights" in said and f"{made}  new" in said
    assert golden.rejected and "measured    on " in said


def test_plans_are_those_of_the_options(made: Path, tiny_checkpoint: Path, tmp_path, capfd):
    """The file, the same options by hand, and the plan alone give the same plan."""
    golden = read_golden(made.read_text())
    by_file = ("compile", tiny_checkpoint, "--golden", made, "-o", tmp_path / "a", "--json")
    value = json.loads(call(capfd, *by_file).out)
    options: list[object] = []
    for name, item in golden.best.options.items():
        options += [f"--{name.replace('_', '-')}", item]
    by_hand = ("compile", tiny_checkpoint, *options, "-o", tmp_path / "b", "--json")
    plan = json.loads(call(capfd, *by_hand).out)["plan"]
    assert value["plan"] == plan == golden.best.plan
    assert value["golden"]["stale"] == [] == value["golden"]["overrides"]
    assert golden.compile_options() == CompileOptions(**dict(golden.best.options))  # pyright: ignore


def test_what_changes_is_told_and_a_file_can_stay(made: Path, place: Path, tmp_path, capfd):
    golden = read_golden(made.read_text())
    before = made.read_bytes()
    h200 = ("golden", "tiny-llama", "--target", "h200", "--workload", place / "load.json")
    h200 += ("--no-measure",)
    value = json.loads(call(capfd, *h200, "-o", made, "--dry-run", "--json").out)
    assert "target: cpu:1 → h200:1" in value["changes"] and value["status"].startswith("predicted")
    assert not value["written"] and made.read_bytes() == before
    out = tmp_path / "again.toml"
    out.write_text("schema = 1")
    told = call(capfd, *h200, "-o", out).out
    assert "in place of one that cannot be read" in told and "unmeasured  not asked for" in told
    first = out.read_bytes()
    assert f"{out}  as before" in call(capfd, *h200, "-o", out).out and out.read_bytes() == first
    written = read_golden(out.read_text())
    assert written.model.preset and written.model.fingerprint != golden.model.fingerprint
    assert written.data.keys() > {"tiles/h200", "calibration/h200"}


def test_without_a_gpu_it_says_so(tmp_path: Path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load = tmp_path / "load.json"
    load.write_text(LOAD)
    h200 = ("golden", "tiny-llama", "--target", "h200", "--workload", load)
    done = call(capfd, *h200, "--expires-days", 7)
    assert "(predicted, not measured; no limit)" in done.out
    assert "unmeasured  no GPU is usable on this machine" in done.out
    written = read_golden((tmp_path / "golden" / "tiny-llama.h200.toml").read_text())
    assert written.expires == written.made + timedelta(days=7)
    call(capfd, *h200, "--measure").refused(2, "--measure: no GPU is usable", "--candidates")


# --- candidates elsewhere -----------------------------------------------------------------------


def test_candidates_are_compiled_here_and_measured_there(
    place: Path, tiny_checkpoint: Path, tmp_path, capfd
):
    folder, out = tmp_path / "parts", tmp_path / "x.toml"
    done = make(capfd, tiny_checkpoint, place, "--candidates", folder, "--random-weights")
    assert done.code == 0 and "unmeasured  not yet" in done.out
    make(capfd, tiny_checkpoint, place, "--candidates", folder).refused(2, "exists")
    assert not (place_of(folder, 0) / "weights.bin").exists()
    done = call(capfd, "golden", "--measure-from", folder, "--random-weights", "-o", out)
    assert done.code == 0 and "measured, random weights" in done.out, done
    golden = read_golden(out.read_text())
    assert golden.status == "measured" and golden.best.measured is not None
    shutil.rmtree(place_of(folder, 1))
    shutil.copytree(place_of(folder, 0), place_of(folder, 1))
    from_it = ("golden", "--measure-from", folder, "-o", out)
    call(capfd, *from_it).refused(2, "candidate-2.sitsc has another plan", "--candidates again")
    call(capfd, "golden", "--measure-from", tmp_path).refused(2, "no candidates in")


def test_a_process_of_its_own_answers_in_a_file(tiny_artifact: Path, tmp_path: Path):
    """What a GPU's candidate, or rank 0 of several, does."""
    files = [tmp_path / "ask.json", tmp_path / "answer.json"]
    ask = golden_probe.Ask(str(tiny_artifact), 1, False, False, "", 40, 24)
    for told, words in ((ask, ""), (replace(ask, root=str(tmp_path)), "is not an artifact")):
        files[0].write_text(json.dumps(to_value(told)))
        assert golden_probe.main(*map(str, files)) == bool(words)
        answer = from_value(golden_probe.Answer, json.loads(files[1].read_text()), "answer")
        assert words in answer.error and (answer.tpot_ms > 0) == (answer.error == "")
    assert golden_probe._run([sys.executable, "-c", "exit('no GPU')"], 1) == "no GPU"


def test_what_fails_and_what_needs_more_gpus(made: Path, tmp_path, monkeypatch):
    """A candidate that fails is rejected; one for more GPUs keeps its predictions."""
    golden = read_golden(made.read_text())
    assert [c.measured is not None for c in golden.candidates] == [True] * 3
    first, second, third = (replace(c, measured=None) for c in golden.candidates)
    golden = replace(golden, candidates=(first, second, third))
    measured = read_golden(made.read_text()).candidates

    def fake(golden: Golden, one: object, root: Path, weights: Weights) -> object:
        if root == place_of(tmp_path, 0):
            raise ExecutionError("no step")
        return measured[1].measured

    monkeypatch.setattr(golden_measure, "_check", lambda root, one: None)
    monkeypatch.setattr(golden_measure, "_measured", fake)
    monkeypatch.setattr(
        golden_measure, "too_few", lambda g, c: "needs 2 GPUs, this machine has 1" * (c == third)
    )
    found = measure(golden, tmp_path, Weights(False), lambda phase, share: None)
    assert [c.name for c in found.candidates] == [second.name, third.name]
    assert found.rejected[0].reason == "failed when measured: no step"
    assert found.candidates[1].not_measured == "needs 2 GPUs, this machine has 1"
    assert found.status in ("measured in part", "predicted, not measured")
    with pytest.raises(GoldenError, match="failed when measured"):
        alone = replace(golden, candidates=(first,))
        measure(alone, tmp_path, Weights(False), lambda phase, share: None)


REFUSE = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gguf", "transformers", "triton", "onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
from sitsc.cli import main

code = main(["golden", "--measure-from", sys.argv[1], "-o", sys.argv[2]])
code = code or main(["golden", "check", sys.argv[2]])
sys.exit(code or 10 * main(["golden", "check", sys.argv[2], "--model", "tiny-llama"]))
"""


def test_where_only_artifacts_run(tell: Callable[..., Path], tiny_artifact: Path, tmp_path: Path):
    """Measuring and checking import nothing that opens checkpoints."""
    plan = open_artifact(tiny_artifact).manifest.plan
    golden = read_golden(tell().read_text())
    best = replace(golden.best, plan=plan, measured=None, not_measured="not yet")
    model = replace(golden.model, name="tiny-llama", preset=True)
    asked = replace(golden.asked, ttft_ms=0.0, tpot_ms=0.0)
    tell(candidates=(best,), chosen=0, model=model, asked=asked).rename(tmp_path / "golden.toml")
    shutil.copytree(tiny_artifact, place_of(tmp_path, 0))
    command = [sys.executable, "-c", REFUSE, str(tmp_path), str(tmp_path / "out.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 20, done.stderr
    assert "(measured; model and plan not compared: the package " in done.stdout
    assert "--model tiny-llama: the package " in done.stderr


# --- staleness ----------------------------------------------------------------------------------


def compiled(capfd: Capture, model: Path, file: Path, out: Path, *more: object) -> Result:
    return call(capfd, "compile", model, "--golden", file, "-o", out, *more)


def test_stale_files_warn_and_are_refused_when_asked(
    tell: Callable[..., Path], tiny_checkpoint: Path, tmp_path, capfd
):
    file = tell(expires=TODAY, data=data_digests("cpu", 1) | {"targets/cpu": "0" * 64})
    done = compiled(capfd, tiny_checkpoint, file, tmp_path / "a")
    lines = done.err.splitlines()
    assert done.code == 0 and "stale)" in done.out
    assert lines[0] == f"sitsc: warning: told.toml is stale: it expired on {TODAY}"
    assert "targets/cpu is no more what it was" in lines[1] and len(lines) == 2
    strict = compiled(capfd, tiny_checkpoint, file, tmp_path / "b", "--golden-strict")
    strict.refused(1, f"stale: it expired on {TODAY}", "[told.toml]")
    assert not (tmp_path / "b").exists()


def test_another_plan_is_named_before_or_after(
    tell: Callable[..., Path], made: Path, tiny_checkpoint: Path, tmp_path, capfd
):
    golden = read_golden(made.read_text())
    best = replace(golden.best, plan="0" * 64, runs="1" * 64)
    file = tell(candidates=(best,), chosen=0)
    done = compiled(capfd, tiny_checkpoint, file, tmp_path / "a", "--json")
    assert "the compiler makes another plan (000000000000 → " in done.err
    assert "it runs otherwise" in json.loads(done.out)["golden"]["stale"][0]
    strict = compiled(capfd, tiny_checkpoint, file, tmp_path / "b", "--golden-strict")
    strict.refused(1, "another plan", "it runs otherwise")
    fresh = compiled(capfd, tiny_checkpoint, made, tmp_path / "c", "--golden-strict")
    assert fresh.code == 0 and fresh.err == "" and "fresh until" in fresh.out


def test_another_model_and_another_target(made: Path, tiny_checkpoint: Path, tmp_path, capfd):
    """Neither compares the plan: it is another anyway."""
    other = write_random("tiny-llama", tmp_path / "other", layers=1, headers_only=True)
    strict = compiled(capfd, other, made, tmp_path / "a", "--golden-strict")
    strict.refused(1, "it is for another model, model (config fingerprint")
    assert "plan" not in strict.err
    h200 = ("--golden-strict", "--target", "h200")
    strict = compiled(capfd, tiny_checkpoint, made, tmp_path / "a", *h200)
    strict.refused(1, "for another target, cpu and not h200", "--target h200 in place of its cpu")
    (tmp_path / "config").mkdir()
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    for name in tiny_checkpoint.iterdir():
        shutil.copy(name, tmp_path / "config")
    text = json.dumps(config | {"_name_or_path": "me/fine-tuned", "use_cache": False})
    (tmp_path / "config" / "config.json").write_text(text)
    checkpoints = [inspect(p, CompileOptions()) for p in (tmp_path / "config", tiny_checkpoint)]
    assert len({golden_pipeline.fingerprint(c) for c in checkpoints}) == 1


def test_options_on_the_command_line_win(made: Path, tiny_checkpoint: Path, tmp_path, capfd):
    golden = read_golden(made.read_text())
    same = ("--max-batch", golden.best.options["max_batch"], "--target", "cpu:1", "--dtype", "auto")
    done = compiled(capfd, tiny_checkpoint, made, tmp_path / "a", *same, "--json")
    assert done.err == "" and json.loads(done.out)["plan"] == golden.best.plan
    done = compiled(capfd, tiny_checkpoint, made, tmp_path / "b", "--kv-tokens", 2048, "--json")
    value = json.loads(done.out)
    stored = golden.best.options["kv_tokens"]
    told = f"--kv-tokens 2048 in place of its {stored}"
    assert told in done.err and value["golden"]["overrides"] == [told]
    assert value["kv_tokens"] == 2048 and value["golden"]["stale"] == []
    options = replace(golden.compile_options(), kv_tokens=2048)
    plan = plan_checkpoint(inspect(tiny_checkpoint, options), options).plan
    assert value["plan"] == plan.sha256()


def test_compile_refuses(made: Path, tiny_checkpoint: Path, tmp_path, capfd):
    def refused(*more: object, parts: tuple[str, ...]) -> None:
        compiled(capfd, tiny_checkpoint, made, tmp_path / "a", *more).refused(2, *parts)

    refused("--slo", "ttft=3", parts=("--slo beside --golden",))
    refused("--target", "cpu:2", parts=("--target cpu:2", "for 1 devices"))
    refused("--target", "abacus", parts=("unknown target",))
    refused("--max-batch", 0, parts=("--max-batch 0",))
    plain = ("compile", tiny_checkpoint, "-o", tmp_path / "a")
    call(capfd, *plain, "--golden-strict").refused(2, "--golden-strict without --golden")
    call(capfd, *plain, "--golden", tmp_path / "none.toml").refused(2, "none.toml")
    call(capfd, *plain, "--golden", tmp_path).refused(2, "no golden configuration")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    call(capfd, *plain, "--golden", tmp_path / "bad.toml").refused(2, "bad.toml", "sitsc golden")
    text = made.read_text()
    (tmp_path / "bad.toml").write_text(text.replace("max_batch = ", "max_batch = 1"))
    call(capfd, *plain, "--golden", tmp_path / "bad.toml").refused(2, "it was edited", "bad.toml")
    assert not (tmp_path / "a").exists()


# --- checking -----------------------------------------------------------------------------------


def test_check(made: Path, tell: Callable[..., Path], tiny_checkpoint: Path, tmp_path, capfd):
    done = call(capfd, "golden", "check", made)
    assert done.code == 0 and "fresh: until" in done.out and "--model names it" in done.out
    done = call(capfd, "golden", "check", made, "--model", tiny_checkpoint)
    assert done.code == 0 and "--model" not in done.out
    stale = tell(expires=TODAY - timedelta(days=1))
    done = call(capfd, "golden", "check", made, stale, "--json")
    files = json.loads(done.out)["files"]
    assert done.code == 1 and [bool(item["stale"]) for item in files] == [False, True]
    call(capfd, "golden", "check").refused(2, "no golden files")
    call(capfd, "golden", "check", made, "--slo", "ttft=3").refused(2, "--slo means nothing")
    call(capfd, "golden", "check", tmp_path / "x").refused(2, "no golden configuration")


def test_golden_refuses(place: Path, tmp_path, capfd):
    def refused(*arguments: object, parts: tuple[str, ...]) -> None:
        call(capfd, "golden", *arguments).refused(2, *parts)

    refused(parts=("no model",))
    refused("tiny-llama", "tiny-qwen2", parts=("tiny-qwen2 is one too many",))
    refused("tiny-llama", "--model", "x", parts=("--model is one too many",))
    refused("tiny-llama", "--target", "abacus", parts=("unknown target",))
    refused("tiny-llama", "--target", "cpu:2", "--devices", 2, parts=("--devices 2 beside",))
    refused("tiny-llama", "--devices", 0, parts=("no number of devices",))
    refused("tiny-llama", "--slo", "soon", parts=("cannot be read",))
    refused("tiny-llama", "--workload", tmp_path / "no", parts=("--workload",))
    refused("tiny-llama", "--expires-days", 0, parts=("--expires-days 0",))
    refused("tiny-llama", "--candidates", tmp_path / "x", "-o", "y", parts=("writes no file",))
    refused("tiny-llama", "-o", tmp_path, parts=("is a folder",))
    random = ("--random-weights", "--no-measure")
    refused("tiny-llama", *random, parts=("--random-weights with --no-measure",))
    refused("x", "--measure-from", place, random[0], parts=("--random-weights beside x",))
    refused("--measure-from", place, "--slo", "ttft=3", parts=("--slo means nothing",))
    refused("tiny-llama", "--max-context", 64, parts=("--max-context 64 is less than the 2304",))
    refused("tiny-llama", parts=("the workload's longest", "512 positions", "--workload"))
    (tmp_path / "encoder").mkdir()
    encoder = {"architectures": ["BertModel"], "model_type": "bert"}
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(encoder))
    refused(tmp_path / "encoder", parts=("encoder is an encoder",))
    small = ("tiny-llama", "--workload", place / "load.json", "--no-measure", "--slo")
    refused(*small, "ttft=0.0001", parts=("no partition of 1 device keeps", "the nearest is"))
    refused(*small[:-1], "--target", "h200", "--weights", "int8", parts=("no --weights",))
