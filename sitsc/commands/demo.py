"""`sitsc demo`: a real model from download to answer, on this machine's CPU."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from sitsc.commands.compile import compile_to, summary_lines
from sitsc.commands.generation import (
    Generation,
    Loaded,
    generate,
    load_session,
    speed_line,
    timings,
)
from sitsc.commands.output import Json, busy, print_json
from sitsc.commands.run import show
from sitsc.core import env
from sitsc.core.errors import ArtifactExistsError, CheckpointError
from sitsc.core.options import CompileOptions
from sitsc.core.sampling import SamplingOptions

QUESTION = "What is the capital of France, and what is it known for?"
MAX_TOKENS = 128


def demo(
    folder: Annotated[Path, typer.Option(help="Where the artifact goes.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """Fetch SmolLM2-135M-Instruct, compile it for the CPU, and let it answer a question."""
    model = _fetch(env.cache_dir() / "models")
    out = folder / "smollm2-135m-cpu.sitsc"
    _remove_old(out)
    compiled = compile_to(model, out, CompileOptions(dtype="bfloat16"))
    if not as_json:
        print("\n".join(summary_lines(compiled)), end="\n\n")
        print(f"> {QUESTION}")
    loaded = load_session(out)
    del loaded.startup["python"]  # it holds the compile
    made = generate(
        loaded.session, QUESTION, SamplingOptions(max_tokens=MAX_TOKENS), True, _shown(as_json)
    )
    if as_json:
        print_json(_value(compiled, loaded, made))
        return
    print(f"\n\n{speed_line(loaded, made)}")
    print(f"Read the plan:  sitsc plan show {out}")
    print(f'Ask it more:    sitsc run {out} --chat "Why is the sky blue?"')


def _fetch(folder: Path) -> Path:
    from sitsc.models.fetch import FetchError, fetch_smollm2  # noqa: PLC0415

    try:
        with busy("fetch"):
            return fetch_smollm2(folder)
    except FetchError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror}") from error


def _remove_old(out: Path) -> None:
    """An artifact of an earlier demo is made anew; anything else is left alone."""
    if (out / "manifest.json").is_file():
        shutil.rmtree(out)
    elif out.exists():
        raise ArtifactExistsError(f"{out} is in the way", hint="choose another --folder")


def _shown(as_json: bool) -> Any:
    return (lambda text: None) if as_json else show


def _value(compiled: dict[str, Any], loaded: Loaded, made: Generation) -> dict[str, Any]:
    return {
        "compile": compiled,
        "question": QUESTION,
        "text": made.text,
        "token_ids": made.token_ids,
        "finish_reason": made.finish_reason,
        "timings": timings(loaded, made),
    }
