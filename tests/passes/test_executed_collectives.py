"""What a target's runtime executes is what is priced; where ranks of a stage may stand."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.commands.tune import kept_lines
from sitsc.core.errors import OptionError
from sitsc.core.hardware import load_target, target_names, target_of_gpu
from sitsc.core.links import (
    STEPS,
    completed,
    executed,
    link_text,
    load_link,
    read_link,
    seconds,
)
from sitsc.core.parallel import Partition
from sitsc.golden_data import data_digests
from sitsc.passes.collectives import all_gather, all_reduce, send, sum_itemsize, topology_of
from sitsc.passes.model_record import LINEAR
from sitsc.passes.op_time import Cut, Sizes
from sitsc.passes.partition import Rejected, Search, machine
from sitsc.passes.placement import crossing, misplaced
from sitsc.passes.workloads import Slo, Workload
from tests.partition_records import record, search

H200, CPU = load_target("h200"), load_target("cpu")
MIB64 = 64 << 20
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", target_names())
def test_targets_name_algorithms_that_their_link_has(name):
    data = load_target(name)
    assert data.host.source and set(data.host.collectives) <= STEPS.keys()
    where = topology_of(data, 8)
    assert set(where.inside.algorithms) == set(data.host.collectives) and not where.ideal
    calls = (all_reduce(1 << 20, 2, where), all_gather(1 << 20, 2, where))
    for found in (*calls, send(1 << 20, where, across=False)):
        assert found.us > 0 and found.algorithm in data.host.collectives
    assert topology_of(data, 8, ideal=True).ideal


def test_sums_of_gpus_are_pushed_to_every_rank():
    """At every size: what two shots would save is the ideal's."""
    where, ideal = topology_of(H200, 8), topology_of(H200, 8, ideal=True)
    link = load_link("nvlink").algorithms
    for nbytes in (1 << 13, 1 << 20, MIB64):
        found = all_reduce(nbytes, 8, where)
        assert found.algorithm == "one_shot"
        assert found.us == pytest.approx(1e6 * seconds(link["one_shot"], "one_shot", nbytes, 8))
    best = all_reduce(MIB64, 8, ideal)
    assert best.algorithm == "two_shot" and 4 * best.us < all_reduce(MIB64, 8, where).us
    two = [all_reduce(MIB64, 2, each).us for each in (where, ideal)]
    assert two[0] == pytest.approx(two[1], rel=0.05)  # the same bytes, by either


def test_sums_of_cpus_gather_all_values():
    where = topology_of(CPU, 4)
    for nbytes in (1 << 12, 1 << 22):
        found = all_reduce(nbytes, 4, where)
        assert found.algorithm == "gathered_sum"
        assert found.us == pytest.approx(all_gather(4 * nbytes, 4, where).us, rel=1e-2)


def test_few_rows_travel_in_float32():
    assert sum_itemsize(16, 4096, "float32") == 4 and sum_itemsize(17, 4096, "float32") == 2
    assert sum_itemsize(17, 1, "float32") == 4 and sum_itemsize(1, 4096, "bfloat16") == 2
    model = search("llama3-8b", 2).model
    op = next(o for o in model.record.classes[0] if o.kind == LINEAR and o.reduced_bytes)
    for rows, itemsize in ((1, 4), (16, 4), (17, 2), (512, 2)):
        us = model.communication(op, Sizes(rows, rows, rows, 0), Cut(2))
        assert us == all_reduce(rows * op.outputs * itemsize, 2, model.where).us


def test_tokens_do_not_travel_to_experts():
    """Ranks sum, whatever EP is; sent tokens are priced in an ideal topology alone."""
    sums, ideal = (search("qwen3-30b-a3b", 8, ideal=one).model for one in (False, True))
    op = next(o for o in sums.record.classes[0] if o.experts is not None)
    sizes = Sizes(4096, 1, 1, 0)
    for ep in (1, 2, 8):
        summed = all_reduce(4096 * op.reduced_bytes, 8, sums.where).us
        assert sums.communication(op, sizes, Cut(8, ep)) == summed
        assert ideal.communication(op, sizes, Cut(8, ep)) < summed


def test_links_that_lack_what_is_executed():
    """A named link is refused; a measured file is filled in from the target's own link."""
    with pytest.raises(OptionError, match="no one_shot, direct_gather, direct_send"):
        topology_of(H200, 8, link="infiniband")
    nvlink = load_link("nvlink")
    measured = replace(nvlink, name="here", algorithms={"ring": nvlink.algorithms["ring"]})
    found = executed(measured, H200.host.collectives, nvlink)
    assert found.name == "here"
    assert found.algorithms == {n: nvlink.algorithms[n] for n in H200.host.collectives}


def test_measured_links_keep_what_is_executed(tmp_path: Path):
    """NCCL's times do not stand for those of kernels of ours: predictions stay as they were."""
    text = (ROOT / "bench/results/links_h200_nccl.json").read_text()
    nvlink, nccl = load_link("nvlink"), read_link(text, "nccl")
    made = completed(nccl, nvlink)
    assert set(nccl.algorithms) < set(made.algorithms) >= set(H200.host.collectives)
    assert made.algorithms["ring"] == nccl.algorithms["ring"] != nvlink.algorithms["ring"]
    assert made.algorithms["one_shot"] == nvlink.algorithms["one_shot"]
    (tmp_path / "here.json").write_text(link_text(made))
    (tmp_path / "bare.json").write_text(text)  # of a time before figures were kept
    own = search("llama3-8b", 2).replica(Partition(2))
    for name in ("here", "bare"):
        where = topology_of(H200, 2, link=str(tmp_path / f"{name}.json"))
        other = Search(record("llama3-8b"), machine(H200, where)).replica(Partition(2))
        assert other.decode(1, 185).us == own.decode(1, 185).us
        assert other.prefill(2048).us == own.prefill(2048).us
    lines = kept_lines("nccl", ["one_shot", "direct_send"], nvlink)
    assert lines[0] == "not measured, as in the link nvlink: one_shot, direct_send"
    assert "kernels of ours" in lines[1]
    assert (
        kept_lines("gloo", [], load_link("gloo")) == []
        and "--like" in kept_lines("nccl", [], None)[0]
    )


def test_gpus_are_known_by_what_they_call_themselves():
    names = {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200", "NVIDIA L40S": "l40s"}
    names |= {"NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000"}
    for device, name in names.items():
        data = target_of_gpu(device)
        assert data is not None and data.target.name == name
    assert target_of_gpu("NVIDIA GeForce RTX 2070") is None and target_of_gpu("cpu") is None


# --- links of targets -------------------------------------------------------------------------

LINKS = {"a100": "nvlink3", "b200": "nvlink5", "cpu": "gloo", "h100": "nvlink", "h200": "nvlink"}
LINKS |= {"l40s": "pcie4", "rtxpro6000": "pcie"}


def test_every_target_has_its_own_link():
    """None is the H200's by default; another link is one that was asked for."""
    assert set(LINKS) == set(target_names())
    for name, link in LINKS.items():
        data = load_target(name)
        assert data.host.link == topology_of(data, 2).inside.name == link
        assert "datasheet" in data.host.source or name == "cpu"
        assert set(data_digests(name, 2)) >= {f"links/{link}"}
    assert topology_of(load_target("l40s"), 2, link="nvlink").inside.name == "nvlink"


def test_generations_are_scaled_by_their_datasheets():
    """600, 900 and 1800 GB/s in both directions; 32 and 64 each way."""
    known = {
        n: load_link(n).algorithms["one_shot"] for n in ("nvlink", *LINKS.values()) if n != "gloo"
    }
    measured = known["nvlink"]
    for name, each in (("nvlink3", 300), ("nvlink5", 900), ("pcie4", 32), ("pcie", 64)):
        share = known[name].bytes_per_s / measured.bytes_per_s
        assert share == pytest.approx(each / 450, rel=1e-3) and not known[name].points
        assert "assumed" in known[name].source and load_link(name).error >= 0.3
    assert known["nvlink5"].latency_s == measured.latency_s < known["pcie"].latency_s


def test_slow_links_change_the_ranking():
    """Without NVLink fewer ranks share a layer, and the ranking is not that of NVLink."""
    data, load = load_target("l40s"), Workload()
    model = record("llama3-8b", "l40s")
    own, fast = (
        Search(model, machine(data, topology_of(data, 8, link=link))).run(8, load, Slo())
        for link in ("", "nvlink")
    )
    order = [[c.partition.text() for c in found.ranked] for found in (own, fast)]
    assert sorted(order[0]) == sorted(order[1]) and order[0] != order[1]
    eight = [next(c for c in found.ranked if c.partition.tp == 8) for found in (own, fast)]
    assert eight[0].ttft_ms > 2 * eight[1].ttft_ms and eight[0].comm_share > eight[1].comm_share
    assert own.ranked[0].partition.tp < 8


# --- where ranks stand ------------------------------------------------------------------------


def test_groups_stay_inside_of_nodes():
    """A node of six holds one group of four, and half of another."""
    twelve = topology_of(H200, 12, 2, between="ethernet")
    why = misplaced(Partition(4, 1, 1, 3), twelve)
    assert why is not None and "straddle" in why[0]
    assert why[1] == "--nodes 3, or a TP that divides a node: 1, 2, 3, 6"
    assert misplaced(Partition(4, 1, 1, 3), topology_of(H200, 12, 3)) is None
    why = misplaced(Partition(12, 2), topology_of(H200, 24, 3))
    assert why is not None and why[1].startswith("--nodes 2, or")
    assert all(misplaced(Partition(tp), twelve) is None for tp in (1, 2, 3, 6))
    why = misplaced(Partition(12), twelve)
    assert why is not None and "a node has 6 devices" in why[0] and why[1] == "TP 6, or fewer nodes"
    assert misplaced(Partition(12), replace(twelve, ideal=True)) is None
    assert misplaced(Partition(4, 1, 1, 3), replace(twelve, ideal=True)) is not None
    one = topology_of(H200, 16)
    assert misplaced(Partition(8, 2), one) is None and misplaced(Partition(16), one) is not None
    assert misplaced(Partition(16), topology_of(CPU, 16)) is None  # gloo has no such end
    where = search("llama3-8b", 12, 2)
    made = where.evaluate(Partition(4, 1, 1, 3), Workload(), Slo())
    assert isinstance(made, Rejected) and "straddle" in made.reason and made.change
    found = where.run(12, Workload(), Slo())
    assert {c.partition.tp for c in found.ranked} == {1, 2}  # three and six do not divide heads


def test_hops_between_nodes():
    """Two stages of four in a node of eight: the slow link is passed at one bound of three."""
    where = topology_of(H200, 16, 2)
    assert crossing(Partition(4, 4), where) == (False, True, False, True)
    assert crossing(Partition(4, 2, 1, 2), where) == (False, False)
    assert crossing(Partition(8, 2), where) == (True, True)
    assert crossing(Partition(1, 16), where) == (False,) * 7 + (True,) + (False,) * 7 + (True,)
    thirds = topology_of(H200, 6, 2)  # of three replicas in two nodes of three the middle one
    assert crossing(Partition(1, 2, 1, 3), thirds) == (True, True)
    assert crossing(Partition(1, 2, 1, 1), thirds) == (False, False)
    assert crossing(Partition(4, 4), topology_of(H200, 16)) == (False,) * 4


@given(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)))
def test_a_hop_crosses_where_nodes_differ(tp, pp, dp):
    """Against every rank's own place."""
    devices = tp * pp * dp
    if devices <= 8:
        return
    where = topology_of(H200, devices, devices // 8)
    worst = 0
    for replica in range(dp):
        ranks = [[(replica * pp + s) * tp + r for r in range(tp)] for s in range(pp)]
        nodes = [{rank // 8 for rank in stage} for stage in ranks]
        assert all(len(node) == 1 for node in nodes)
        worst = max(worst, sum(nodes[s] != nodes[(s + 1) % pp] for s in range(pp)))
    assert sum(crossing(Partition(tp, pp, 1, dp), where)) == worst


def test_pipelines_pay_where_they_cross():
    """TP 4 × PP 4 on two nodes: one slow send of three, and one more on the way back."""
    apart, together = search("llama3-8b", 16, 2), search("llama3-8b", 16)
    slow, fast = (s.replica(Partition(4, 4)) for s in (apart, together))
    where, nbytes = apart.machine.where, 8192 * 4096 * 4
    near, far = (send(nbytes, where, across=across).us for across in (False, True))
    assert fast.send_us(8192) == near < far
    assert slow.send_us(8192) == pytest.approx((2 * near + far) / 3)
    assert slow.send_us(8192, round_trip=True) == pytest.approx((near + far) / 2)
    inside = apart.replica(Partition(4, 2, 1, 2))
    assert inside.send_us(8192) == near
    gain = slow.prefill_with(8192, 1024).us - fast.prefill_with(8192, 1024).us
    near, far = (send(nbytes // 8, where, across=across).us for across in (False, True))
    assert gain == pytest.approx(far - near, rel=1e-6)
