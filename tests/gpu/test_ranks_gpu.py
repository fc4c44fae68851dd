"""Several ranks on GPUs, one each where there are enough, else all on one: answers, lost ranks.

SITSC_GPU_RANKS names the folder that `python -m tests.gpu.build_ranks DIR` wrote.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sitsc.runtime.loader import Session, load
from tests.gpu.build_ranks import DEGREES
from tests.gpu.rank_worker import answers, prompts
from tests.gpu.test_engine_gpu import MOST, reference_logits

pytestmark = pytest.mark.gpu
PLACE = os.environ.get("SITSC_GPU_RANKS", "")
OVERLAP = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
_PATIENCE_S, _ENDED_S = 180, 10.0
FLIPPED = 0.1  # of the tokens; a rank that took wrong experts would be far off almost everywhere


@pytest.fixture(scope="module")
def one() -> Session:
    if not PLACE or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_RANKS")
    return load(Path(PLACE) / "one")


@pytest.fixture(scope="module")
def experts() -> Session:
    if not PLACE or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_RANKS")
    return load(Path(PLACE) / "experts")


def start(name: str, *arguments: str) -> list["subprocess.Popen[str]"]:
    """The ranks of an artifact as processes."""
    tp, pp, _ = DEGREES[name]
    count, gpus = tp * pp, torch.cuda.device_count()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    made = []
    for rank in range(count):
        place = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_PORT": port}
        place |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": str(rank if gpus >= count else 0)}
        command = [sys.executable, "-m", "tests.gpu.rank_worker", str(Path(PLACE) / name)]
        environment = os.environ | place | ({} if gpus >= count else OVERLAP)
        job = subprocess.Popen(
            [*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True
        )
        made.append(job)
    return made


@pytest.mark.parametrize("name", ["tp2", "pp2", "tp2pp2"])
def test_answers_of_ranks_are_those_of_one(one: Session, name: str, tmp_path: Path):
    """Each token is the best, or as near to it as rounding comes, by the logits of one rank."""
    assert distances(one, name, tmp_path).max() < MOST


def test_answers_of_ranks_with_experts_of_their_own(experts: Session, tmp_path: Path):
    """Rounding chooses another expert for a token here and there, which then answers otherwise."""
    far = distances(experts, "experts_tp2ep2", tmp_path)
    assert (far > MOST).float().mean() < FLIPPED


def distances(one: Session, name: str, tmp_path: Path) -> torch.Tensor:
    """How far below one rank's best logit each token of the ranks' answers is, as a share of it."""
    jobs = start(name, str(tmp_path / "answers"))
    errors = [job.communicate(timeout=_PATIENCE_S)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), errors
    made, asked = json.loads((tmp_path / "answers").read_text()), prompts(one)
    size = one.artifact.plan.tokens.vocab_size  # ids past it are padding
    found = []
    for batch, given in zip(made, asked, strict=True):
        for answer, prompt in zip(batch, given, strict=True):
            logits = reference_logits(one, [*prompt, *answer])[len(prompt) - 1 : -1, :size]
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            found.append((logits.amax(-1) - chosen) / logits.abs().amax(-1))
    return torch.cat(found)


def test_stages_answer_lone_prompts_with_the_same_tokens(one: Session, tmp_path: Path):
    """The same kernels in the same buckets: only where they run is different."""
    jobs = start("pp2", str(tmp_path / "answers"))
    for job in jobs:
        job.communicate(timeout=_PATIENCE_S)
    made = json.loads((tmp_path / "answers").read_text())
    assert made[:4] == answers(one, prompts(one)[:4])


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_by_name(one: Session, lost: int, tmp_path: Path):
    jobs = start("tp2", str(tmp_path / "unwritten"), "on and on")
    try:
        time.sleep(25)
        assert all(job.poll() is None for job in jobs)
        jobs[lost].send_signal(signal.SIGKILL)
        begun = time.monotonic()
        _, error = jobs[1 - lost].communicate(timeout=2 * _ENDED_S)
        assert time.monotonic() - begun < _ENDED_S
        assert f"rank {lost}" in error
        assert jobs[1 - lost].returncode != 0
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
