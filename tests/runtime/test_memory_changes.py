"""What does not fit is told by component, and each proposed change does fit when it is made."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc import pipeline
from sitsc.core.errors import MemoryPlanError
from sitsc.core.hardware import TargetData, load_target
from sitsc.core.memory_budget import (
    CUDA_RUNTIME_BYTES,
    Room,
    components,
    needed_bytes,
    size_text,
)
from sitsc.core.memory_changes import changes, check_memory, check_planned
from sitsc.core.memory_ranks import more_ranks
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan
from sitsc.runtime.cuda_preflight import room_of
from tests.runtime.gpu_artifacts import checkpoint, plan_of

OPTIONS = CompileOptions(
    target="h200",
    dtype="bfloat16",
    max_context=512,
    max_batch=16,
    kv_tokens=8192,
    prefill_chunk_tokens=512,
)
GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("changes") / "model")


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    return plan_of(model, OPTIONS)


def large(plan: Plan) -> Plan:
    """The plan with the sizes of an 8B model; its arena is still the small one."""
    memory, group = plan.memory, plan.kv[0]
    pages = memory.kv_pages
    times = 15 * GIB // memory.weights_bytes // 16
    wide = [
        replace(s, shape=(times * s.shape[0], 16 * s.shape[1])) if len(s.shape) == 2 else s
        for s in plan.model.parameters
    ]
    return replace(
        plan,
        model=replace(plan.model, parameters=tuple(wide)),
        memory=replace(memory, weights_bytes=15 * GIB, kv_bytes=20 * GIB),
        kv=(replace(group, page_bytes=20 * GIB // pages),),
    )


def options_of(text: str) -> CompileOptions:
    """The options of a proposed change, put into those of the plan."""
    words = shlex.split(text.removeprefix("compile with "))
    pairs = zip(words[::2], words[1::2], strict=True)
    values = {name.removeprefix("--").replace("-", "_"): int(value) for name, value in pairs}
    return replace(OPTIONS, devices=values.get("tp", 1) * values.get("pp", 1), **values)


def test_what_fits_raises_nothing(plan: Plan):
    need = needed_bytes(plan)
    assert need == sum(components(plan).values()) == plan.memory.total_bytes + CUDA_RUNTIME_BYTES
    check_memory(plan, Room(need, need), "a GPU")
    check_memory(plan, Room(10 * need, 10 * need, need), "a GPU")


def test_need_have_short_by_component(plan: Plan):
    room = Room(24 * GIB, 23 * GIB)
    with pytest.raises(MemoryPlanError) as caught:
        check_memory(large(plan), room, "NVIDIA L4", "art")
    text = str(caught.value)
    assert "weights 15.00 GiB, KV 20.00 GiB, arena" in text and "graphs" in text
    assert "runtime 832.0 MiB" in text and "23.00 GiB free on NVIDIA L4" in text
    short = needed_bytes(large(plan)) - 23 * GIB
    assert f"{size_text(short)} short [art] — compile with --kv-tokens " in text
    assert text.count(" or ") <= 2 and "\n" not in text


def test_a_limit_is_named_and_may_be_raised(plan: Plan):
    plan = large(plan)
    room = Room(140 * GIB, 130 * GIB, 30 * GIB)
    with pytest.raises(MemoryPlanError, match="allowed by --memory-limit") as caught:
        check_memory(plan, room, "NVIDIA H200")
    found = re.search(r"run with --memory-limit (\d+)MiB", str(caught.value))
    assert found is not None
    check_memory(plan, Room(140 * GIB, 130 * GIB, int(found[1]) << 20), "NVIDIA H200")
    lower = Room(140 * GIB, 130 * GIB, (int(found[1]) - 1) << 20)
    with pytest.raises(MemoryPlanError):
        check_memory(plan, lower, "NVIDIA H200")


def test_other_processes_and_other_gpus(plan: Plan):
    plan = large(plan)
    busy = changes(plan, Room(140 * GIB, 30 * GIB))
    assert busy[0].what == "end other processes: they hold 110.00 GiB of the GPU"
    assert not any("a GPU with" in change.what for change in busy)
    small = changes(plan, Room(10 * GIB, 10 * GIB))
    cut, other = small  # two stages do not hold it
    assert re.fullmatch(r"compile with --tp 4 --kv-tokens \d+", cut.what)
    assert other.what == "a GPU with 79.65 GiB (h100)"
    assert cut.needed_bytes <= 10 * GIB
    [all_pages, _] = changes(plan, Room(15 * GIB, 15 * GIB))
    assert all_pages.what == "compile with --tp 4" and all_pages.kept == 1.0


def test_more_ranks_need_no_more_than_is_said(plan: Plan, model: Path):
    degrees = [one for kind in more_ranks(plan) for one in kind]
    assert [one.option for one in degrees] == ["--tp 2", "--tp 4", "--pp 2"]
    for one in degrees:
        again = plan_of(model, options_of(f"compile with {one.option}"))
        most = one.fixed_bytes + one.page_bytes * plan.memory.kv_pages
        assert max(needed_bytes(again.of_rank(r)) for r in range(again.num_ranks)) <= most, one


def test_ranks_of_a_cut_plan_are_cut_further(plan: Plan, model: Path):
    half = plan_of(model, options_of("compile with --tp 2"))
    names = [one.option for kind in more_ranks(half.of_rank(0)) for one in kind]
    assert names == ["--tp 4", "--pp 2"]
    here = replace(plan, target=replace(plan.target, name="cpu", isa="x86-64-v3"))
    assert not list(more_ranks(here))
    assert not list(more_ranks(replace(plan, model=replace(plan.model, dimensions={}))))


def test_where_nothing_is_enough_that_is_said(plan: Plan):
    memory, wide = plan.memory, plan.model.parameters
    wide = tuple(replace(s, shape=(s.shape[0] << 24, *s.shape[1:])) for s in wide)
    huge = replace(plan, model=replace(plan.model, parameters=wide))
    huge = replace(huge, memory=replace(memory, weights_bytes=memory.weights_bytes << 24))
    with pytest.raises(MemoryPlanError, match="no option, GPU or number of ranks that we know"):
        check_memory(huge, Room(140 * GIB, 140 * GIB), "NVIDIA H200")


def test_a_plan_being_made_leaves_room_for_the_runtime(plan: Plan):
    need = needed_bytes(plan)
    on = [replace(plan, target=replace(plan.target, memory_bytes=n)) for n in (0, need, need - 1)]
    check_planned(on[0])
    check_planned(on[1])
    with pytest.raises(MemoryPlanError, match=r"runtime 832\.0 MiB.* on h200, 1 bytes short"):
        check_planned(on[2])
    cut = replace(on[2], parallel=replace(plan.parallel, tp=2))
    with pytest.raises(MemoryPlanError, match="on each of 2 h200"):
        check_planned(cut)


def test_what_a_compile_is_told_to_change_fits(model: Path, monkeypatch: pytest.MonkeyPatch):
    def small(name: str) -> TargetData:
        data = load_target(name)
        return replace(data, target=replace(data.target, memory_bytes=6 * GIB))

    monkeypatch.setattr(pipeline, "load_target", small)
    wanted = replace(OPTIONS, target="l40s", kv_tokens=1 << 26)
    with pytest.raises(
        MemoryPlanError, match=r"GiB on l40s, .* short — with --kv-tokens"
    ) as caught:
        plan_of(model, wanted)
    found = re.search(r"with --kv-tokens (\d+)", str(caught.value))
    assert found is not None and "--target" in str(caught.value)
    made = plan_of(model, replace(wanted, kv_tokens=int(found[1])))
    need, have = needed_bytes(made), made.target.memory_bytes
    assert have - made.kv[0].page_bytes < need <= have
    check_memory(made, Room(have, have), "NVIDIA L40S")


@pytest.mark.parametrize("share", [0.92, 0.3])
def test_each_proposed_change_fits_when_compiled(plan: Plan, model: Path, share: float):
    """`share` of the bytes above weights and runtime are there."""
    memory = plan.memory
    fixed = memory.weights_bytes + memory.graph_bytes + CUDA_RUNTIME_BYTES
    have = fixed + int(share * (memory.kv_bytes + memory.arena_bytes))
    found = changes(plan, Room(have, have))
    compiled = [change for change in found if change.what.startswith("compile with")]
    assert compiled and len(found) <= 3
    assert [c.kept for c in compiled] == sorted((c.kept for c in compiled), reverse=True)
    for change in compiled:
        again = plan_of(model, options_of(change.what))
        assert needed_bytes(again) <= change.needed_bytes <= have, change
        assert again.memory.kv_pages * again.kv[0].page_tokens >= again.tokens.max_context


@given(st.integers(0, 60 * GIB), st.sampled_from([0, 20 * GIB, 36 * GIB]))
def test_proposals_never_need_more_than_there_is(plan: Plan, have: int, limit: int):
    plan = large(plan)
    room = Room(40 * GIB, min(40 * GIB, have), limit)
    if needed_bytes(plan) <= room.usable_bytes:
        return
    for change in changes(plan, room):
        assert 0 <= change.kept <= 1
        if change.what.startswith("compile with"):
            assert change.needed_bytes <= room.usable_bytes


def test_our_own_context_is_not_held_against_us():
    room = room_of(140 * GIB, 139 * GIB + GIB // 2, None)
    assert room == Room(140 * GIB, 140 * GIB)
    shared = room_of(140 * GIB, 100 * GIB, 50 * GIB)
    assert shared.free_bytes == 100 * GIB + CUDA_RUNTIME_BYTES
    assert shared.usable_bytes == 50 * GIB
