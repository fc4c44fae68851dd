"""`sitsc run`: an artifact answers one prompt, its text printed as it comes."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sitsc.commands.generation import Loaded, generate, load_session, speed_line, timings
from sitsc.commands.output import Json, MemoryLimit, print_json, remark, size_bytes
from sitsc.commands.ranks import follows, start_ranks
from sitsc.core.errors import RequestError
from sitsc.core.sampling import SamplingOptions

_Artifact = Annotated[Path, typer.Argument(help="The folder that sitsc compile wrote.")]
_Text = Annotated[str, typer.Argument(help='The prompt, or "-" to read it from stdin.')]
_Chat = Annotated[
    bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
]
_Embed = Annotated[bool, typer.Option("--embed", help="Print the vector of TEXT; for encoders.")]
_MaxTokens = Annotated[int, typer.Option(help="Tokens of the answer.")]
_Temperature = Annotated[float, typer.Option(help="0 takes the best token.")]
_TopK = Annotated[int, typer.Option(help="Draw from so many best tokens; 0: all.")]
_TopP = Annotated[float, typer.Option(help="Draw from the best that have this share.")]
_MinP = Annotated[float, typer.Option(help="Least share of the best token's.")]
_Penalty = Annotated[float, typer.Option(help="Above 1: repeat less.")]
_Seed = Annotated[int | None, typer.Option(help="The same seed draws the same text.")]
_Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")]
_Weights = Annotated[
    Path | None, typer.Option(help="The checkpoint, for an artifact without weights.")
]
_Random = Annotated[
    bool, typer.Option("--random-weights", help="Random weights, for measuring only.")
]
_Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Check every file's checksum first.")
]
_Nproc = Annotated[
    int, typer.Option(help="Start so many ranks here, for an artifact of several; 0: be one.")
]
_Port = Annotated[int, typer.Option(help="Where the ranks of --nproc meet; 0: a free port.")]


def run(
    artifact: _Artifact,
    text: _Text,
    chat: _Chat = False,
    embed: _Embed = False,
    max_tokens: _MaxTokens = 256,
    temperature: _Temperature = 0.0,
    top_k: _TopK = 0,
    top_p: _TopP = 1.0,
    min_p: _MinP = 0.0,
    repetition_penalty: _Penalty = 1.0,
    seed: _Seed = None,
    stop: _Stop = None,
    weights: _Weights = None,
    random_weights: _Random = False,
    memory_limit: MemoryLimit = None,
    verify: _Verify = True,
    nproc: _Nproc = 0,
    port: _Port = 0,
    as_json: Json = False,
) -> None:
    """Answer TEXT with the model of an artifact."""
    if nproc or port:
        raise typer.Exit(start_ranks(artifact, nproc, port))
    limit = size_bytes(memory_limit)
    more: dict[str, Any] = {"random_weights": random_weights, "memory_limit": limit}
    if follows():
        load_session(artifact, weights, verify, **more).session.serve()
        return
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
    loaded = load_session(artifact, weights, verify, **more)
    try:
        print_answer(loaded, prompt, options, chat, as_json)
    finally:
        loaded.session.close()


def print_answer(
    loaded: Loaded, prompt: str, options: SamplingOptions, chat: bool, as_json: bool
) -> None:
    """Generate and print: text as it comes and the speed after it, or JSON at the end."""
    made = generate(loaded.session, prompt, options, chat, _silent if as_json else show)
    if as_json:
        value = {"text": made.text, "token_ids": made.token_ids}
        value |= {"finish_reason": made.finish_reason, "timings": timings(loaded, made)}
        print_json(value)
    else:
        print()
        remark(speed_line(loaded, made))
    if made.finish_reason == "length" and (count := len(made.token_ids)) < options.max_tokens:
        context = loaded.session.engine.scheduler.context_tokens
        print(
            f"sitsc: the answer was cut after {count} of {options.max_tokens} tokens: prompt and"
            f" answer share a context of {context} — sitsc compile --max-context sets it",
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
