"""Golden configurations for tests, without a model: one by hand, and any that can be."""

from dataclasses import replace
from datetime import date
from typing import Any

from hypothesis import strategies as st

from sitsc.core.golden import (
    SCHEMA,
    Figures,
    Golden,
    GoldenAsked,
    GoldenCandidate,
    GoldenMeasured,
    GoldenModel,
    GoldenRejected,
    finished,
    stored_options,
)
from sitsc.core.options import CompileOptions

OWN = ("tp", "pp", "ep", "max_batch", "max_context", "prefill_chunk_tokens", "kv_tokens")
FIGURES = Figures(8.0, 2.0, 4.0, 1032.0, 4000.0)


def candidate(name: str, batch: int, speed: float, **more: Any) -> GoldenCandidate:
    options = stored_options(CompileOptions(target="h200", max_batch=batch, kv_tokens=9000))
    made = GoldenCandidate(
        name=name,
        replicas=1,
        options={key: options[key] for key in OWN},
        plan=f"{batch:064x}",
        runs=f"{batch + 1:064x}",
        decode_buckets=(1, 2, batch),
        prefill_buckets=(128, 512),
        memory_bytes=1 << 30,
        predicted=replace(FIGURES, tokens_per_s=speed),
        ttft_error=0.06,
        tpot_error=0.08,
        not_measured="not asked for",
        measured=None,
    )
    return replace(made, **more)


def sample() -> Golden:
    """Three candidates, of which the second was measured."""
    versions = {"torch": "2.11.0", "driver": "580"}
    measured = GoldenMeasured(
        FIGURES, 8, 2176.5, "random", "NVIDIA H200", versions, "abc", "2026-11-30"
    )
    found = (
        candidate("one rank, chunk 2048, batch 9", 9, 4100.0),
        candidate("one rank, chunk 2048, batch 8", 8, 3900.0, not_measured="", measured=measured),
        candidate("TP 2, chunk 2048, batch 7", 7, 3000.0, not_measured="needs 2 GPUs"),
    )
    options = stored_options(CompileOptions(target="h200", max_batch=8, kv_tokens=9000))
    golden = Golden(
        schema=SCHEMA,
        made=date(2026, 11, 30),
        expires=date(2027, 2, 28),
        digest="",
        commit="abc+",
        chosen=1,
        model=GoldenModel("llama", False, "LlamaForCausalLM", "f" * 64),
        target="h200",
        devices=2,
        options=options,
        asked=GoldenAsked(2048, 256, 8, 0.0, (), 50.0, 5.0),
        data={"targets/h200": "1" * 64, "calibration/h200": "2" * 64},
        compiler={"sitsc": "0.1.0", "c++": 'g++ "12"'},
        candidates=found,
        rejected=(GoldenRejected("TP 3", "32 heads do not divide", "valid TP: 1, 2"),),
    )
    return finished(golden)


def any_golden() -> st.SearchStrategy[Golden]:
    """Records whose texts and numbers are anything; options are possible ones."""
    text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
    number = st.floats(0, 1e12, allow_subnormal=False)
    count = st.integers(0, (1 << 63) - 1)
    figures = st.builds(Figures, *[number] * 5)
    named = st.dictionaries(text, text, max_size=3)
    measured = st.builds(GoldenMeasured, figures, count, number, text, text, named, text, text)
    options = st.builds(
        lambda batch, chunk, keys: stored_options(
            CompileOptions(max_batch=batch, prefill_chunk_tokens=chunk, allow_unknown_keys=keys)
        ),
        st.integers(1, 1024),
        st.integers(16, 8192),
        st.lists(text, max_size=2).map(tuple),
    )
    counts = st.lists(count, max_size=3).map(tuple)
    candidates = st.builds(
        GoldenCandidate,
        *(text, count, options, text, text, counts, counts, count, figures, number, number, text),
        st.none() | measured,
    )
    return st.builds(
        lambda found, **more: finished(
            Golden(schema=SCHEMA, digest="", candidates=found, chosen=len(found) - 1, **more)
        ),
        st.lists(candidates, min_size=1, max_size=3).map(tuple),
        made=st.dates(),
        expires=st.dates(),
        commit=text,
        model=st.builds(GoldenModel, text, st.booleans(), text, text),
        target=text,
        devices=count,
        options=options,
        asked=st.builds(GoldenAsked, count, count, count, number, counts, number, number),
        data=named,
        compiler=named,
        rejected=st.lists(st.builds(GoldenRejected, text, text, text), max_size=2).map(tuple),
    )
