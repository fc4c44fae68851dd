"""`sitsc run`: an artifact answers one prompt, its text printed as it comes."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sitsc.commands.generation import generate, load_session, speed_line, timings
from sitsc.commands.output import Json, MemoryLimit, print_json, remark, size_bytes
from sitsc.core.errors import RequestError
from sitsc.core.sampling import SamplingOptions


def run(
    artifact: Annotated[Path, typer.Argument(help="The folder that sitsc compile wrote.")],
    text: Annotated[str, typer.Argument(help='The prompt, or "-" to read it from stdin.')],
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    embed: Annotated[
        bool, typer.Option("--embed", help="Print the vector of TEXT; for encoders.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the best token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many best tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the best that have this share.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the best token's.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The checkpoint, for an artifact without weights.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights, for measuring only.")
    ] = False,
    memory_limit: MemoryLimit = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check every file's checksum first.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Answer TEXT with the model of an artifact."""
    if embed:
        print_embedding(artifact, read_prompt(text), verify, as_json)
        return
    options = SamplingOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    prompt = read_prompt(text)
    loaded = load_session(
        artifact,
        weights,
        verify,
        random_weights=random_weights,
        memory_limit=size_bytes(memory_limit),
    )
    made = generate(loaded.session, prompt, options, chat, _silent if as_json else show)
    if as_json:
        value = {"text": made.text, "token_ids": made.token_ids}
        value |= {"finish_reason": made.finish_reason, "timings": timings(loaded, made)}
        print_json(value)
    else:
        print()
        remark(speed_line(loaded, made))
    if made.finish_reason == "length" and (count := len(made.token_ids)) < max_tokens:
        context = loaded.session.engine.scheduler.context_tokens
        print(
            f"sitsc: the answer was cut after {count} of {max_tokens} tokens: prompt and answer"
            f" share a context of {context} — sitsc compile --max-context sets it",
            file=sys.stderr,
        )


def print_embedding(artifact: Path, text: str, verify: bool, as_json: bool) -> None:
    """Print the vector of a text: numbers in one line, or JSON."""
    from sitsc.runtime.embedding import load_embedder  # noqa: PLC0415  (imports torch)

    embedder = load_embedder(artifact, verify=verify)
    vector = embedder.embed([text])[0].tolist()
    if as_json:
        print_json({"embedding": vector, "num_tokens": len(embedder.token_ids(text))})
    else:
        print(" ".join(f"{value:.8g}" for value in vector))


def read_prompt(text: str) -> str:
    """The prompt of the command line, or of stdin for "-". Raises RequestError."""
    data = sys.stdin.buffer.read() if text == "-" else text.encode(errors="surrogateescape")
    try:
        prompt = data.decode()
    except UnicodeDecodeError:
        raise RequestError("the prompt is not UTF-8 text", hint="convert it first") from None
    if not prompt:
        raise RequestError("the prompt is empty", hint="give some text")
    return prompt


def show(text: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _silent(text: str) -> None:
    del text
