"""Sampling on a GPU at a real vocabulary against the CPU sampler, launched without Triton.

SITSC_GPU_KERNELS names the folder that `python -m tests.gpu.sampling_cases` wrote.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sitsc.codegen.triton_source import KernelSource
from sitsc.core.kernel_meta import kernel_folder, read_kernel_meta
from sitsc.runtime import cuda_driver
from sitsc.runtime.launcher import KernelImage
from tests.gpu.sampling_cases import CASES, EOS, VOCABULARY, drawing, scores
from tests.kernel_checks import Step
from tests.sampling_checks import Case, DeviceRows, cpu_sample, survivors

pytestmark = pytest.mark.gpu
FOLDER = os.environ.get("SITSC_GPU_KERNELS", "")
Run = Callable[[Step], None]
_IMAGES: dict[str, KernelImage] = {}


@pytest.fixture(scope="module")
def run() -> Run:
    if not FOLDER or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_KERNELS")
    torch.zeros(1, device="cuda")
    return launch


def image(source: KernelSource) -> KernelImage:
    """The kernel, loaded once."""
    key = source.key()
    if key not in _IMAGES:
        device = cuda_driver.open_device(torch.cuda.current_device())
        path = Path(FOLDER) / kernel_folder(device.sm) / f"{key}.cubin"
        meta = read_kernel_meta(path.with_suffix(".json").read_text(), path.name)
        _IMAGES[key] = KernelImage.load(path.read_bytes(), meta, device)
    return _IMAGES[key]


def launch(step: Step) -> None:
    bound = image(step.source).bind(step.grid, list(step.arguments))
    bound.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def device_rows(cases: list[Case]) -> DeviceRows:
    return DeviceRows(VOCABULARY, cases, eos_ids=EOS, device="cuda")


def pdl() -> bool:
    return torch.cuda.get_device_capability()[0] >= 9


@pytest.mark.parametrize("kind", ["flat", "peaked"])
def test_candidates_are_those_of_the_cpu(run, kind) -> None:
    """Apart from candidates whose weight lies on the border within the rounding of exp."""
    cases = list(CASES.values())
    rows, values = device_rows(cases), scores(kind, len(cases))
    values[:, EOS[0]] = 30.0
    got, want = rows.sample(values, run, pdl()), cpu_sample(rows, values)
    for index, (name, case) in enumerate(CASES.items()):
        if case.options.is_greedy:
            assert got[index] == want[index], name
            continue
        ids, drawable = survivors(rows, index)
        kept = rows.kept(index).numpy()
        if case.options.min_p:
            kept = np.intersect1d(kept, ids)
        odd = np.intersect1d(np.setxor1d(kept, ids), drawable)
        exact = case.options.top_p == 1 and not case.options.min_p
        assert len(odd) <= (0 if exact else 2), f"{name}: {len(odd)} of {len(ids)} differ"
        assert got[index] in np.union1d(ids, odd), name


def test_thousands_of_seeds_follow_the_probabilities(run) -> None:
    """Chi-square over ids of one distribution, each drawn by a row of its own."""
    one = torch.full((VOCABULARY,), -torch.inf)
    one[1000:1040] = torch.linspace(0, 5, 40)
    counts = torch.zeros(VOCABULARY)
    for block in range(16):
        cases = [Case(drawing(top_k=60), seed=256 * block + i) for i in range(256)]
        found = device_rows(cases).sample(one.repeat(256, 1), run, pdl())
        counts += torch.bincount(torch.tensor(found), minlength=VOCABULARY)
    expected = one.softmax(0)[1000:1040] * 4096
    assert counts.sum() == counts[1000:1040].sum() == 4096
    assert ((counts[1000:1040] - expected) ** 2 / expected).sum() < 73  # 1 in 1000 of 39 degrees


def test_alone_or_among_63_others(run) -> None:
    names = [name for name in CASES for _ in range(5)][:64]
    cases = [Case(drawing(top_p=0.95), seed=100 + i) for i in range(64)]
    cases = [
        CASES[n] if i % 2 else case for i, (n, case) in enumerate(zip(names, cases, strict=True))
    ]
    values = scores("peaked", 64)
    together = device_rows(cases).sample(values, run, pdl())
    for _ in range(5):
        assert device_rows(cases).sample(values, run, pdl()) == together
    for index in range(0, 64, 3):
        alone = device_rows(cases[index : index + 1])
        assert alone.sample(values[index : index + 1], run, pdl()) == together[index : index + 1]


def test_thousands_of_equal_logits_are_searched(run) -> None:
    cases = [Case(drawing(top_p=0.5), seed=1), Case(drawing(top_k=3), seed=2)]
    rows = device_rows(cases)
    got = rows.sample(torch.zeros(2, VOCABULARY), run, pdl())
    assert 0 <= got[0] < VOCABULARY // 2 and 0 <= got[1] < VOCABULARY
    assert len(rows.kept(0)) == VOCABULARY // 2 and len(rows.kept(1)) == VOCABULARY


@pytest.mark.parametrize(("count", "most_us"), [(1, 40), (64, 220)])
def test_time(run, count, most_us) -> None:
    """Chains in one graph, median of replays."""
    rows = device_rows([Case(CASES["top_k, top_p"].options, seed=i) for i in range(count)])
    rows.sample(scores("peaked", count), run, pdl())
    steps = [image(s.source).bind(s.grid, list(s.arguments)) for s in rows.steps(pdl())]
    assert time_us(lambda stream: [step.launch(stream) for step in steps]) <= most_us


def time_us(submit: Callable[[int], object], repeats: int = 20) -> float:
    """Microseconds of one `submit`, of `repeats` in a graph."""
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            submit(torch.cuda.current_stream().cuda_stream)
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return sorted(times)[len(times) // 2]
