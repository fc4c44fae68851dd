"""`sitsc plan show`: text for people, the plan itself as JSON, and files that are no plan."""

import json
import re
from pathlib import Path

import pytest

from sitsc.core.artifact import open_artifact
from tests.commands.command_line import call


def test_the_text_has_every_section(tiny_artifact: Path, capfd):
    result = call(capfd, "plan", "show", tiny_artifact)
    assert (result.code, result.err) == (0, "")
    plan = open_artifact(tiny_artifact).plan
    parts = ["LlamaForCausalLM: layers 2", "layer_a × 1 (layers 0)", "TP 1 × PP 1", "float32"]
    parts += ["decode 1 2 4 8", plan.sha256(), plan.runs(), "self_attn.o_proj", "± 30 %"]
    parts += [str(plan.memory.arena_bytes), str(plan.memory.total_bytes), plan.kv[0].name]
    for part in parts:
        assert part in result.out, part
    assert "\x1b" not in result.out
    assert all(line == line.rstrip() for line in result.out.splitlines())


def test_the_kernels_of_a_regime_sum_to_its_time(tiny_artifact: Path, capfd):
    plan = open_artifact(tiny_artifact).plan
    regime = next(r for r in plan.regimes if r.name == "decode_4")
    lines = call(capfd, "plan", "show", tiny_artifact, "--regime", "decode_4").out.splitlines()
    titles = [line for line in lines if re.match(r"(decode|prefill)_\d+: ", line)]
    assert len(titles) == 1 and titles[0].startswith("decode_4: 4 sequences, 4 new tokens")
    first = lines.index(titles[0]) + 3
    rows = lines[first : first + len(regime.kernels)]
    shares = [float(line.split()[-2]) for line in rows]
    assert sum(shares) == pytest.approx(100, abs=len(rows) * 0.05)
    assert shares == sorted(shares, reverse=True)
    assert lines[first + len(rows)].startswith("together")


def test_json_is_the_plan_itself(tiny_artifact: Path, capfd):
    text = (tiny_artifact / "plan.json").read_text()
    assert call(capfd, "plan", "show", tiny_artifact, "--json").out == text
    assert call(capfd, "plan", "show", tiny_artifact / "plan.json", "--json").out == text
    assert json.loads(text)["schema"] == 1


def test_what_is_no_plan(tiny_artifact: Path, tmp_path: Path, capfd):
    show = ("plan", "show")
    call(capfd, *show, tiny_artifact, "--regime", "decode_3").refused(2, "one of decode_1")
    call(capfd, *show, tmp_path).refused(2, "is not an artifact")
    call(capfd, *show, tmp_path / "no").refused(2, "does not exist")
    call(capfd, *show, tiny_artifact / "weights.bin").refused(2, "weights.bin")
    call(capfd, *show, tiny_artifact / "manifest.json").refused(2, "plan")
    plan = json.loads((tiny_artifact / "plan.json").read_text())
    for name, value in (("unknown", {"extra": 1}), ("newer", {"schema": 2}), ("type", {"kv": 3})):
        (tmp_path / f"{name}.json").write_text(json.dumps(plan | value))
        call(capfd, *show, tmp_path / f"{name}.json").refused(2)
    (tmp_path / "cut.json").write_text((tiny_artifact / "plan.json").read_text()[:1000])
    call(capfd, *show, tmp_path / "cut.json").refused(2, "not JSON", "cut.json")
    name = next(iter(plan["predictions"]))
    plan["predictions"][name]["value"] = float("nan")
    (tmp_path / "nan.json").write_text(json.dumps(plan))
    call(capfd, *show, tmp_path / "nan.json").refused(2, "nan has no canonical form", "nan.json")


def test_what_runs_as_operators_of_aten_is_told(tiny_artifact: Path, tmp_path: Path, capfd):
    assert "unmatched" not in call(capfd, "plan", "show", tiny_artifact).out
    value = json.loads((tiny_artifact / "plan.json").read_text())
    rows = value["regimes"][0]["kernels"]
    row = next(r for r in rows if r["layer_class"]) | {"op": "aten.rsqrt", "by": "unmatched norm"}
    rows.append(row | {"name": "self_attn.q_norm", "count": 2})
    rows.append(row | {"name": "head", "layer_class": "", "op": "aten.layer_norm", "count": 1})
    (tmp_path / "plan.json").write_text(json.dumps(value))
    lines = call(capfd, "plan", "show", tmp_path / "plan.json").out.splitlines()
    (line,) = (line for line in lines if line.startswith("unmatched"))
    assert "norm, slower" in line and "self_attn.q_norm of layer_a (aten.rsqrt × 2)" in line
    assert line.endswith("head (aten.layer_norm × 1)")
