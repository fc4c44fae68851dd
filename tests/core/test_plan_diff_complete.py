"""Nothing of a plan is dropped silently: whatever field changes, the comparison says so, but for
the fields that are listed here with the reason."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sitsc.core.diff.compare import compare
from sitsc.core.diff.read import Opened, opened
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan, read_plan
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_tiny-llama_float32.json"
IGNORED = {
    "Plan.schema": "told when the plan is read",
    "Ceiling.source": "evidence",
    "LayerClass.digest": "what differs in a layer is told itself",
    "LaunchGroup.name": "a name",
    "ArenaBuffer.name": "a name",
    "ArenaBuffer.dtype": "the arena is bytes: arguments have types",
    "ArenaBuffer.shape": "as dtype",
    "ArenaBuffer.offset": "a place; the size of the arena is a figure",
    "ArenaBuffer.bytes": "the size of the arena is a figure",
    "ArenaBuffer.first": "a place in time",
    "ArenaBuffer.last": "a place in time",
    "KvGroup.name": "a name",
    "Rank.rank": "a name",
    "Package.file": "a name",
    "Package.constants": "names",
    "Alternative.reason": "of partitions that cannot be",
    "Alternative.change": "as reason",
    "Alternative.ttft_ms": "of what was not chosen",
    "Alternative.tpot_ms": "as ttft_ms",
    "Alternative.tokens_per_s": "as ttft_ms",
    "Alternative.kv_tokens": "as ttft_ms",
    "PrefillCut.low_tokens": "one more than the cut before ends at",
    "PrefillCut.ttft_ms": "TTFT is a figure of each bucket",
    "Granularity.ranks": "follows from the partition",
    "Granularity.low_bytes": "near the best, which is told",
    "Granularity.high_bytes": "as low_bytes",
    "Stage.layers": "follows from the partition",
    "Argument.buffer": "a place; which weight is read is told",
    "Argument.offset": "a place",
    "Argument.layer_stride": "follows from the KV layout",
    "Launch.bytes": "told by operator",
    "Launch.flops": "told by operator",
    "Launch.predicted_us": "the time of a regime is a figure",
    "Regime.kind": "its name begins with it",
    "TensorSlice.start": "which rows: follows from the checkpoint and the partition",
    "TensorSlice.stop": "as start",
    "TensorSlice.part": "as start",
    "WeightSpec.shape": "follows from the model; bytes are a figure",
}


def fields_of(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """(record and field, the plan with that field changed in every record) for all there are."""
    kinds: dict[str, list[str]] = {}
    _collect(plan, kinds)
    for kind, names in kinds.items():
        for name in names:
            yield f"{kind}.{name}", _changed(plan, kind, name)


def _collect(value: Any, kinds: dict[str, list[str]]) -> None:
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        for name in names:
            _collect(getattr(value, name), kinds)
            if _other(getattr(value, name)) is not None:
                known = kinds.setdefault(type(value).__name__, [])
                known += [name] if name not in known else []
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, kinds)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, kinds)


def _changed(value: Any, kind: str, name: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {
            f.name: _changed(getattr(value, f.name), kind, name) for f in dataclasses.fields(value)
        }
        if type(value).__name__ == kind:
            other = _other(found[name])
            found[name] = found[name] if other is None else other
        return type(value)(**found)
    if isinstance(value, tuple):
        return tuple(_changed(item, kind, name) for item in value)
    if isinstance(value, dict):
        return {key: _changed(item, kind, name) for key, item in value.items()}
    return value


def _other(value: Any) -> Any:
    """Another value of the same kind; None for records, which have fields of their own."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.25
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple) and value:
        last = _other(value[-1])
        return None if last is None else (*value[:-1], last)
    if isinstance(value, dict) and value:
        found = {key: _other(item) for key, item in value.items()}
        return None if None in found.values() else found
    return None


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[Plan]:
    """For the CPU, for the CPU in stages, for a GPU."""
    model = write_random("tiny-llama", tmp_path_factory.mktemp("complete") / "m", headers_only=True)
    small: dict[str, Any] = {"max_batch": 2, "prefill_chunk_tokens": 64, "max_context": 128}
    found = [read_plan(GOLDEN.read_text())]
    others: tuple[dict[str, Any], ...] = ({"tp": 2, "pp": 2}, {"target": "h200"})
    for more in others:
        options = CompileOptions(**small, **more)
        found.append(plan_checkpoint(inspect(model, options), options).plan)
    return found


def test_every_field_is_compared_or_listed(plans: list[Plan]):
    silent: set[str] = set()
    told: set[str] = set()
    for plan in plans:
        before = opened(plan, "a")
        for name, other in fields_of(before.plan):
            found = compare(before, Opened(other, before.side))
            (silent if found.empty else told).add(name)
    assert silent - told - set(IGNORED) == set()
    assert set(IGNORED) - silent == set()
