"""`sitsc serve`: real requests to a real process, its end, and what it measured."""

import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from sitsc.core.actual import actual_place, read_actual
from sitsc.core.artifact import open_artifact
from sitsc.core.options import CompileOptions
from sitsc.core.sampling import SamplingOptions
from sitsc.pipeline import compile_model
from sitsc.runtime.loader import load
from tests.commands.artifact_edits import copy
from tests.commands.command_line import call, spawn, start

HELLO: Any = [{"role": "user", "content": "hello"}]
LONG_S = 120
CONTEXT = 512  # of the small Llama


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, its process and its port."""

    process: "subprocess.Popen[str]"
    port: int

    @property
    def client(self) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """POST what is given (GET for None); status and JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        fields = {"Content-Type": "application/json"} | headers
        connection.request("GET" if body is None else "POST", path, data, fields)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        kind = answer.headers.get("Content-Type", "")
        return answer.status, json.loads(text) if "json" in kind else text

    def metric(self, name: str, **labels: str) -> float:
        lines = self.ask("/metrics")[1].splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [
            x for x in lines if x.startswith(f"sitsc_{name}{{") and all(w in x for w in wanted)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        """Ask it to end; exit code and what it printed after its first line."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, out, err


@contextmanager
def serving(artifact: Path, *options: object) -> Iterator[Server]:
    process = start("serve", artifact, "--port", 0, *options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " on http://127.0.0.1:" in line, (line, process.communicate()[1])
        yield Server(process, int(line.split(",")[0].rpartition(":")[2]))
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=LONG_S)


@pytest.fixture(scope="module")
def server(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    place = tmp_path_factory.mktemp("serve") / "actual.json"
    with serving(tiny_artifact, "--model", "tiny", "--actual", place) as made:
        yield made
        assert made.end()[0] == 0


@pytest.fixture(scope="module")
def answers(tiny_artifact: Path) -> dict[str, str]:
    """What the engine says without a server."""
    session = load(tiny_artifact)
    options = SamplingOptions(max_tokens=12)
    chat = session.chat_prompt(HELLO)
    pieces = session.engine.generate(chat, options, add_bos=False)
    (plain,) = session.engine.generate_batch(["hello"], options)
    return {"plain": plain.text, "chat": "".join(piece.new_text for piece in pieces)}


def test_answers_are_those_of_the_engine(server: Server, answers: dict[str, str]):
    """By the API's own client: whole and in pieces, plain and chat."""
    more: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    whole = server.client.completions.create(prompt="hello", **more)
    assert whole.choices[0].text == answers["plain"]
    assert whole.choices[0].finish_reason == "length" and whole.usage is not None
    assert whole.usage.completion_tokens == 12
    stream = server.client.completions.create(prompt="hello", stream=True, **more)
    pieces = list(stream)
    assert "".join(piece.choices[0].text for piece in pieces) == answers["plain"]
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    chat = server.client.chat.completions.create(messages=HELLO, **more)
    assert chat.choices[0].message.content == answers["chat"]
    told = server.client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **more
    )
    *chunks, last = list(told)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answers["chat"] and chunks[0].choices[0].delta.role == "assistant"
    assert last.usage is not None and last.usage.completion_tokens == 12


def test_several_prompts_with_several_answers(server: Server):
    """Each by its index, a seed giving the same again."""
    body = {"prompt": ["one", "two"], "n": 2, "seed": 3, "max_tokens": 5}
    (status, first), (_, second) = (server.ask("/v1/completions", body) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert status == 200 and [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert texts == [choice["text"] for choice in second["choices"]] and len(set(texts)) > 1
    assert first["usage"]["completion_tokens"] == 20


def test_many_at_once(server: Server, answers: dict[str, str]):
    """Answers do not depend on who else is served."""
    found: list[Any] = []
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12}

    def one() -> None:
        found.append(server.ask("/v1/completions", body)[1]["choices"][0]["text"])

    threads = [threading.Thread(target=one) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [answers["plain"]] * 24


@pytest.mark.parametrize(
    "path, body, status, part, param",
    [
        ("completions", b'{"prompt": "x"', 400, "not JSON at character 14", None),
        ("completions", b'{"prompt":' + b"[" * 50_000, 400, "parsing the body", None),
        ("completions", b"\xff\xfe", 400, "body", None),
        ("completions", {}, 400, "prompt: Field required", "prompt"),
        ("completions", {"prompt": ""}, 400, "the prompt is empty", None),
        ("completions", {"prompt": []}, 400, "the prompt is empty", None),
        ("completions", {"prompt": [10**9]}, 400, "not all in the vocabulary", None),
        ("completions", {"prompt": [5] * 9000}, 400, "the context holds", None),
        ("completions", b'{"prompt": "\\ud800"}', 400, "cannot be encoded", None),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "from 0 to 100", "temperature"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "1 or more", "max_tokens"),
        ("completions", {"prompt": "x", "n": 0}, 400, "greater than or equal to 1", "n"),
        ("completions", {"prompt": "x", "best_off": 1}, 400, "is no option", "best_off"),
        ("completions", {"prompt": "x", "logprobs": 5}, 400, "is not supported", "logprobs"),
        ("completions", {"prompt": "x", "model": "gpt"}, 404, "this server has 'tiny'", None),
        ("chat/completions", {"messages": []}, 400, "at least 1 item", "messages"),
        ("chat/completions", {"messages": [{}]}, 400, "the chat template refuses", None),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "compiled for text alone",
            None,
        ),
        ("completions", {"prompt": "x", "temperature": True}, 400, "temperature", "temperature"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "has no text",
            None,
        ),
        ("completion", {"prompt": "x"}, 404, "Not Found", None),
        ("completions/", {"prompt": "x"}, 404, "Not Found", None),
        ("completions", b" " * 4_000_000, 413, "larger than", None),
    ],
)
def test_mistakes_are_told(
    server: Server, path: str, body: Any, status: int, part: str, param: str | None
):
    found, value = server.ask(f"/v1/{path}", body)
    error = value["error"]
    assert (found, error["code"], error["param"]) == (status, status, param)
    assert part in error["message"] and "\n" not in error["message"]


def test_what_it_says_of_itself(server: Server):
    assert server.ask("/health") == (200, {"status": "ready"})
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.ask("/v1/models/tiny")[1]["max_model_len"] > 0
    assert server.ask("/v1/models/other")[0] == 404
    assert server.ask("/v1/completions")[0] == 405
    version = server.ask("/version")[1]
    assert version["target"] == "cpu" and len(version["plan"]) == 64


def test_metrics_count_requests_and_tokens(server: Server):
    before = server.metric("generated_tokens_total"), server.metric("requests_total", status="400")
    server.ask("/v1/completions", {"prompt": "hello", "max_tokens": 7, "ignore_eos": True})
    server.ask("/v1/completions", {"prompt": "hello", "max_tokens": -7})
    assert server.metric("generated_tokens_total") == before[0] + 7
    assert server.metric("requests_total", status="400") == before[1] + 1
    assert server.metric("ttft_seconds_count") > 0 and server.metric("kv_pages") > 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_fails_late_is_counted_once(server: Server, stream: bool):
    """The engine refuses what overflows its numbers."""
    names = ("requests_total", "request_seconds_count", "answers_total")
    before = [server.metric(name) for name in names]
    body = {"prompt": "hello", "repetition_penalty": 1e-42, "stream": stream}
    status, answer = server.ask("/v1/completions", body)
    assert (status, "error" in answer) == (200 if stream else 400, True)
    server.until(lambda: [server.metric(name) for name in names] == [n + 1 for n in before])
    assert server.metric("answers_total", reason="error") >= 1


def test_parts_of_text_are_text(server: Server):
    """As many clients send it, whatever the template reads."""
    body = {"temperature": 0, "max_tokens": 5}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    texts = [
        server.ask("/v1/chat/completions", body | {"messages": [{"role": "user", "content": c}]})
        for c in ("hello", parts)
    ]
    (_, first), (_, second) = texts
    assert first["choices"] == second["choices"] and first["usage"] == second["usage"]


def test_a_long_text_does_not_hold_up_streams(server: Server):
    """It is refused after its ids were made, while others are served."""
    found: list[int] = []
    limit = 1 << 20
    body = {"prompt": "the cat sat " * (limit // 12)}
    thread = threading.Thread(target=lambda: found.append(server.ask("/v1/completions", body)[0]))
    asked = time.monotonic()
    thread.start()
    longest = 0.0
    while thread.is_alive():
        begin = time.monotonic()
        server.ask("/health")
        longest = max(longest, time.monotonic() - begin)
    thread.join()
    whole = time.monotonic() - asked
    assert (found, longest < 0.5 * whole) == ([400], True), (longest, whole)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(server: Server, stream: bool):
    """All of its pages are free again, long before the answer would have ended."""
    pages = server.metric("kv_pages")
    body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    data = json.dumps(body)
    gone = server.metric("requests_total", status="499")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        server.until(lambda: server.metric("running") == 1)
    server.until(lambda: server.metric("kv_pages_free") == pages)
    assert server.metric("requests_total", status="499") == gone + 1


def begin(server: Server, found: list[Any], answers: int = 1) -> threading.Thread:
    """Ask for answers in the background, as long as the context allows; they are being computed."""
    body = {"prompt": "hello", "max_tokens": 10_000, "ignore_eos": True, "n": answers}
    thread = threading.Thread(target=lambda: found.append(server.ask("/v1/completions", body)))
    thread.start()
    server.until(lambda: server.metric("running") == answers)
    return thread


def test_open_answers_end_before_the_server(tiny_artifact: Path, tmp_path: Path):
    """New ones are refused meanwhile; what was measured is kept beside the artifact."""
    artifact = copy(tiny_artifact, tmp_path)
    with serving(artifact) as server:
        found: list[Any] = []
        thread = begin(server, found)
        server.process.send_signal(signal.SIGINT)
        server.until(lambda: server.ask("/health") == (503, {"status": "ending"}))
        status, refused = server.ask("/v1/completions", {"prompt": "hello"})
        assert status == 503 and "the server is ending" in refused["error"]["message"]
        thread.join()
        out, err = server.process.communicate(timeout=LONG_S)
        assert (server.process.returncode, err) == (0, "") and "measured" in out
        ((status, answer),) = found
        assert status == 200 and answer["usage"]["total_tokens"] == CONTEXT
        actual = read_actual(actual_place(artifact))
        kinds = {point.kind for point in actual.points}
        assert kinds == {"tpot", "cold_start"} and actual.memory is not None
        shown = spawn("plan", "show", artifact, "--actual")
        assert shown.code == 0 and "serve_bs1_ctx" in shown.out and "serve_start_s" in shown.out


def test_what_is_open_too_long_is_told(tiny_artifact: Path, tmp_path: Path):
    """With room for one answer more than the batch; nothing was measured that could be kept."""
    place = tmp_path / "actual.json"
    with serving(tiny_artifact, "--drain", 0, "--max-waiting", 0, "--actual", place) as server:
        batch = open_artifact(tiny_artifact).plan.schedule.max_batch
        found: list[Any] = []
        thread = begin(server, found, batch)
        status, refused = server.ask("/v1/completions", {"prompt": "hello"})
        assert status == 503 and f"the server takes {batch}" in refused["error"]["message"]
        status, refused = server.ask("/v1/completions", {"prompt": "hello", "n": batch + 1})
        assert status == 400 and "a smaller n" in refused["error"]["message"]
        code, _, err = server.end()
        thread.join()
        assert (code, err) == (0, "") and [status for status, _ in found] == [503]
        assert "has ended before the answer" in found[0][1]["error"]["message"]


def test_without_the_process_that_speaks_http_it_ends(tiny_artifact: Path):
    with serving(tiny_artifact) as server:
        (child,) = psutil.Process(server.process.pid).children()
        child.kill()
        out, err = server.process.communicate(timeout=LONG_S)
        assert server.process.returncode == 1 and out == ""
        assert err.startswith("sitsc: the process that speaks HTTP ") and len(err.splitlines()) == 1


def test_without_the_engine_open_answers_fail(tiny_artifact: Path):
    """And the other process does not stay behind."""
    with serving(tiny_artifact) as server:
        (child,) = psutil.Process(server.process.pid).children()
        found: list[Any] = []
        thread = begin(server, found)
        server.process.kill()
        thread.join()
        assert found == [(500, {"error": found[0][1]["error"]})]
        assert found[0][1]["error"]["message"] == "the engine has ended"
        child.wait(LONG_S)


def test_ranks_serve_together(tiny_checkpoint: Path, tmp_path: Path, answers: dict[str, str]):
    artifact = tmp_path / "two.sitsc"
    compile_model(tiny_checkpoint, artifact, CompileOptions(tp=2))
    with serving(artifact, "--nproc", 2) as server:
        body = {"prompt": "hello", "temperature": 0, "max_tokens": 12}
        found: list[Any] = []
        thread = begin(server, found)
        status, answer = server.ask("/v1/completions", body)
        assert (status, answer["choices"][0]["text"]) == (200, answers["plain"])
        code, _, err = server.end()
        thread.join()
        assert (code, err) == (0, "") and found[0][0] == 200
        assert found[0][1]["usage"]["total_tokens"] == CONTEXT


def test_a_port_in_use_is_told_before_anything_is_loaded(tiny_artifact: Path, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = call(capfd, "serve", tiny_artifact, "--port", port)
        result.refused(2, f"127.0.0.1:{port} cannot be listened on", "another --port")


@pytest.mark.parametrize(
    "options, part",
    [
        (("--port", 70_000), "--port"),
        (("--host", "no.such.host.invalid"), "cannot be listened on"),
        (("--drain", -1), "--drain"),
        (("--nproc", 2), "the artifact is for 1 rank"),
        (("--memory-limit", "many"), "many"),
        (("--weights", "/nowhere"), "is not a folder"),
    ],
)
def test_options_that_cannot_be(tiny_artifact: Path, capfd, options: tuple[Any, ...], part: str):
    call(capfd, "serve", tiny_artifact, "--port", 0, *options).refused(2, part)


def test_an_artifact_that_is_none(tmp_path: Path, capfd):
    call(capfd, "serve", tmp_path, "--port", 0).refused(2, "is not an artifact")


def test_packages_that_are_missing_are_named(
    tiny_artifact: Path, capfd, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = call(capfd, "serve", tiny_artifact)
    result.refused(2, "needs fastapi", "pip install 'sitsc[serve]'")
