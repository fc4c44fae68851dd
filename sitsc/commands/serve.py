"""`sitsc serve`: an artifact answers over HTTP, as clients of the OpenAI API ask."""

import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sitsc.commands.generation import load_session, process_age_s
from sitsc.commands.output import Json, MemoryLimit, print_json, size_bytes
from sitsc.commands.ranks import follows, start_ranks
from sitsc.commands.serve_actual import serve_actual, start_point, torch_bytes
from sitsc.core.actual import actual_place, keep_actual
from sitsc.core.errors import ExecutionError, OptionError
from sitsc.core.plan import PLAIN
from sitsc.core.sampling import SamplingOptions

if TYPE_CHECKING:
    from sitsc.core.artifact import Artifact
    from sitsc.runtime.loader import Session
    from sitsc.runtime.server.front_process import FrontProcess
    from sitsc.runtime.server.serve_times import ServeTimes

_RANK_OPTIONS = ("--nproc", "--rank-port")


def serve(
    artifact: Annotated[Path, typer.Argument(help="The folder that sitsc compile wrote.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0: a free one.", min=0, max=65535)
    ] = 8000,
    model: Annotated[str, typer.Option(help="Name that requests use; else the folder's.")] = "",
    max_waiting: Annotated[
        int, typer.Option(help="Answers that may wait beyond the batch; more get 503.", min=0)
    ] = 1024,
    drain: Annotated[
        float, typer.Option(help="Seconds left to open answers when it is ended.", min=0)
    ] = 30.0,
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
    nproc: Annotated[
        int, typer.Option(help="Start so many ranks here, for an artifact of several; 0: be one.")
    ] = 0,
    rank_port: Annotated[
        int, typer.Option(help="Where the ranks of --nproc meet; 0: a free port.")
    ] = 0,
    actual: Annotated[
        Path | None, typer.Option(help="Where to keep what was measured; else ART.actual.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve an artifact over HTTP until SIGINT or SIGTERM: completions, chats, health, metrics."""
    from sitsc.runtime.server.front_process import check_packages  # noqa: PLC0415

    check_packages()
    if not math.isfinite(drain):
        raise OptionError(f"--drain {drain} is no time", hint="seconds, such as 30")
    if rank_port and not nproc:
        raise OptionError("--rank-port without --nproc", hint="say how many ranks to start")
    if nproc:
        raise typer.Exit(start_ranks(artifact, nproc, rank_port, _RANK_OPTIONS, drain))
    limit = size_bytes(memory_limit)
    loading = _Loading(artifact, weights, random_weights, limit, verify)
    if follows():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 says when to end
        loading.session().serve()
        return
    _serve(loading, _Asked(host, port, model, max_waiting, drain, actual, as_json))


@dataclass(frozen=True, slots=True)
class _Loading:
    """What is served, and how it is loaded."""

    root: Path
    weights: Path | None
    random_weights: bool
    memory_limit: int | None
    verify: bool

    def session(self) -> "Session":
        """The session. Raises SitscError."""
        loaded = load_session(
            self.root,
            self.weights,
            self.verify,
            random_weights=self.random_weights,
            memory_limit=self.memory_limit,
        )
        return loaded.session


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of one server."""

    host: str
    port: int
    model: str
    max_waiting: int
    drain_s: float
    actual: Path | None
    as_json: bool


def _serve(loading: _Loading, asked: _Asked) -> None:
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415
    from sitsc.runtime.server.front_process import FrontProcess, listen  # noqa: PLC0415

    listening = listen(asked.host, asked.port)
    opened = open_artifact(loading.root)
    if opened.plan.kind == PLAIN:
        from sitsc.runtime.loader import check_decoder  # noqa: PLC0415  (torch: seconds)

        check_decoder(opened)
    name = asked.model or opened.root.name.removesuffix(".sitsc")
    url = _url(asked.host, listening.getsockname()[1])
    with FrontProcess(listening, _hello(opened, name, asked.max_waiting)) as front:
        torch_only = torch_bytes(opened.plan)
        session = loading.session()
        try:
            front.check()
            _first_token(session)
            started = process_age_s()
            ready = {"model": name, "url": url, "first_token_s": started}
            points = _run(session, front, asked, ready | {"plan": opened.plan.sha256()}).points()
        finally:
            session.close()
    if points:
        points += (start_point(opened.plan, started, not loading.random_weights),)
        actual = serve_actual(opened.plan, name, points, torch_only)
        kept = keep_actual(actual, asked.actual or actual_place(loading.root))
        if not asked.as_json:
            print(f"measured {len(points)} figures: {kept}")


def _run(
    session: "Session", front: "FrontProcess", asked: _Asked, ready: dict[str, Any]
) -> "ServeTimes":
    """Serve until the end was asked for; what was measured. `ready` is told. Raises SitscError."""
    from sitsc.runtime.server.engine_service import EngineService  # noqa: PLC0415

    def listening() -> None:
        if asked.as_json:
            print_json(ready)
        else:
            first = f"first token {ready['first_token_s']:.2f} s after the process started"
            print(f"{ready['model']} on {ready['url']}, {first}")
        sys.stdout.flush()

    service = EngineService(session.engine, front.pipe, asked.drain_s, listening)
    service.end_by_signals()
    try:
        service.run()
    except ExecutionError:
        front.check()
        raise
    return service.times


def _hello(opened: "Artifact", name: str, max_waiting: int) -> dict[str, Any]:
    """What the process that speaks HTTP has to know."""
    from sitsc.core import artifact as files  # noqa: PLC0415

    plan = opened.plan.of_rank(0)  # sizes of one device
    paths = {
        key: str(opened.file(file)) if opened.has(file) else ""
        for key, file in (
            ("tokenizer", files.TOKENIZER),
            ("template", files.CHAT_TEMPLATE),
            ("special", files.SPECIAL),
        )
    }
    pages = plan.memory.kv_pages
    return paths | {
        "model": name,
        "context_tokens": min(plan.tokens.max_context, pages * plan.kv[0].page_tokens),
        "vocab_size": plan.tokens.vocab_size,
        "kv_pages": pages,
        "most_open": plan.schedule.max_batch + max_waiting,
        "facts": {
            "target": plan.target.name,
            "plan": opened.plan.sha256(),
            "runs": opened.plan.runs(),
        },
    }


def _first_token(session: "Session") -> None:
    """Generate one token: ready means that the whole way works. Raises SitscError."""
    for output in session.engine.generate([0], SamplingOptions(max_tokens=1, ignore_eos=True)):
        if output.error is not None:
            raise output.error


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
