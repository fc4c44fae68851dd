"""`sitsc simulate`: text and JSON of a seed, cuts by length against fixed ones, every refusal."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sitsc.commands.simulate_view import show
from sitsc.core.errors import CapacityError, OptionError, PartitionError, PlanError
from sitsc.core.parallel import Partition
from sitsc.core.plan import PrefillCut, Rank, Stage, read_plan
from sitsc.core.plan_file import write_text
from sitsc.core.serving.latency import summarise
from sitsc.core.serving.limits import chunks_of
from sitsc.core.serving.scheduler import SchedulerLimits
from sitsc.core.serving.simulator import (
    Arrival,
    BatchSizes,
    Serving,
    StepCost,
    replay_prompts,
    simulate,
)
from sitsc.partition_pipeline import Asked, Candidate
from sitsc.passes.batch_time import BatchTime
from sitsc.passes.partition_report import parallel_of
from sitsc.passes.prefill_cuts import cut_for, prefill_cuts
from sitsc.passes.replica_time import CHUNKS
from sitsc.passes.workloads import Slo, Workload
from sitsc.simulate_pipeline import (
    Degrees,
    Report,
    Requests,
    Sizes,
    compare,
    draw,
    of_model,
    of_plan,
    pieces,
    report_value,
)
from tests.commands.command_line import call
from tests.partition_records import record, search

GOLDEN_PLAN = Path(__file__).parents[1] / "golden" / "plan_tiny-llama_float32.json"


def replay(devices: int, degrees: Degrees, requests: Requests, sizes: Sizes | None = None):
    asked = Asked(devices)
    return of_model(record("llama3-8b"), "h200", asked, degrees, sizes or Sizes(), requests)


def steady(sizes: BatchSizes) -> StepCost:
    """Two stages of round numbers: nothing of the cost model, so that the text stays as it is."""
    seconds = 0.002 + 2e-5 * sizes.tokens + 1e-8 * sizes.decode_context
    return StepCost((seconds, seconds / 2), (seconds / 8, 0.0), 2e-5)


def test_text_of_a_seed(golden, capsys) -> None:
    requests = draw(60, 30.0, 5)
    serving = Serving(SchedulerLimits(16, 528, 512, 8192), 900, 16, replicas=2)
    cuts = (PrefillCut(1, 600, "whole", 0, 1.0), PrefillCut(601, 8192, "pipelined", 1024, 2.0))
    report = Report(
        model="Steady",
        target="h200",
        partition=Partition(tp=1, pp=2, dp=2),
        times_from="round numbers",
        rate=requests.rate,
        concurrency=0,
        serving=serving,
        summary=summarise(simulate(requests.arrivals, serving, steady)),
        fixed_chunk=512,
        regimes=compare(requests, cuts, serving, steady),
    )
    show(report)
    golden("simulate.txt", capsys.readouterr().out)
    value = json.loads(json.dumps(report_value(report), allow_nan=False))
    assert value["summary"]["requests"] == 60 and value["partition"]["dp"] == 2
    assert [r["name"] for r in value["regimes"]] == ["short", "middle", "long"]


@pytest.mark.parametrize(
    "partition", [Partition(), Partition(pp=4), Partition(pp=8), Partition(tp=2, pp=2)], ids=str
)
def test_cuts_by_length_are_not_worse_than_any_fixed_chunk(partition: Partition) -> None:
    """On a mixed workload with a few very long prompts, the mean TTFT of prompts."""
    replica = search("llama3-8b", 8).replica(partition)
    cost = BatchTime(replica)
    some = draw(120, 4.0, 2).arrivals
    mixed = [
        replace(a, prompt_tokens=a.prompt_tokens * (16 if i % 12 == 0 else 1))
        for i, a in enumerate(some)
    ]
    cuts = prefill_cuts(replica, max(a.prompt_tokens for a in mixed))

    def mean(pieces_of) -> float:
        return math.fsum(replay_prompts(mixed, pieces_of, cost)) / len(mixed)

    planned = mean(lambda n: pieces(n, cut_for(cuts, n).chunk_tokens))
    fixed = [mean(lambda n, c=chunk: pieces(n, c)) for chunk in CHUNKS]
    assert planned <= 1.01 * min(fixed), (planned, fixed)
    if partition.pp > 1:
        assert planned < 0.8 * max(fixed)


@pytest.mark.parametrize("degrees", [(1, 1), (4, 1), (1, 2), (1, 4), (1, 8), (2, 2)], ids=str)
@pytest.mark.parametrize("tokens", [300, 2048, 8000])
def test_a_lone_prompt_takes_what_its_cut_predicts(degrees: tuple[int, int], tokens: int) -> None:
    """The replay cuts prompts by length, as the plan and the ranking do; one chunk is slower."""
    tp, pp = degrees
    made = replay(tp * pp, Degrees(tp, pp), Requests((Arrival(0.0, tokens, 16),), 1))
    simulated, fixed = made.summary.ttft_ms.p50, made.regimes[0].fixed_ms.p50
    ranked = search("llama3-8b", tp * pp).evaluate(
        Partition(tp, pp), Workload(tokens, 16, 1), Slo()
    )
    assert isinstance(ranked, Candidate)
    # The ranking puts no limit on a step: one stage takes even the longest prompt in one piece.
    apart = 0.01 if pp > 1 or tokens <= made.fixed_chunk else 0.06
    assert simulated == pytest.approx(ranked.ttft_ms, rel=apart)
    assert simulated == pytest.approx(made.regimes[0].planned_ms.p50, rel=1e-9)
    assert simulated <= 1.01 * fixed
    if pp == 4 and tokens > 300:
        assert simulated < 0.8 * fixed


def test_the_scheduler_has_the_cuts_of_the_plan() -> None:
    """Up to the step's tokens, which --chunk may make fewer."""
    found = search("llama3-8b", 4)
    chosen = found.evaluate(Partition(pp=4), Workload(), Slo())
    assert isinstance(chosen, Candidate)
    one = Requests((Arrival(0.0, 4000, 2),), 1)
    for most in (512, 2048):
        made = replay(4, Degrees(pp=4), one, Sizes(chunk_tokens=most))
        cuts = parallel_of(found, found.run(4, Workload(), Slo()), chosen, most).cuts
        assert made.serving.limits.chunks == chunks_of(cuts)
        assert made.fixed_chunk == most >= max(chunk for _, chunk in made.serving.limits.chunks)


def test_the_best_partition_or_the_one_asked_for() -> None:
    requests = draw(80, 20.0, 1)
    best = replay(2, Degrees(), requests)
    asked = replay(2, Degrees(dp=2), requests)
    assert best.partition.num_ranks == 2 and asked.partition == Partition(dp=2)
    assert {r.replicas for r in (asked.summary,)} == {2}
    assert report_value(best)["summary"]["ttft_ms"]["p50"] > 0
    too_fast = replay(1, Degrees(), draw(30, 1e5, 1))  # more than it serves: it queues
    assert too_fast.summary.queue_ms.max > 10 * too_fast.summary.queue_ms.p50 or (
        too_fast.summary.ttft_ms.p50 > 100
    )


def test_stages_with_steps_in_flight() -> None:
    """Two stages with a batch of 32 in each serve 1.7 times what one GPU does with one of them."""

    def made(devices: int, at_once: int) -> Report:
        requests = Requests(tuple(Arrival(0.0, 64, 200) for _ in range(at_once)), at_once)
        return replay(devices, Degrees(pp=devices), requests)

    one, both = made(1, 32), made(2, 64)
    assert both.serving.in_flight == 3  # one waits for its tokens while the others are computed
    stages = both.summary.stages
    assert len(stages) == 2 and min(s.busy for s in stages) > 0.85
    assert both.summary.tokens_per_s > 1.7 * one.summary.tokens_per_s
    alone = replace(both.serving.limits, micro_batches=1, tokens_ahead=False)
    waiting = replace(both.serving, limits=alone, num_ahead=0)
    cost = BatchTime(search("llama3-8b", 2).replica(Partition(pp=2)))
    requests = [Arrival(0.0, 64, 200)] * 64
    slow = summarise(simulate(requests, waiting, cost))
    assert slow.stages[0].bubble > 0.4 > 0.2 > stages[0].bubble


def test_few_pages_and_large_devices() -> None:
    requests = Requests(tuple(Arrival(0.0, 500, 300) for _ in range(40)))
    tight = replay(1, Degrees(tp=1), requests, Sizes(kv_tokens=8192)).summary
    assert tight.preemptions > 0 and tight.peak_pages <= tight.kv_pages == 128
    with pytest.raises(PartitionError, match="memory for"):
        replay(1, Degrees(tp=1), requests, Sizes(kv_tokens=1 << 30))
    with pytest.raises(CapacityError, match=r"request 0 has 500 \+ 300 tokens"):
        replay(1, Degrees(tp=1), requests, Sizes(kv_tokens=640))


def test_more_devices_than_a_node() -> None:
    """As many replicas as there are; each gets its share."""
    made = replay(64, Degrees(tp=2), draw(400, 400.0, 0))
    assert made.partition == Partition(tp=2, dp=32) and made.summary.replicas == 32
    assert made.summary.ttft_ms.p50 < 100 and made.summary.tokens_per_s > 10_000


def test_degrees() -> None:
    assert Degrees(tp=2).partition(8) == Partition(tp=2, dp=4)
    assert Degrees(tp=2, pp=3).partition(0) == Partition(tp=2, pp=3)
    with pytest.raises(OptionError, match="are 6 devices, not 8"):
        Degrees(tp=2, pp=3).partition(8)
    with pytest.raises(PartitionError, match="heads"):
        replay(5, Degrees(tp=5), draw(5, 1.0, 0))


def test_a_model(tmp_path: Path, capfd) -> None:
    model = tmp_path / "model"
    made = ("models", "random", "tiny-llama", "--headers-only", "-o", model)
    assert call(capfd, *made).code == 0
    load = tmp_path / "load.json"
    load.write_text('[{"prompt_tokens": 40, "max_tokens": 9, "at": 0.5}]')
    arguments = ("simulate", model, "--target", "cpu", "--workload", load)
    done = call(capfd, *arguments, "--dp", 2)
    assert done.code == 0 and "2 × cpu: DP 2" in done.out and "end to end" in done.out


def test_a_plan(capfd) -> None:
    arguments = ("simulate", GOLDEN_PLAN, "--concurrency", 3, "--requests", 12)
    call(capfd, *arguments).refused(
        2, "tokens, the context holds 256", "--prompt, --output or --workload", "--max-context"
    )
    for more in (("--tp", 2), ("--link", "pcie"), ("--nodes", 2), ("--target", "h200")):
        call(capfd, *arguments, *more).refused(2, "the plan of an artifact says its target")


def test_a_compressed_plan(tmp_path: Path, capfd) -> None:
    """The same plan, the same replay: both files of `sitsc plan make` are read."""
    packed = tmp_path / "tiny.json.xz"
    write_text(packed, GOLDEN_PLAN.read_text())
    sizes = ("--concurrency", 3, "--requests", 12, "--prompt", 100, "--output", 20, "--json")
    plain, small = (call(capfd, "simulate", place, *sizes) for place in (GOLDEN_PLAN, packed))
    assert plain.code == 0 and json.loads(plain.out) == json.loads(small.out)
    summary = json.loads(plain.out)["summary"]
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (12 * 100, 12 * 20)
    packed.write_bytes(packed.read_bytes()[:-20])
    call(capfd, "simulate", packed, *sizes).refused(2, "tiny.json.xz", "damaged or cut off")


def test_sizes_in_place_of_drawn_ones() -> None:
    """The other size and the arrivals stay as they are drawn."""
    drawn = draw(9, 2.0, 3).arrivals
    prompts = draw(9, 2.0, 3, prompt_tokens=77).arrivals
    outputs = draw(9, 2.0, 3, output_tokens=5).arrivals
    assert prompts == tuple(replace(a, prompt_tokens=77) for a in drawn)
    assert outputs == tuple(replace(a, output_tokens=5) for a in drawn)


def test_few_kv_tokens_are_named() -> None:
    with pytest.raises(CapacityError, match="or a larger --kv-tokens"):
        replay(1, Degrees(tp=1), draw(3, 1.0, 0, prompt_tokens=700), Sizes(kv_tokens=640))


def test_a_plan_of_two_stages() -> None:
    """Each stage takes its own time, and both are busy at once."""
    plan = read_plan(GOLDEN_PLAN.read_text(), "plan")
    stage = Stage((0, 1), (), (), ((),), plan.regimes, plan.packages, plan.kv, plan.memory)
    two = replace(
        plan,
        parallel=replace(plan.parallel, pp=2),
        ranks=(Rank(0, 0, 0), Rank(1, 1, 0)),
        stages=(stage, stage),
        regimes=(),
        packages=(),
        kv=(),
    )
    load = Requests(tuple(Arrival(0.0, 8, 40) for _ in range(8)), 4)
    made = of_plan(two, 1, load)
    assert made.partition == Partition(pp=2) and made.serving.in_flight == 2
    one = of_plan(plan, 1, Requests(load.arrivals, 2))
    assert len(made.summary.stages) == 2 and made.summary.stages[1].busy > 0.25
    assert made.summary.tpot_ms.p50 > 2 * one.summary.tpot_ms.p50  # both stages, and the link
    with pytest.raises(PlanError, match="no KV pages"):
        of_plan(replace(plan, kv=()), 1, load)


def test_an_artifact(tiny_artifact: Path, tmp_path: Path, capfd) -> None:
    load = tmp_path / "load.json"
    load.write_text('{"prompt_tokens": 100, "output_tokens": 20, "concurrency": 6}')
    done = call(capfd, "simulate", tiny_artifact, "--workload", load, "--requests", 30, "--json")
    value = json.loads(done.out)
    assert value["times_from"] == "the plan's predictions" and value["summary"]["requests"] == 30
    two = call(capfd, "simulate", tiny_artifact, "--workload", load, "--dp", 2, "--json")
    assert json.loads(two.out)["summary"]["replicas"] == 2


def test_refused(tmp_path: Path, capfd) -> None:
    def refused(*arguments: object, parts: tuple[str, ...]) -> None:
        call(capfd, "simulate", "tiny-llama", *arguments).refused(2, *parts)

    refused(parts=("needs a rate", "--workload"))
    refused("--rate", 0, parts=("--rate 0", "above 0"))
    refused("--rate", -3, parts=("--rate -3",))
    refused("--rate", "nan", parts=("--rate nan",))
    refused("--rate", "inf", parts=("--rate inf is outside",))
    refused("--rate", 1e-300, parts=("--rate 1e-300 is outside",))
    refused("--rate", 1, "--requests", 0, parts=("--requests 0",))
    refused("--rate", 1, "--concurrency", 2, parts=("--rate beside --concurrency",))
    refused("--rate", 1, "--prompt", -4, parts=("--prompt -4", "1 token or more"))
    refused("--rate", 1, "--output", -4, parts=("--output -4",))
    refused("--concurrency", 0, parts=("--concurrency 0",))
    refused("--rate", 1, "--devices", 1025, parts=("outside 1..1024",))
    refused("--rate", 1, "--tp", -1, parts=("--tp -1",))
    refused("--rate", 1, "--tp", 2, "--devices", 3, parts=("not 3",))
    refused("--rate", 1, "--target", "abacus", parts=("unknown target",))
    refused("--rate", 1, "--kv-tokens", 10, parts=("--kv-tokens 10", "a page has 64 tokens"))
    refused("--rate", 1, "--max-batch", 5000, parts=("at most 1024",))
    refused("--workload", tmp_path / "none.json", parts=("--workload", "JSON"))
    (tmp_path / "empty.json").write_text("[]")
    refused("--workload", tmp_path / "empty.json", parts=("no workload", "empty.json"))
    (tmp_path / "sizes.json").write_text('{"prompt_tokens": 9}')
    sizes = ("--workload", tmp_path / "sizes.json")
    refused(*sizes, "--prompt", 5, parts=("--prompt beside --workload",))
    refused(*sizes, "--output", 5, parts=("--output beside --workload",))
    (tmp_path / "bad.json").write_text('[{"prompt_tokens": 0, "max_tokens": 1}]')
    refused("--workload", tmp_path / "bad.json", parts=("prompt_tokens is 0",))
