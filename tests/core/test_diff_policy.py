"""Policies: what is outside, what was allowed until when, and files that are no policy."""

from datetime import date
from pathlib import Path

import pytest

from sitsc.core.diff.change import HIGHER, LOWER, Change, Figure, PlanDiff, Side
from sitsc.core.diff_policy import judge, read_policy, unknown_name
from sitsc.core.errors import PolicyError

SIDE = Side("plan.json", "00", "00", "Llama", "h200")
TPOT = Figure("tpot_decode_4", "TPOT", "ms", LOWER, 1.0, 1.1, 0.2)
KV = Figure("kv_tokens", "KV tokens", "tokens", HIGHER, 1000.0, 900.0)
ARENA = Figure("memory.arena", "memory", "bytes", LOWER, 100.0, 150.0)
TOTAL = Figure("memory.total", "memory", "bytes", LOWER, 1000.0, 1050.0)
TILE = Change("kernels", "tile", "mlp.down_proj", "stages 4", "stages 2")
DIFF = PlanDiff(SIDE, SIDE, (TILE,), (TPOT, KV, ARENA, TOTAL), {}, ())
FACTS = {"architecture": "LlamaForCausalLM", "num_hidden_layers": 32, "target": "h200"}
TODAY = date(2026, 11, 30)


def outside(text: str, diff: PlanDiff = DIFF, today: date = TODAY) -> tuple[str, ...]:
    return judge(read_policy(text), diff, FACTS, today).outside


def test_what_is_not_limited_is_not_judged():
    assert outside("") == ()


def test_limits_hold_each_way():
    assert outside("[limits]\ntpot = '9 %'") == ("tpot_decode_4 +10 %, limit 9 %",)
    assert outside("[limits]\ntpot = '10.1 %'") == ()
    assert outside("[limits]\nkv_tokens = '5 %'") == ("kv_tokens -10 %, limit 5 %",)
    assert outside("[limits]\nmemory = '4 %'") == ("memory.total +5 %, limit 4 %",)
    assert outside("[limits]\n'memory.arena' = '0 %'")[0].startswith("memory.arena +50 %")
    better = PlanDiff(SIDE, SIDE, (), (Figure("ttft_prefill_8", "", "ms", LOWER, 2, 1),), {}, ())
    assert outside("[limits]\nttft = '0 %'", better) == ()


def test_the_exact_name_wins():
    assert outside("[limits]\ntpot = '1 %'\ntpot_decode_4 = '20 %'") == ()
    assert outside("[limits]\ntpot = 'any'\ntpot_decode_4 = '1 %'") != ()


def test_sections_can_be_refused():
    (text,) = outside("[decisions]\nkernels = 'refuse'")
    assert text == "kernels: tile: mlp.down_proj: stages 4 → stages 2"
    assert outside("[decisions]\nkernels = 'allow'") == ()


def test_plans_that_cannot_be_compared_are_outside_unless_allowed():
    other = Change("comparison", "different models", "", "Llama", "Mixtral")
    diff = PlanDiff(SIDE, SIDE, (other,), (), {}, ())
    assert outside("", diff) == ("comparison: different models: Llama → Mixtral",)
    assert outside("[decisions]\ncomparison = 'allow'", diff) == ()


def test_models_have_limits_of_their_own():
    text = "[limits]\ntpot = 'any'\n[[models]]\nmatch = {{num_hidden_layers = {}}}\n"
    text += "limits = {{tpot = '1 %'}}"
    assert outside(text.format(32)) != () and outside(text.format(16)) == ()
    named = "[[models]]\nmatch = {target = 'h200', architecture = 'LlamaForCausalLM'}\n"
    assert outside(named + "decisions = {kernels = 'refuse'}") != ()


ALLOWED = """
[limits]
tpot = "1 %"
[decisions]
kernels = "refuse"
[[allow]]
what = "tpot"
up_to = "12 %"
reason = "the sampler was made exact"
expires = 2026-12-31
[[allow]]
what = "kernels"
where = "down_proj"
reason = "measured faster"
expires = 2026-11-30
"""


def test_what_is_allowed_is_told_with_its_reason():
    verdict = judge(read_policy(ALLOWED), DIFF, FACTS, TODAY)
    assert verdict.within and len(verdict.allowed) == 2 and not verdict.remarks
    assert "the sampler was made exact (until 2026-12-31)" in verdict.allowed[0]


def test_an_allowance_ends_after_its_day():
    verdict = judge(read_policy(ALLOWED), DIFF, FACTS, date(2026, 12, 1))
    assert [text.partition(":")[0] for text in verdict.outside] == ["kernels"]
    assert verdict.remarks == ("the allowance for kernels ended on 2026-11-30",)


def test_an_allowance_has_a_bound_a_place_and_a_model():
    for old, new in (("12 %", "9 %"), ("down_proj", "up_proj")):
        verdict = judge(read_policy(ALLOWED.replace(old, new)), DIFF, FACTS, TODAY)
        assert len(verdict.outside) == 1 and "is not needed" in verdict.remarks[0]
    memory = "[decisions]\nmemory = 'refuse'\n[[allow]]\nwhat = 'memory'\nup_to = '9 %'\n"
    moved = Change("memory", "place of kv", "", "device", "host")
    diff = PlanDiff(SIDE, SIDE, (moved,), (), {}, ())
    assert outside(memory + "reason = 'grew'\nexpires = 2027-01-01", diff) != ()
    other = ALLOWED + "match = {target = 'cpu'}"
    verdict = judge(read_policy(other), DIFF, FACTS, TODAY)
    assert len(verdict.outside) == 1 and not verdict.remarks


def test_names_that_match_nothing_are_told():
    text = "[[models]]\nmatch = {traget = 'h200'}\nlimits = {tpot = '1 %'}"
    (remark,) = judge(read_policy(text), DIFF, FACTS, TODAY).remarks
    assert remark == "match names 'traget', which this plan does not have; it has 'target'"
    assert unknown_name(remark) == "match names 'traget'" and not unknown_name("is not needed")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limits = 3", "expected an object"),
        ("[limts]", "unknown key 'limts'"),
        ("[limits]\ntpots = '1 %'", "unknown figure 'tpots'"),
        ("[limits]\ntpot = 0.1", "expected str"),
        ("[limits]\ntpot = '1'", "limits.tpot is '1'"),
        ("[limits]\ntpot = '-1 %'", "limits.tpot is '-1 %'"),
        ("[limits]\n'memory.kvs' = '1 %'", "unknown figure"),
        ("[decisions]\nkernel = 'refuse'", "unknown section 'kernel'"),
        ("[decisions]\nkernels = 'no'", "decisions.kernels is 'no'"),
        ("[[models]]\nlimits = {}", "models without match"),
        ("[[models]]\nmatch = {a = 1}\nlimit = {}", "unknown key 'limit'"),
        ("[[allow]]\nwhat = 'tpot'\nreason = 'x'", "missing key 'expires'"),
        ("[[allow]]\nwhat = 'tpot'\nreason = ' '\nexpires = 2026-01-01", "no reason for tpot"),
        ("[[allow]]\nwhat = 'tpot'\nreason = 'x'\nexpires = '2026-01-01'", "expected date"),
        ("[[allow]]\nwhat = 'speed'\nreason = 'x'\nexpires = 2026-01-01", "'speed'"),
        (
            "[[allow]]\nwhat = 'kernels'\nup_to = '1 %'\nreason = 'x'\nexpires = 2026-01-01",
            "up_to of kernels: a section has no amount",
        ),
        ("[limits", "not TOML"),
    ],
)
def test_what_is_no_policy(text: str, words: str):
    with pytest.raises(PolicyError) as caught:
        read_policy(text, "gate.toml")
    assert words in str(caught.value) and "gate.toml" in str(caught.value)
    assert "—" in str(caught.value) and "\n" not in str(caught.value)


def test_the_policy_of_the_docs_is_one():
    text = (Path(__file__).parents[2] / "docs" / "plan-diff.md").read_text()
    policy = read_policy(text.partition("```toml\n")[2].partition("```")[0])
    assert policy.rules.limits["tpot"] == 0.02 and policy.rules.limits["memory.arena"] is None
    assert policy.models[0].rules.refused == {"fusions": True} and len(policy.allow) == 2
