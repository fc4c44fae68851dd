"""Inputs that once broke a reader, and random folders of JSON files, through the fuzz targets.

The targets also watch that nothing outside of the folder is opened and nothing is run.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.models.presets import preset
from tests.fuzz.seeds import KINDS, seeds
from tests.fuzz.targets import SEPARATOR, EscapeError, Guard, run_one

INDEX = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": BPE} | dict.fromkeys(PARTS)
CONFIG = preset("tiny-llama31")


def folder(
    config: Any = CONFIG, index: Any = INDEX, settings: Any = None, tokenizer: Any = TOKENIZER
) -> bytes:
    """Input of the folder target; a text is taken as it is."""
    parts = (config, index, {}, settings or {}, {}, tokenizer)
    return SEPARATOR.join((p if isinstance(p, str) else json.dumps(p)).encode() for p in parts)


CRASHERS = {
    # The tokenizers library passes over a member without a colon; json does not.
    "a tokenizer that only the library reads": folder(
        settings={"bos_token": "a", "add_bos_token": True},
        tokenizer=json.dumps(TOKENIZER).replace('"version": "1.0"', '"versigeneral.0"'),
    ),
    "a dtype that is a list": folder(config=CONFIG | {"torch_dtype": []}),
    "layer types that are objects": folder(
        config=CONFIG | {"model_type": "qwen2", "architectures": None, "layer_types": [{}]}
    ),
    # Found while writing the targets: an integer beyond every float in a place for a number.
    "a base beyond every float": folder(config=CONFIG | {"rope_theta": 10**400}),
}


@pytest.mark.parametrize("case", CRASHERS)
def test_what_once_broke_a_reader_is_refused(case: str):
    assert not run_one("folder", CRASHERS[case])


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_of_the_fuzzers_open(kind: str):
    for seed in seeds(kind):
        run_one(kind, seed)


def test_the_guard_sees_a_file_outside_and_a_program(tmp_path):
    guard = Guard()
    guard.root = str(tmp_path)
    try:
        guard.hook("open", (str(tmp_path / "inside"), "r", 0))
        for event, arguments in (("open", ("/etc/passwd", "r", 0)), ("os.system", (b"true",))):
            with pytest.raises(EscapeError):
                guard.hook(event, arguments)
    finally:
        guard.root = None


NAMES = st.sampled_from(
    ["a.safetensors", "../a.safetensors", "/etc/passwd", "..", "", "a\x00b", "c.safetensors", "%2e"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | NAMES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weight_map", "a", "b", "type", "content"]), inner)
    ),
    max_leaves=6,
)
KEYS = [
    *CONFIG,
    "dtype",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "auto_map",
    "text_config",
]


@settings(max_examples=120, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_random_configs(changes: dict[str, Any]):
    run_one("folder", folder(config=CONFIG | changes))


@settings(max_examples=120, deadline=None)
@given(
    index=st.fixed_dictionaries({"weight_map": st.dictionaries(st.sampled_from("abc"), NAMES)})
    | VALUES
)
def test_random_indexes(index: Any):
    run_one("folder", folder(index=index))


@settings(max_examples=120, deadline=None)
@given(
    settings=st.dictionaries(st.sampled_from(["bos_token", "eos_token", "chat_template"]), VALUES),
    changes=st.dictionaries(st.sampled_from(["added_tokens", "model", "version"]), VALUES)
    | st.fixed_dictionaries(
        {
            "model": st.fixed_dictionaries(
                {"type": st.just("BPE")} | dict.fromkeys(("vocab", "merges"), VALUES)
            )
        }
    ),
)
def test_random_tokenizers(settings: Any, changes: dict[str, Any]):
    run_one("folder", folder(settings=settings, tokenizer=TOKENIZER | changes))
