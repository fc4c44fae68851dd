"""Peculiarities that only splitting over devices meets, from public bug reports, one test each.

Each is asked of `CompileOptions(tp=…)` on the CPU and of `sitsc partition`: what cannot be cut is
refused with the degrees that would do, before a weight is read; the rest gives the tokens of one
rank. Any sizes are tried in tests/passes/test_shard_sizes.py.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sitsc.core.artifact import open_artifact
from sitsc.core.errors import PartitionError
from sitsc.core.interpret import relative_error, step_inputs
from sitsc.core.lockstep import Replica, Stage
from sitsc.core.options import CompileOptions
from sitsc.core.parallel import Partition
from sitsc.core.plan import Plan
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.trace import trace
from sitsc.passes import CPU, CPU_INT8
from sitsc.passes.base import PassContext
from sitsc.passes.for_rank import stage_graphs
from sitsc.passes.shard_table import weights_of_rank
from sitsc.pipeline import compile_model, inspect, plan_checkpoint
from tests.commands.command_line import call
from tests.compiled_families import FAMILIES
from tests.frontend.test_gguf_families import wide_model, write_as
from tests.runtime.rank_job import PROMPT
from tests.runtime.test_ranks import answers_of, started

Reasons = dict[tuple[int, int, int], tuple[str, str]]
VOCABULARY = 323
ENDLESS = {"vocab_size": VOCABULARY, "eos_token_id": None}


def write(folder: Path, changes: dict[str, Any], family: str = "llama") -> Path:
    """A small checkpoint of a family in float32, as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (seconds)

    config = copy.deepcopy(FAMILIES[family]) | changes
    torch.manual_seed(0)
    parsed = AutoConfig.for_model(config.pop("model_type"), **config)
    AutoModelForCausalLM.from_config(parsed, dtype=torch.float32).save_pretrained(folder)
    return folder


def plan(model: Path, **options: Any) -> Plan:
    """The plan of a model; makes no code and reads no weight."""
    chosen = CompileOptions(**options)
    return plan_checkpoint(inspect(model, chosen), chosen).plan


def partition(capfd: pytest.CaptureFixture[str], model: Path, devices: int) -> dict[str, Any]:
    """What `sitsc partition --json` says."""
    done = call(capfd, "partition", model, "--target", "cpu", "--devices", devices, "--json")
    assert done.code == 0, done
    return json.loads(done.out)


def reasons(found: dict[str, Any]) -> Reasons:
    """Why partitions are refused, and what would do: by TP, PP and EP."""
    every = [(r["partition"], r["reason"], r["change"]) for r in found["rejected"]]
    return {(p["tp"], p["pp"], p["ep"]): (reason, change) for p, reason, change in every}


def refused(model: Path, out: Path, **options: Any) -> tuple[str, str]:
    """The reason and the hint with which compiling ends, leaving nothing."""
    with pytest.raises(PartitionError) as caught:
        compile_model(model, out, CompileOptions(pack=False, **options))
    assert not out.exists()
    return caught.value.what, caught.value.hint


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "valid"),
    [
        (28, 4, 8, "1, 2, 4, 28"),
        (40, 8, 16, "1, 2, 4, 8, 40"),
        (52, 4, 8, "1, 2, 4, 52"),
        (12, 2, 8, "1, 2, 4, 6, 12"),
    ],
)
def test_query_heads_that_do_not_divide_by_tp(
    heads: int, kv: int, tp: int, valid: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 4}
    sizes["hidden_size"] = 4 * heads
    model = write(tmp_path / "m", sizes | {"intermediate_size": 2 * heads})
    wanted = (f"{heads} query heads do not divide by TP {tp}", f"valid TP: {valid}")
    reason, hint = refused(model, tmp_path / "out", tp=tp)
    assert (reason, hint) == (wanted[0], f"{wanted[1]}; more devices by PP")
    found = partition(capfd, model, tp)
    assert reasons(found)[tp, 1, 1] == (reason, hint)
    for ranked in found["ranked"]:
        assert str(ranked["partition"]["tp"]) in valid.split(", ")
    if heads == 28:  # and so it works
        assert [stage.layers for stage in plan(model, pp=2).stages] == [(0, 1), (1, 2)]


def test_more_ranks_than_kv_heads_repeat_them_and_count_their_bytes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Two KV heads on four ranks: each has one, together they keep twice the bytes."""
    model = write(tmp_path / "m", {})
    one, (stage,) = plan(model), plan(model, tp=4).stages
    assert (one.kv[0].kv_heads, stage.kv[0].kv_heads) == (2, 1)
    assert 4 * stage.kv[0].page_bytes == 2 * one.kv[0].page_bytes
    assert stage.memory.kv_bytes * 2 == one.memory.kv_bytes
    found = {c["text"]: c["budget"] for c in partition(capfd, model, 4)["ranked"]}
    tokens = one.kv[0].page_tokens
    for name, kv in (("DP 4", one.kv), ("TP 2 × DP 2", stage.kv), ("TP 4", stage.kv)):
        assert found[name]["kv_bytes_per_token"] == sum(group.page_bytes for group in kv) / tokens
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8}
    other = write(tmp_path / "other", sizes | {"hidden_size": 96})
    reason, hint = refused(other, tmp_path / "out", tp=6)
    assert reason == "TP 6 neither divides 4 KV heads nor is a multiple of them"
    assert "valid TP: 1, 2, 4, 12" in hint


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "starcoder2", "cohere"])
def test_an_intermediate_size_that_does_not_divide_by_tp(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """With a gate and without one, after attention and beside it."""
    key = "n_inner" if family == "gpt2" else "intermediate_size"
    model = write(tmp_path / "m", {key: 90}, family)
    said = refused(model, tmp_path / "out", tp=4)
    assert said[0] == "an intermediate size of 90 does not divide by TP 4"
    assert said[1] == "valid TP: 1, 2; more devices by PP"
    assert reasons(partition(capfd, model, 4))[4, 1, 1] == said
    if family == "llama":
        assert refused(model, tmp_path / "out", tp=4, weights="int8") == said


def test_experts_whose_intermediate_size_does_not_divide_by_tp(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Whole experts may still be given out: EP 2 leaves two ranks for each."""
    model = write(tmp_path / "m", {"moe_intermediate_size": 42}, "qwen3_moe")
    said = refused(model, tmp_path / "out", tp=4)
    assert said[0] == "experts of an intermediate size of 42 do not divide by TP 4"
    assert said[1] == "valid TP: 1, 2; more devices by PP"
    found = partition(capfd, model, 4)
    assert reasons(found)[4, 1, 1] == said
    assert any(r["partition"] | {"dp": 1} == dict(tp=4, pp=1, ep=2, dp=1) for r in found["ranked"])
    assert plan(model, tp=4, ep=2).parallel.ep == 2


def answers(artifact: Path, ranks: int) -> list[list[int]]:
    """Token ids that the ranks give for three prompts, each rank in a process."""
    with started([artifact] * ranks, 1, ranks) as jobs:
        texts = [job.communicate(timeout=120) for job in jobs]
        assert [job.returncode for job in jobs] == [0] * ranks, texts
    return answers_of(texts[0][0])


def check_best(logits: Tensor, prompt: list[int], answer: list[int], width: int) -> None:
    """Every token of an answer is the best by `logits` [tokens, vocabulary] of all but the last."""
    assert logits.shape[-1] == VOCABULARY
    assert answer == logits[len(prompt) - 1 :, :width].argmax(-1).tolist()


def test_norms_over_the_full_width_and_a_vocabulary_that_does_not_divide(tmp_path: Path):
    """OLMo-2 on four ranks: tokens of transformers, though two KV heads and 323 rows are cut."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (seconds)

    folder = write(tmp_path / "m", ENDLESS, "olmo2")
    compile_model(folder, tmp_path / "a", CompileOptions(tp=4))
    artifact = open_artifact(tmp_path / "a")
    rows = [_head_rows(artifact.of_rank(rank).plan) for rank in range(4)]
    assert len(set(rows)) == 1 and sum(rows) > VOCABULARY  # padded, in shards of one size
    found = answers(tmp_path / "a", 4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, answer in zip((PROMPT, PROMPT[2:], PROMPT[:3]), found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0]
        check_best(logits, prompt, answer, artifact.plan.tokens.vocab_size)


def _head_rows(plan: Plan) -> int:
    (head,) = (spec for spec in plan.model.parameters if spec.name == "lm_head.weight")
    return head.shape[0]


def lockstep(checkpoint: Checkpoint, ids: list[int], tp: int, weights: str = "none") -> Tensor:
    """Logits of all tokens by the graphs of `tp` ranks, run in this process."""
    module = trace(checkpoint.config, torch.float32)
    context = PassContext("float32", weights, "float32", 16, "cpu")
    bounds = (0, checkpoint.config["num_hidden_layers"])
    passes = CPU_INT8 if weights == "int8" else CPU
    (part,) = stage_graphs(module, passes, Partition(tp=tp), bounds, context)
    ranks = [{s.name: s for s in weights_of_rank(part.graph, rank)} for rank in range(tp)]
    stage = Stage(part.graph, ranks, lambda name, a, b: checkpoint.read(name, (a, b)))
    return Replica((stage,)).run([[step_inputs(part.graph, ids, 16) for _ in ranks]])


def test_int8_weights_whose_blocks_do_not_divide(tmp_path: Path):
    """45 columns and 192 rows a rank are no whole blocks of the kernels; scales are by rank."""
    folder = write(tmp_path / "m", ENDLESS | {"intermediate_size": 90})
    compile_model(folder, tmp_path / "a", CompileOptions(tp=2, weights="int8"))
    width = open_artifact(tmp_path / "a").plan.tokens.vocab_size
    answer, *_ = answers(tmp_path / "a", 2)
    logits = lockstep(open_checkpoint(folder), PROMPT + answer[:-1], 2, "int8")
    check_best(logits, PROMPT, answer, width)


def test_quantisation_blocks_of_a_file_that_do_not_divide(tmp_path: Path):
    """Q4_K has blocks of 256 columns; a rank of two takes half of one, dequantised whole."""
    model, _, _ = wide_model()
    checkpoint = write_as(tmp_path / "m.gguf", model, "Q4_K")
    ids = [token % 64 for token in PROMPT]
    assert relative_error(lockstep(checkpoint, ids, 2), lockstep(checkpoint, ids, 1)) < 1e-5
    (stage,) = plan(tmp_path / "m.gguf", tp=2, weights="int8").stages
    shapes = {s.name: s.shape for s in stage.parameters[1]}
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (256, 128)
