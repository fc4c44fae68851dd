"""Several ranks on this machine: the answers of one, and an end with a name when one is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sitsc.commands.plan_view import plan_lines
from sitsc.core.actual import read_actual
from sitsc.core.artifact import open_artifact
from sitsc.core.errors import ArtifactError, OptionError, PartitionError, PlanError
from sitsc.core.options import CompileOptions
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.simulator import BatchSizes, Piece
from sitsc.export.onnx_export import write_onnx
from sitsc.passes.plan_time import plan_time, prompt_seconds
from sitsc.pipeline import compile_model
from sitsc.runtime.loader import load
from sitsc.runtime.rank_processes import run_ranks
from tests.commands.artifact_edits import copy, edit_plan
from tests.runtime.rank_job import PROMPT

JOB = Path(__file__).with_name("rank_job.py")
RANKS = 4
LIMIT_S = 10.0  # from the loss of a rank to the end of all others
Jobs = list["subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def cut(tiny_checkpoint: Path, shared: Callable[..., Path]) -> Path:
    """The small Llama for TP 2 × PP 2."""

    def make(folder: Path) -> None:
        compile_model(tiny_checkpoint, folder / "cut.sitsc", CompileOptions(tp=2, pp=2))

    return shared("ranks", make) / "cut.sitsc"


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "SITSC_THREADS": "1"}
    return os.environ | place


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(artifacts: list[Path], times: int, size: int = RANKS) -> Iterator[Jobs]:
    """A rank for each artifact, without anybody who looks after them."""
    port, jobs = free_port(), []
    for rank, artifact in enumerate(artifacts):
        command = [sys.executable, str(JOB), str(artifact), str(times)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(command, env=environment(rank, size, port), **pipes))
    try:
        yield jobs
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def answers_of(line: str) -> list[list[int]]:
    return json.loads(line)


def test_a_rank_that_is_none_of_them(cut: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in environment(RANKS, RANKS, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=r"RANK 4 of 4 ranks.*0 to 3"):
        load(cut)


def test_tokens_equal_those_of_one_rank(cut: Path, tiny_artifact: Path):
    """Three sequences, two steps under way at once, through two stages of two ranks each."""
    options, engine = SamplingOptions(max_tokens=40), load(tiny_artifact).engine
    found = engine.generate_batch([PROMPT, PROMPT[2:], PROMPT[:3]], options)
    with started([cut] * RANKS, 2) as jobs:
        texts = [job.communicate(timeout=120) for job in jobs]
        assert [job.returncode for job in jobs] == [0] * RANKS, texts
    lines = texts[0][0].splitlines()
    wanted = [list(answer.token_ids) for answer in found]
    assert [answers_of(line) for line in lines] == [wanted, wanted]
    assert all(not text for text, _ in texts[1:])


def test_ranks_are_measured_together(cut: Path, tmp_path: Path):
    options = ["--nproc", "4", "--steps", "8", "--context", "16", "--prompt", "8"]
    options += ["-o", str(tmp_path / "out.json"), "--actual", str(tmp_path / "actual.json")]
    command = [sys.executable, "-m", "sitsc.cli", "bench", str(cut), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "loaded in" in done.stdout
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"].values()
    assert result["decode"][0]["median_ms"] > 0 and result["ttft_ms"]["8"] > 0
    actual = read_actual(tmp_path / "actual.json")
    assert [point.key for point in actual.points] == ["bs1_ctx16", "ttft_8"]
    assert actual.memory is None and actual.plan == open_artifact(cut).plan.sha256()


@pytest.mark.parametrize(("loss", "lost"), [(signal.SIGSTOP, 3), (signal.SIGKILL, 0)])
def test_a_lost_rank_ends_the_job_by_name(cut: Path, loss: signal.Signals, lost: int):
    with started([cut] * RANKS, 0) as jobs:
        assert jobs[0].stdout is not None
        assert jobs[0].stdout.readline()  # all are at work
        jobs[lost].send_signal(loss)
        start = time.monotonic()
        rest = [job for rank, job in enumerate(jobs) if rank != lost]
        for job in rest:
            job.wait(timeout=LIMIT_S + 5)
        assert time.monotonic() - start < LIMIT_S
        assert all(job.returncode == 1 for job in rest)
        texts = [job.stderr.read() for job in rest if job.stderr is not None]
        assert any(f"rank {lost}" in text for text in texts), texts


def test_another_plan_is_refused(cut: Path, tmp_path: Path):
    def later(plan: dict[str, Any]) -> None:
        plan["predictions"]["cold_start"]["value"] += 1.0

    other = copy(cut, tmp_path / "other.sitsc")
    edit_plan(other, later)
    with started([cut, other, cut, cut], 1) as jobs:
        texts = [job.communicate(timeout=60)[1] for job in jobs]
    assert all(job.returncode for job in jobs)
    assert all("rank 1 has another plan" in text for text in texts), texts


def test_more_ranks_than_the_artifact_has(cut: Path):
    with started([cut], 1, size=RANKS + 1) as jobs:
        text = jobs[0].communicate(timeout=60)[1]
    assert "5 ranks were started, the artifact is for 4" in text


def test_alone_it_is_refused(cut: Path):
    with pytest.raises(OptionError, match="for 4 ranks") as refused:
        load(cut)
    assert "--nproc 4" in str(refused.value)


def test_a_bad_rank_ends_all_processes(capfd: pytest.CaptureFixture[str]):
    code = "import os, sys, time; time.sleep(60 * (os.environ['RANK'] == '0')); sys.exit(3)"
    start = time.monotonic()
    assert run_ranks([sys.executable, "-c", code], 2) == 1
    assert time.monotonic() - start < LIMIT_S
    assert "rank 1 ended with code 3" in capfd.readouterr().err


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OptionError, match="cannot be used"):
            run_ranks(["true"], 2, taken.getsockname()[1])


def test_each_rank_has_its_own_weights_and_pools(cut: Path, tiny_artifact: Path):
    whole, artifact = open_artifact(tiny_artifact).plan, open_artifact(cut)
    assert [(s.layers, s.receives, s.sends) for s in artifact.plan.stages] == [
        ((0, 1), (), ("hidden_0",)),
        ((1, 2), ("hidden_0",), ()),
    ]
    ranks = [artifact.of_rank(rank) for rank in range(RANKS)]
    assert len({rank.weights for rank in ranks}) == RANKS
    for rank in ranks:
        assert set(rank.manifest.files) >= {rank.weights, rank.weights_index}
        assert len([name for name in rank.manifest.files if name.startswith("weights_")]) == 2
        assert 2 * rank.plan.kv[0].kv_heads == whole.kv[0].kv_heads
        assert rank.plan.memory.weights_bytes < 0.6 * whole.memory.weights_bytes
    with pytest.raises(PlanError, match="no rank 4"):
        artifact.of_rank(RANKS)


def test_what_a_plan_of_ranks_shows_and_what_it_cannot_give(cut: Path, tmp_path: Path):
    artifact = open_artifact(cut)
    lines = plan_lines(artifact.plan)
    assert any(line.split()[:3] == ["1", "1-1", "2-3"] for line in lines), lines
    assert next(line.split(":")[0] for line in lines if line.startswith("stage 1 ")) == (
        "stage 1 decode_1"
    )
    assert any(line.startswith("target    4 × cpu") for line in lines)
    with pytest.raises(ArtifactError, match="4 ranks"):
        write_onnx(artifact, tmp_path / "x.onnx", None, lambda share: None)


def test_predictions_of_stages_are_those_of_micro_batches_and_chunks(cut: Path):
    plan = open_artifact(cut).plan
    time, decode = plan_time(plan), {r.name: r.sizes for r in plan.stages[0].regimes}
    for bucket in (n for n in plan.schedule.decode_buckets if n > 1):
        context = decode[f"decode_{bucket}"]["context"]
        step = time(BatchSizes(bucket // 2, bucket // 2 * context))
        seconds = max(sum(step.stages), 2 * max(step.stages))
        predicted = plan.predictions[f"tpot_decode_{bucket}"].value
        assert predicted == pytest.approx(1e3 * seconds, rel=1e-4)
    assert prompt_seconds(plan, time, 8) == pytest.approx(
        sum(time(BatchSizes(0, 0, (Piece(8, 0, True),))).stages)
    )


def test_what_does_not_divide_is_refused(tiny_checkpoint: Path, tmp_path: Path):
    with pytest.raises(PartitionError, match="TP 3"):
        compile_model(tiny_checkpoint, tmp_path / "x", CompileOptions(tp=3))
    with pytest.raises(PartitionError, match="PP 3"):
        compile_model(tiny_checkpoint, tmp_path / "x", CompileOptions(pp=3))
    with pytest.raises(OptionError, match="bfloat16"):
        compile_model(tiny_checkpoint, tmp_path / "x", CompileOptions(target="h200", tp=2))
    assert not (tmp_path / "x").exists()
