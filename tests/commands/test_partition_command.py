"""`sitsc partition`: tables, JSON, a PNG, and one line for every question that makes no sense."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from sitsc.commands.parallel_view import parallel_lines
from sitsc.commands.partition_view import plot_png, show
from sitsc.commands.png_plot import HEIGHT, WIDTH, Series, scatter
from sitsc.core.plan import Parallel
from sitsc.partition_pipeline import Asked, Report, report, report_value
from sitsc.passes.workloads import Slo, Workload
from tests.commands.command_line import call
from tests.partition_records import record


@pytest.fixture(scope="module")
def eight() -> Report:
    asked = Asked(8, slo=Slo(ttft_ms=40, tpot_ms=4))
    return report(record("llama3-8b"), "h200", asked)


def pixels(data: bytes) -> bytes:
    """The rows of a PNG of ours, after checking its parts."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, found = 8, b""
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (code,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert code == zlib.crc32(kind + body)
        if kind == b"IHDR":
            assert struct.unpack(">II", body[:8]) == (WIDTH, HEIGHT)
        found += body if kind == b"IDAT" else b""
        at += 12 + size
    return zlib.decompress(found)


def test_text(eight, capsys):
    show(eight, 4)
    text = capsys.readouterr().out
    for part in ("8 × h200", "TP 4 × DP 2", "± ", "and 6 more", "crossovers  from 1 at once TP 8"):
        assert part in text, part
    for part in (
        "fewest      6 devices keep the limits: TP 2 × DP 3, 32 at once",
        "nearest     ",
        "idle TTFT",
        "kept up to",
        "median residual",
        "[1] measured",
    ):
        assert part in text, part
    for part in ("memory of the fullest device", "prompts", "pieces of", "tokens a second of one"):
        assert part in text, part


def test_one_of_a_thing(capsys):
    """One device, one micro-batch; the front is named by digits, as the guide says."""
    asked = Asked(1, workload=Workload(concurrency=1), slo=Slo(tpot_ms=10))
    show(report(record("llama3-8b"), "h200", asked), 4)
    text = capsys.readouterr().out
    assert "fewest      1 device keeps the limits: one rank, 1 at once" in text
    assert "1 micro-batch, chunks" in text and " the best: 1 one rank" in text


def test_json_is_strict(eight):
    value = json.loads(json.dumps(report_value(eight), allow_nan=False))
    assert value["ranked"][0]["partition"] == {"tp": 4, "pp": 1, "ep": 1, "dp": 2}
    assert value["fewest_devices"]["devices"] == 6
    assert all(c["holds"] >= 32 for c in value["ranked"] if c["meets"])
    assert value["nearest_miss"]["times_the_limit"] > 1
    assert value["parallel"]["alternatives"] == len(value["ranked"]) - 1
    assert {"name", "us", "share", "source"} <= set(value["operators"][0])


def test_plot(eight):
    """Another plot has other dots, the same one the same bytes."""
    data = plot_png(eight)
    assert data == plot_png(eight)
    rows = pixels(data)
    assert len(rows) == HEIGHT * (3 * WIDTH + 1)
    blue, red = bytes((31, 119, 180)), bytes((214, 39, 40))
    assert blue in rows and red in rows
    empty = pixels(scatter([Series("none", ())], "t", "x", "y"))
    assert empty.count(red) == 0


def test_a_plan_section_for_the_compiler():
    asked = Asked(2, workload=Workload(concurrency=1))
    made = report(record("llama3-8b"), "h200", asked).parallel
    assert (made.tp, made.pp, made.ep, made.dp) == (2, 1, 1, 1)


def test_command(tmp_path: Path, capfd):
    out, load = tmp_path / "plot.png", tmp_path / "load.json"
    load.write_text('{"prompt_tokens": 64, "output_tokens": 16, "concurrency": 4}')
    model = tmp_path / "model"
    made = ("models", "random", "smollm2-135m", "--layers", 2, "--headers-only", "-o", model)
    assert call(capfd, *made).code == 0
    arguments = ("partition", model, "--target", "cpu", "--devices", 6)
    done = call(capfd, *arguments, "--workload", load, "--plot", out, "--json")
    assert done.code == 0, done
    value = json.loads(done.out)
    why = {(r["partition"]["tp"], r["partition"]["pp"]): r["reason"] for r in value["rejected"]}
    assert "9 query heads" in why[2, 1] and "9 query heads" in why[6, 1]
    assert "of 2 layers" in why[1, 3] and (3, 2) not in why
    assert value["ranked"][0]["budget"]["limit"] is None  # a CPU states no size
    assert value["workload"]["prompt_tokens"] == 64 and pixels(out.read_bytes())


def test_limits_that_nothing_keeps(capfd):
    call(capfd, "partition", "tiny-qwen2", "--slo", "ttft=0.001").refused(
        2, "no partition of 8 devices", "the nearest is", "times the limit"
    )


def test_refused(tmp_path: Path, capfd):
    def refused(*arguments: object, parts: tuple[str, ...]) -> None:
        call(capfd, "partition", "tiny-qwen2", *arguments).refused(2, *parts)

    refused("--devices", 8, "--nodes", 3, parts=("do not divide", "--nodes 2"))
    refused("--devices", 0, parts=("outside 1..1024",))
    refused("--devices", 1025, parts=("outside 1..1024",))
    refused("--link", "string", parts=("unknown link", "nvlink"))
    refused("--between", "string", "--nodes", 2, parts=("unknown link",))
    refused("--between", "ethernet", parts=("--between ethernet with one node", "--nodes 2"))
    refused("--prompt", 500, parts=("756 tokens, prompt and output, and the context 512",))
    refused("--target", "abacus", parts=("unknown target", "h200"))
    refused("--slo", "soon", parts=("cannot be read", "ttft=200"))
    refused("--workload", tmp_path / "none.json", parts=("--workload", "JSON"))
    refused("--prompt", -1, parts=("less than one",))
    refused("--top", 0, parts=("--top 0",))
    refused("--plot", tmp_path / "x.svg", parts=("no PNG",))
    (tmp_path / "bad.json").write_text("[{}]")
    refused("--workload", tmp_path / "bad.json", parts=("no workload", "bad.json"))
    (tmp_path / "early.json").write_text('[{"prompt_tokens": 5, "max_tokens": 2, "at": -1}]')
    refused("--workload", tmp_path / "early.json", parts=("a request at -1 s", "early.json"))
    (tmp_path / "much.json").write_text('{"prompt_tokens": 5, "rate": 1e12}')
    refused("--workload", tmp_path / "much.json", parts=("1e+12 requests a", "comes nearest with"))
    (tmp_path / "good.json").write_text('{"prompt_tokens": 5}')
    refused("--workload", tmp_path / "good.json", "--prompt", 5, parts=("--prompt beside",))
    (tmp_path / "link.json").write_text("{}")
    refused("--link", tmp_path / "link.json", parts=("missing key",))


def test_what_is_a_forecast_is_said():
    """Nodes, a node of more devices than hosts have, and what no target executes."""
    made = record("tiny-qwen2")

    def said(**asked: Any) -> str:
        return report(made, "h200", Asked(**asked)).topology

    assert said(devices=8) == "one node, nvlink"
    apart = said(devices=12, nodes=2, between="ethernet")
    assert apart.startswith("6 a node by nvlink, nodes by ethernet")
    assert "a forecast: an artifact runs on one host" in apart
    assert "more than the 8 of a usual host (--nodes)" in said(devices=16)
    assert "hypothetical: the best collectives" in said(devices=2, ideal=True)
    assert "hypothetical: sums of prompts hidden" in said(devices=2, overlap=True)


def test_links_are_measured(tmp_path: Path, capfd):
    """Two processes of this machine; the file is a link that a search takes."""
    out = tmp_path / "here.json"
    done = call(capfd, "tune", "links", "-o", out, "--backend", "gloo", "--seconds", 0.01)
    assert done.code == 0, done
    value = json.loads(out.read_text())
    assert value["name"] == "here" and set(value["algorithms"]) >= {"ring", "send"}
    for algorithm in value["algorithms"].values():
        assert algorithm["points"] and "gloo, 2 ranks" in algorithm["source"]
        assert all(seconds > 0 for _, seconds in algorithm["points"])
    found = report(record("tiny-qwen2", "cpu"), "cpu", Asked(2, link=str(out))).found
    assert {c.partition.text() for c in found.ranked} >= {"TP 2", "DP 2"}


def test_links_that_cannot_be_measured(tmp_path: Path, capfd):
    def refused(*arguments: object, parts: tuple[str, ...]) -> None:
        call(capfd, "tune", "links", "-o", tmp_path / "x.json", *arguments).refused(2, *parts)

    refused("--ranks", 1, "--backend", "gloo", parts=("1 ranks cannot", "2 to 64"))
    refused("--backend", "pigeon", parts=("unknown", "gloo or nccl"))
    refused("--backend", "nccl", "--ranks", 64, parts=("need 64 GPUs",))
    refused("--seconds", 0, parts=("--seconds",))


def test_plans_show_what_was_not_chosen():
    asked = Asked(6, workload=Workload(concurrency=2))
    made = report(record("smollm2-135m"), "h200", asked).parallel
    lines = parallel_lines(made)
    assert any(line.startswith("prompts of 1 to") for line in lines)
    assert any("9 query heads do not divide by TP 2: valid TP: 1, 3" in line for line in lines)
    assert sum("slower" in line for line in lines) == sum(a.feasible for a in made.alternatives)
    assert parallel_lines(Parallel(1, 1, 1, 1, 1, 512, ())) == []
