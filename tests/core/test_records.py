"""Records: dataclasses to JSON values and back, and errors that say where."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.errors import PlanError
from sitsc.core.records import from_value, to_value


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    size: int
    share: float
    on: bool
    note: str | None


@dataclass(frozen=True, slots=True)
class Tree:
    leaf: Leaf
    maybe: Leaf | None
    leaves: tuple[Leaf, ...]
    shape: tuple[int | str, ...]
    pair: tuple[int, str]
    counts: dict[str, int]
    by_name: dict[str, Leaf]
    table: tuple[tuple[int, ...], ...]
    free: Any


LEAVES = st.builds(
    Leaf,
    st.text(),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none() | st.text(),
)
TREES = st.builds(
    Tree,
    leaf=LEAVES,
    maybe=st.none() | LEAVES,
    leaves=st.lists(LEAVES, max_size=3).map(tuple),
    shape=st.lists(st.integers() | st.text(), max_size=4).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    counts=st.dictionaries(st.text(), st.integers(), max_size=3),
    by_name=st.dictionaries(st.text(), LEAVES, max_size=2),
    table=st.lists(st.lists(st.integers(), max_size=3).map(tuple), max_size=3).map(tuple),
    free=st.none() | st.text() | st.lists(st.integers()),
)
LEAF = Leaf("a", 1, 0.5, True, None)
TREE = Tree(
    LEAF, None, (LEAF, LEAF), (1, "tokens"), (3, "x"), {"n": 2}, {"l": LEAF}, ((1,), ()), [7]
)


@given(TREES)
def test_a_record_comes_back_from_its_text(tree: Tree):
    text = json.dumps(to_value(tree))
    assert from_value(Tree, json.loads(text), "plan") == tree


@given(TREES)
def test_values_are_plain_json(tree: Tree):
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list):
            return all(plain(item) for item in value)
        return value is None or isinstance(value, (str, int, float, bool))

    assert plain(to_value(tree))


@pytest.mark.parametrize(
    ("path", "wrong", "told"),
    [
        (("leaf", "size"), "1", "[plan.leaf.size]"),
        (("leaf", "size"), True, "[plan.leaf.size]"),
        (("leaf", "size"), 1.0, "[plan.leaf.size]"),
        (("leaf", "on"), 1, "[plan.leaf.on]"),
        (("leaf", "share"), "0.5", "[plan.leaf.share]"),
        (("leaf", "share"), True, "[plan.leaf.share]"),
        (("leaf", "name"), None, "[plan.leaf.name]"),
        (("leaf",), [], "[plan.leaf]"),
        (("maybe",), 3, "[plan.maybe]"),
        (("leaves",), {}, "[plan.leaves]"),
        (("leaves", 1, "size"), None, "[plan.leaves[1].size]"),
        (("shape", 1), 1.5, "[plan.shape[1]]"),
        (("pair",), [3], "[plan.pair]"),
        (("pair", 1), 3, "[plan.pair[1]]"),
        (("counts",), [], "[plan.counts]"),
        (("counts", "n"), "2", "[plan.counts.n]"),
        (("by_name", "l", "on"), None, "[plan.by_name.l.on]"),
        (("table", 0, 0), "1", "[plan.table[0][0]]"),
    ],
)
def test_a_wrong_type_is_told_with_its_place(path: tuple[Any, ...], wrong: Any, told: str):
    value = to_value(TREE)
    *way, last = path
    target = value
    for key in way:
        target = target[key]
    target[last] = wrong
    with pytest.raises(PlanError) as error:
        from_value(Tree, value, "plan")
    assert told in str(error.value)


@given(st.sampled_from([f.name for f in dataclasses.fields(Leaf)]))
def test_a_missing_key_is_told(name: str):
    value = to_value(TREE)
    del value["leaves"][0][name]
    with pytest.raises(PlanError, match=rf"missing key '{name}' \[plan\.leaves\[0\]\]"):
        from_value(Tree, value, "plan")


def test_an_unknown_key_is_told():
    value = to_value(TREE)
    value["leaf"]["colour"] = "green"
    with pytest.raises(PlanError, match=r"unknown key 'colour' \[plan\.leaf\]"):
        from_value(Tree, value, "plan")


def test_an_integer_may_stand_for_a_float():
    value = to_value(LEAF) | {"share": 2}
    assert from_value(Leaf, value, "leaf").share == 2.0


def test_the_error_inside_an_optional_record_names_the_inner_place():
    value = to_value(dataclasses.replace(TREE, maybe=LEAF))
    value["maybe"]["size"] = "many"
    with pytest.raises(PlanError, match=r"\[plan\.maybe\.size\]"):
        from_value(Tree, value, "plan")
