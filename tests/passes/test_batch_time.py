"""Step times of the simulator are those of the cost model; workloads drawn and read."""

import json
import math
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.errors import OptionError
from sitsc.core.parallel import Partition
from sitsc.core.plan import KernelRow, Regime
from sitsc.core.serving.latency import summarise
from sitsc.core.serving.scheduler import SchedulerLimits
from sitsc.core.serving.simulator import Arrival, BatchSizes, Piece, Serving, simulate
from sitsc.passes.arrivals import draw, read_requests
from sitsc.passes.batch_time import BatchTime
from sitsc.passes.op_time import Sizes
from sitsc.passes.plan_time import PlanTime
from tests.partition_records import search

PARTITIONS = (Partition(), Partition(tp=2), Partition(pp=4), Partition(tp=2, pp=2))
RESULTS = Path(__file__).parents[2] / "bench" / "results"
CASES = [("llama3-8b", partition) for partition in PARTITIONS]
CASES += [("tiny-qwen3-moe", p) for p in (Partition(), Partition(tp=2, ep=2))]


@pytest.mark.parametrize(("name", "partition"), CASES, ids=str)
def test_steps_of_one_kind_are_the_cost_model(name: str, partition: Partition) -> None:
    """A decode batch, and a chunk of a prompt as fast as the host launches it."""
    replica = search(name, 4).replica(partition)
    time = BatchTime(replica)
    for rows, context in ((1, 1), (1, 4000), (7, 300), (64, 1024)):
        stages = [t.us for t in replica.stages(Sizes(rows, rows, rows, context))]
        made = time(BatchSizes(rows, rows * context))
        assert made.stages == pytest.approx([1e-6 * us for us in stages], rel=1e-9)
        assert made.send == pytest.approx(1e-6 * replica.send_us(rows))
    for tokens, context in ((5, 0), (512, 0), (2048, 2048)):
        made = time(BatchSizes(0, 0, (Piece(tokens, context, True),)))
        whole = [
            1e-6 * replica.model.launched_us(t, t.us)
            for t in replica.stages(Sizes(tokens, 1, 1, context))
        ]
        assert made.stages == pytest.approx(whole, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4096), st.integers(1, 20))
def test_a_lone_request_takes_what_is_predicted(prompt: int, output: int) -> None:
    replica = search("llama3-8b", 1).replica(Partition())
    limits = SchedulerLimits(4, 4100, 4096, 8192)
    (request,) = simulate(
        [Arrival(0.0, prompt, output)], Serving(limits, 200, 64, num_ahead=1), BatchTime(replica)
    ).requests
    assert request.ttft == pytest.approx(1e-6 * replica.prefill_with(prompt, 4096).us, rel=1e-9)
    steps = sum(replica.decode(1, prompt + i).us for i in range(output - 1))
    assert request.e2e - request.ttft == pytest.approx(1e-6 * steps, rel=1e-6, abs=1e-12)


def test_replays_are_as_long_as_measured() -> None:
    """Requests that begin together, and lone prompts, on one H200; by the committed results."""
    detail = json.loads((RESULTS / "h200_llama3-8b.json").read_text())["detail"]
    cost = BatchTime(search("llama3-8b", 1).replica(Partition()))
    serving = Serving(SchedulerLimits(256, 8448, 8192, 16384), 20000, 64, num_ahead=1)
    errors = {}
    for point, found in detail.items():
        if point.startswith("bs"):
            context = found["context"]
            outputs = max(2, round(2 * (found["mean_context"] - context)))
            arrivals = [Arrival(0.0, context, outputs)] * found["batch"]
            replay = simulate(arrivals, serving, cost)
            made, real = min(r.tpot for r in replay.requests), found["tpot_ms"]
        elif point.startswith("ttft"):
            replay = simulate([Arrival(0.0, found["tokens"], 1)], serving, cost)
            made, real = replay.requests[0].ttft, found["median_ms"]
        else:
            continue
        errors[point] = abs(1e3 * made / real - 1)
    assert len(errors) >= 6
    assert median(errors.values()) <= 0.05 and max(errors.values()) <= 0.15, errors


def test_a_mixed_step_lies_between_its_parts() -> None:
    time = BatchTime(search("llama3-8b", 1).replica(Partition()))
    prompt = (Piece(512, 0, True),)
    alone, decode = time(BatchSizes(0, 0, prompt)), time(BatchSizes(32, 32 * 1024))
    both = time(BatchSizes(32, 32 * 1024, prompt))
    assert alone.stages[0] < both.stages[0] < alone.stages[0] + decode.stages[0]


def test_more_of_anything_takes_longer() -> None:
    time = BatchTime(search("llama3-8b", 2).replica(Partition(tp=2)))
    few, more = Piece(600, 0, True), Piece(600, 4000, True)
    steps = [(few,), (more,), (more, few), (more, few, few, few)]
    seconds = [time(BatchSizes(4, 4000, pieces)).stages[0] for pieces in steps]
    assert seconds == sorted(seconds) and len(set(seconds)) == len(seconds)


def test_rates_of_one_seed() -> None:
    """At twice the rate the same requests: TTFT is not shorter, but for what batches differ."""
    replica = search("llama3-8b", 1).replica(Partition())
    serving = Serving(SchedulerLimits(256, 2304, 2048, 8192), 14000, 64, num_ahead=1)
    cost, last = BatchTime(replica), 0.0
    for rate in (4.0, 8.0, 16.0, 32.0, 64.0):
        now = summarise(simulate(draw(150, rate, 3).arrivals, serving, cost)).ttft_ms.p50
        assert now >= last * 0.97
        last = now


def test_drawn_lengths() -> None:
    requests = draw(4000, 10.0, 1)
    assert requests == draw(4000, 10.0, 1) != draw(4000, 10.0, 2)
    prompts = [a.prompt_tokens for a in requests.arrivals]
    outputs = [a.output_tokens for a in requests.arrivals]
    assert min(prompts) >= 16 and max(prompts) == 4096 and 480 < median(prompts) < 545
    assert (min(outputs), max(outputs)) == (32, 256) and 140 < median(outputs) < 148
    assert 9.5 < requests.rate < 10.5
    twice = draw(4000, 20.0, 1).arrivals
    assert all(
        b.at == pytest.approx(a.at / 2) and b.prompt_tokens == a.prompt_tokens
        for a, b in zip(requests.arrivals, twice, strict=True)
    )
    closed = draw(10, 0.0, 1, concurrency=4)
    assert closed.summary().concurrency == 4 and math.isinf(closed.rate)
    assert requests.summary().rate == requests.rate and closed.summary().rate == 0


def test_files() -> None:
    text = json.dumps(
        [
            {"prompt": [1, 2, 3], "max_tokens": 4, "at": 2.0},
            {"prompt_tokens": 7, "max_tokens": 2, "at": 0.5},
        ]
    )
    assert read_requests(text, "f").arrivals == (Arrival(0.5, 7, 2), Arrival(2.0, 3, 4))
    assert read_requests(text, "f", count=1).arrivals == (Arrival(0.5, 7, 2),)
    assert read_requests(text, "f", concurrency=2).concurrency == 2
    sizes = '{"prompt_tokens": 9, "output_tokens": 5, "concurrency": 3}'
    made = read_requests(sizes, "f", count=4)
    assert made.concurrency == 3 and made.arrivals == (Arrival(0.0, 9, 5),) * 4
    assert read_requests(sizes, "f", rate=2.0).concurrency == 0
    rated = read_requests('{"prompt_tokens": 9, "rate": 5}', "f")
    assert 4 < rated.rate < 6 and rated.concurrency == 0


def test_workloads_that_nothing_can_be() -> None:
    for call, part in (
        (lambda: draw(0, 1.0, 0), "--requests 0"),
        (lambda: draw(1, math.inf, 0), "--rate inf"),
        (lambda: draw(1, -1.0, 0), "--rate -1"),
        (lambda: draw(1, 0.0, 0), "needs a rate"),
        (lambda: draw(1, 1.0, 0, concurrency=1), "beside --concurrency"),
        (lambda: read_requests("[]", "f.json"), "no workload"),
        (lambda: read_requests('[{"prompt_tokens": 1}]', "f.json"), "max_tokens"),
        (
            lambda: read_requests('[{"prompt_tokens": 1, "max_tokens": 1, "at": -1}]', "f.json"),
            "at -1",
        ),
        (
            lambda: read_requests('[{"prompt_tokens": 1, "max_tokens": 1}]', "f.json", rate=1.0),
            "--rate beside",
        ),
    ):
        with pytest.raises(OptionError, match=part):
            call()


def regime(kind: str, tokens: int, context: int, us: float, attention: float) -> Regime:
    sizes = {"tokens": tokens, "sequences": tokens if kind == "decode" else 1, "context": context}
    rows = (
        KernelRow("attn", "sitsc.paged_attention", "", "", 1, 0, 0, attention),
        KernelRow("mlp", "sitsc.fused_linear", "", "", 1, 0, 0, us - attention),
    )
    return Regime(f"{kind}_{tokens}", kind, sizes, (), rows, us)


def test_times_of_a_plan() -> None:
    """At its regimes what they say; between them a line; attention as long as the context."""
    regimes = [
        regime("decode", 1, 99, 20.0, 10.0),
        regime("decode", 4, 99, 56.0, 40.0),
        regime("prefill", 64, 0, 100.0, 0.0),
    ]
    time = PlanTime([regimes])
    assert time(BatchSizes(1, 99)).stages[0] == pytest.approx(20e-6)
    assert time(BatchSizes(4, 4 * 99)).stages[0] == pytest.approx(56e-6)
    assert time(BatchSizes(2, 2 * 99)).stages[0] == pytest.approx(32e-6)
    assert time(BatchSizes(1, 199)).stages[0] == pytest.approx(30e-6)
    assert time(BatchSizes(0, 0, (Piece(128, 0, True),))).stages[0] == pytest.approx(200e-6)
    mixed = time(BatchSizes(1, 99, (Piece(63, 0, True),))).stages[0]
    assert mixed == pytest.approx(110e-6)
    staged = PlanTime([regimes, regimes], lambda tokens: 1e-6 * tokens)(BatchSizes(4, 0))
    assert len(staged.stages) == 2 and staged.send == pytest.approx(4e-6)
