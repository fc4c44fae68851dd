"""CUDA plans of several ranks in Triton's interpreter, in lockstep, against transformers' logits.

As `test_cuda_plans` for one rank: a ragged prefill by the library, a mixed step by our kernels,
decode steps with an idle row. What ranks send each other is computed by torch.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import fx

from sitsc.codegen.interpreter import Interpreter
from sitsc.core.interpret import RandomTensors, run_graph, step_inputs, tensor_shapes
from sitsc.core.parallel import Partition
from sitsc.passes import CUDA, CUDA_WIDE
from sitsc.passes.base import Pass
from tests.cuda_families import CUDA_EXPERTS, CUDA_FAMILIES
from tests.cuda_plan_steps import PAGE, TOKENS, assert_logits, assert_near, script
from tests.cuda_rank_interpreter import run_ranks
from tests.cuda_rank_plans import apply, plan_ranks, weights_of_ranks

PROMPTS = (7, 1, 3)
TP, PP, BOTH = Partition(tp=2), Partition(pp=2), Partition(tp=2, pp=2)
EP = Partition(tp=2, ep=2)
DECODE = {"mistral_window": ("decode_4", "decode_2", "decode_1")}  # the others: of 4 alone
# One family for each feature that ranks split, an odd row between stages, both ways of cutting, and
# a stream of bfloat16; the rest by `pytest -m slow`. tests/passes/test_shard.py has every family.
FAST = {
    ("llama", TP, True),  # one table for both ends
    ("mistral_window", TP, True),
    ("qwen3", TP, True),  # norms of heads
    ("gemma3", TP, True),  # norms after, offset of the norm's weight
    ("phi3_partial", TP, True),  # fused layers
    ("olmo2", TP, True),  # norms over the full width
    ("gpt_neox", TP, True),  # parallel residual, biases
    ("cohere", TP, True),  # layer norm by hand, interleaved rope
    ("llama_odd_biased", PP, False),
    ("gpt2", BOTH, True),
    ("qwen2", TP, False),
}
FAST_EXPERTS = {("qwen2_moe", TP), ("mixtral", BOTH), ("gpt_oss", EP), ("qwen3_moe", EP)}


def _cases() -> list[Any]:
    found = []
    for family in CUDA_FAMILIES:
        for partition in (TP, PP, BOTH):
            for wide in (True, False):
                fast = (family, partition, wide) in FAST
                name = f"{family}-{partition.text()}-{'float32' if wide else 'bfloat16'}"
                marks = () if fast else pytest.mark.slow
                found.append(pytest.param(family, partition, wide, id=name, marks=marks))
    return found


def _experts() -> list[Any]:
    found = []
    for family in CUDA_EXPERTS:
        for partition in (TP, EP, BOTH):
            marks = () if (family, partition) in FAST_EXPERTS else pytest.mark.slow
            found.append(
                pytest.param(family, partition, id=f"{family}-{partition.text()}", marks=marks)
            )
    return found


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as started:
        yield started


def check(
    interpreter: Interpreter,
    config: dict[str, Any],
    graph: fx.Graph,
    partition: Partition,
    passes: tuple[Pass, ...],
    buckets: tuple[str, ...],
) -> None:
    """All ranks together give what transformers does."""
    random = RandomTensors(tensor_shapes(graph))
    plan, sources, shapes = plan_ranks(graph, passes, partition, config["vocab_size"])
    weights, steps = weights_of_ranks(plan, random.read), script(plan.of_rank(0), buckets, PROMPTS)
    found = interpreter.call(run_ranks, plan, sources, shapes, weights, steps.steps)
    assert_logits(config, random, steps, found)


@pytest.mark.parametrize(("family", "partition", "wide"), _cases())
def test_ranks_give_what_transformers_does(
    family: str, partition: Partition, wide: bool, traced: Any, interpreter: Interpreter
):
    config = CUDA_FAMILIES[family]
    graph = traced(config, "bfloat16").graph
    buckets = DECODE.get(family, ("decode_4",))
    check(interpreter, config, graph, partition, CUDA_WIDE if wide else CUDA, buckets)


def test_rows_too_wide_for_one_program(
    traced: Any, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
):
    """Several programs share their sum, and the norm follows."""
    monkeypatch.setattr("sitsc.passes.cuda_collectives._WIDEST", 8)
    config = CUDA_FAMILIES["qwen2"]
    graph = traced(config, "bfloat16").graph
    check(interpreter, config, graph, TP, CUDA_WIDE, ("decode_4",))


def test_a_padded_vocabulary(traced: Any, interpreter: Interpreter):
    """Rows of gathered logits are longer than those that are sampled."""
    config = CUDA_FAMILIES["qwen2"] | {"vocab_size": 115}
    graph = traced(config, "bfloat16").graph
    check(interpreter, config, graph, TP, CUDA_WIDE, ("decode_4", "decode_1"))


@pytest.mark.parametrize(("family", "partition"), _experts())
def test_ranks_with_experts_give_what_the_whole_graph_does(
    family: str, partition: Partition, traced: Any, interpreter: Interpreter
):
    """Not what transformers does in float32: a score rounded otherwise chooses other experts."""
    config = CUDA_EXPERTS[family]
    graph, whole = (traced(config, "bfloat16").graph for _ in range(2))
    random = RandomTensors(tensor_shapes(graph))
    apply(whole, CUDA_WIDE)
    wanted = [run_graph(whole, random, step_inputs(whole, ids, PAGE)) for ids in TOKENS]
    plan, sources, shapes = plan_ranks(graph, CUDA_WIDE, partition, config["vocab_size"])
    weights = weights_of_ranks(plan, random.read)
    steps = script(plan.of_rank(0), ("decode_4",), PROMPTS)
    found = interpreter.call(run_ranks, plan, sources, shapes, weights, steps.steps)
    assert_near(steps, found, wanted, 3e-2)


@pytest.mark.parametrize(("family", "partition"), [("qwen3_moe", EP), ("cohere", TP)])
def test_layers_that_repeat_find_the_sums_of_the_layer_before(
    family: str, partition: Partition, traced: Any, interpreter: Interpreter
):
    """Not those of the first layer: with two or three layers none repeats."""
    config = (CUDA_EXPERTS | CUDA_FAMILIES)[family] | {"num_hidden_layers": 5}
    graph, whole = (traced(config, "bfloat16").graph for _ in range(2))
    random = RandomTensors(tensor_shapes(graph))
    apply(whole, CUDA_WIDE)
    wanted = [run_graph(whole, random, step_inputs(whole, ids, PAGE)) for ids in TOKENS]
    plan, sources, shapes = plan_ranks(graph, CUDA_WIDE, partition, config["vocab_size"])
    groups = [g for r in plan.stages[0].regimes for g in r.groups]
    assert any(len(group.layers) > 1 for group in groups)
    weights = weights_of_ranks(plan, random.read)
    steps = script(plan.of_rank(0), ("decode_4",), PROMPTS)
    found = interpreter.call(run_ranks, plan, sources, shapes, weights, steps.steps)
    assert_near(steps, found, wanted, 3e-2)
