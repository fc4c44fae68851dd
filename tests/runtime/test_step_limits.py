"""The fastest that a step can be: arithmetic of the plan against figures worked out by hand."""

from dataclasses import replace

import pytest

from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint
from sitsc.runtime.step_limits import (
    Ceilings,
    attention_flops,
    decode_limit_ms,
    kv_bytes,
    prefill_limit_ms,
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    root = write_random("tiny-llama", tmp_path_factory.mktemp("limits") / "model")
    options = CompileOptions(target="h200", max_batch=64, kv_tokens=8192)
    return plan_checkpoint(inspect(root, options), options).plan


def linear_elements(plan: Plan) -> int:
    """Elements of the matrices that a step multiplies with."""
    shapes = [s.shape for s in plan.model.parameters if len(s.shape) == 2]
    embedding = next(s.shape for s in plan.model.parameters if "embed_tokens" in s.name)
    return sum(n * k for n, k in shapes) - embedding[0] * embedding[1]


def test_reading_bounds_small_batches(plan):
    most = Ceilings(1e9, 1e30)
    weights = 2 * linear_elements(plan)
    limit = decode_limit_ms(plan, 1, 100, most) * 1e6
    assert weights + kv_bytes(plan, 100) <= limit < 1.1 * (weights + kv_bytes(plan, 100))


def test_multiplying_bounds_large_batches(plan):
    most = Ceilings(1e30, 1e9)
    limit = decode_limit_ms(plan, 64, 100, most) * 1e6
    assert limit == pytest.approx(2 * 64 * linear_elements(plan), rel=0.05)


def test_keys_and_values_of_a_token(plan):
    group = plan.kv[0]
    token = 2 * 2 * group.kv_heads * group.head_dim * len(group.layers)
    assert kv_bytes(plan, 100) == 100 * token
    windowed = replace(plan, kv=(replace(group, window=30),))
    assert kv_bytes(windowed, 100) == 30 * token and kv_bytes(windowed, 10) == 10 * token


def test_a_prompt(plan):
    group = plan.kv[0]
    heads = plan.model.dimensions["num_attention_heads"]
    pairs = sum(range(1, 8))
    want = 4 * heads * group.head_dim * len(group.layers) * pairs
    assert attention_flops(plan, 7) == want
    windowed = replace(plan, kv=(replace(group, window=3),))
    assert attention_flops(windowed, 7) == want / pairs * (1 + 2 + 3 + 3 * 4)
    head = next(s.shape for s in plan.model.parameters if s.name == "lm_head.weight")
    layers = linear_elements(plan) - head[0] * head[1]
    flops = 2 * (7 * layers + head[0] * head[1]) + want
    assert prefill_limit_ms(plan, 7, Ceilings(1e30, 1e9)) == pytest.approx(flops / 1e6, rel=0.05)
    fast = prefill_limit_ms(plan, 7, Ceilings(1e9, 1e30))
    assert fast >= 2 * linear_elements(plan) / 1e6
