#!/usr/bin/env python3
"""gend with real SGLang on real GPUs: what only a GPU can show.

    tools/gpu_trial.py faults --model MODEL --gpus 0,1     a scheduler killed, one stopped; verify; GPUs empty after
    tools/gpu_trial.py speed --model MODEL --gpus 0         tokens/s through gend, against SGLang's own client
    tools/gpu_trial.py scale --model MODEL --gpus 0,1,...   one server alone against all of them

Options for every kind: --rows, --max-tokens, --flag NAME=VALUE (again and again), --env NAME=VALUE, --out FOLDER (where
logs and the table go), --port BASE. The store is a folder. Dummy weights are fine: the alarm and retries are off.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from gend.engine import request_body
from gend.records import Sampling

GEND = [sys.executable, "-m", "gend"]


class Trial:
    """One daemon with a configuration of its own."""

    def __init__(self, options: argparse.Namespace, name: str, gpus: list[int]):
        self.options, self.gpus = options, gpus
        self.folder = options.out / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config = self.folder / "config.toml"
        flags = dict(flag.split("=", 1) if "=" in flag else (flag, "true") for flag in options.flag)
        environment = dict(pair.split("=", 1) for pair in options.env)
        plain = ("true", "false")
        shown = [value if value in plain or number(value) else json.dumps(value) for value in flags.values()]
        self.config.write_text(
            f"[model]\npath = {json.dumps(options.model)}\n"
            f"[servers]\ngpus = {gpus}\nbase_port = {options.port}\nwarm_first = {str(options.warm_first).lower()}\n"
            f"flags = {{ {', '.join(f'{key} = {value}' for key, value in zip(flags, shown, strict=True))} }}\n"
            f"environment = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in environment.items())} }}\n"
            f'[store]\nurl = "file://{self.folder}/store"\n'
            f'[work]\nfolder = "{self.folder}/state"\nbatch_size = {options.batch_size}\n'
            f"[sampling]\nmax_tokens = {options.max_tokens}\nthinking = true\n"
            '[alarm]\naction = "off"\n[page]\nport = 0\n'
            "[verdicts]\nempty = 0\nunclosed = 0\nloop = 0\njunk = 0\nno_thinking = 0\n"
        )
        self.environment = {**os.environ, "GEND_CONFIG": str(self.config)}
        self.daemon: subprocess.Popen[bytes] | None = None

    def gend(self, *arguments: str, check: bool = True) -> str:
        answer = subprocess.run([*GEND, *arguments], env=self.environment, capture_output=True, text=True)
        if check and answer.returncode:
            said = f"{answer.stdout}{answer.stderr}"
            raise SystemExit(f"gend {' '.join(arguments)} ended with {answer.returncode}:\n{said}")
        return answer.stdout

    def up(self) -> float:
        """Start the daemon; seconds until every server is ready."""
        started = time.monotonic()
        with open(self.folder / "up.log", "ab") as log:
            self.daemon = subprocess.Popen([*GEND, "up"], env=self.environment, stdout=log, stderr=log)
        while sum(server["state"] == "ready" for server in self.status()["servers"]) < len(self.gpus):
            if self.daemon.poll() is not None:
                raise SystemExit(f"gend ended:\n{(self.folder / 'up.log').read_text()[-4000:]}")
            time.sleep(1.0)
        return time.monotonic() - started

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.gend("status", "--json")))

    def enqueue(self, name: str, rows: int, words: int = 60) -> str:
        source = self.folder / f"{name}.jsonl"
        with open(source, "w") as out:
            for index in range(rows):
                text = f"{name} task {index}: " + " ".join(f"word{index * 7919 + w}" for w in range(words // 3))
                out.write(json.dumps({"id": f"{name}-{index}", "messages": [{"role": "user", "content": text}]}) + "\n")
        return str(json.loads(self.gend("enqueue", str(source), "--name", name, "--json"))["run"])

    def finish(self, run: str, seconds: float = 3600.0) -> float:
        """Wait for a run; gives the seconds it took."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            shown = next(each for each in self.status()["runs"] if each["id"] == run)
            if shown["state"] == "finished":
                return time.monotonic() - started
            time.sleep(0.5)
        raise SystemExit(f"run {run} is not finished after {seconds:.0f} s: {shown}")

    def wait(self, seconds: float, what: str, condition: Any) -> float:
        """Seconds until `condition(status)` holds."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            if condition(self.status()):
                return time.monotonic() - started
            time.sleep(0.25)
        print(f"waited {seconds:.0f} s in vain for {what}", flush=True)
        return float("nan")

    def scheduler(self, index: int) -> psutil.Process:
        port = str(self.options.port + 10 * index)
        assert self.daemon is not None
        for server in psutil.Process(self.daemon.pid).children():
            if port in server.cmdline():
                for child in server.children(recursive=True):
                    if (child.cmdline() or [""])[0].startswith("sglang::scheduler"):
                        return child
        raise SystemExit(f"no scheduler of the server on port {port}")

    def down(self) -> float:
        assert self.daemon is not None
        started = time.monotonic()
        self.daemon.send_signal(signal.SIGTERM)
        self.daemon.wait(180)
        return time.monotonic() - started


def number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def say(what: str, value: object) -> None:
    print(f"| {what} | {value} |", flush=True)


def gpu_memory() -> str:
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader"]
    return "; ".join(subprocess.check_output(query, text=True).split("\n")).strip("; ")


def named() -> list[tuple[int, str]]:
    """Every process with its name; SGLang names its parts sglang::..."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.append((process.pid, (process.cmdline() or [process.name()])[0]))
    return found


def server_tokens(port: int) -> float:
    """Tokens that a server says it has generated."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("sglang:generation_tokens_total"))


def faults(options: argparse.Namespace) -> None:
    """Rows on every GPU; one scheduler killed, one stopped; everything must be there at the end."""
    trial = Trial(options, "faults", options.gpus)
    say("from `gend up` to all servers ready", f"{trial.up():.0f} s")
    run = trial.enqueue("faults", options.rows)
    trial.wait(120, "rows in flight everywhere", lambda s: all(server["in_flight"] for server in s["servers"]))
    time.sleep(5)
    victim = trial.scheduler(0)
    victim.kill()
    killed = time.monotonic()
    trial.wait(60, "its rows to be elsewhere", lambda s: s["servers"][0]["in_flight"] == 0)
    say("scheduler killed: its rows given back after", f"{time.monotonic() - killed:.1f} s")
    trial.wait(60, "loading again", lambda s: s["servers"][0]["restarts"] >= 1)
    say("scheduler killed: loading again after", f"{time.monotonic() - killed:.1f} s")
    trial.wait(300, "ready again", lambda s: s["servers"][0]["state"] == "ready")
    say("scheduler killed: ready again after", f"{time.monotonic() - killed:.0f} s")
    last = len(options.gpus) - 1
    trial.wait(60, "rows in flight", lambda s: s["servers"][last]["in_flight"] > 0)
    before = trial.status()["servers"][last]["restarts"]
    trial.scheduler(last).send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    trial.wait(120, "the hang to be noticed", lambda s: s["servers"][last]["state"] not in ("ready",))
    say("scheduler stopped: noticed after", f"{time.monotonic() - stopped:.1f} s")
    trial.wait(120, "loading again", lambda s: s["servers"][last]["restarts"] > before)
    trial.finish(run)
    say("verify", trial.gend("verify", run, check=False).replace("\n", "; "))
    say("gend down", f"{trial.down():.1f} s")
    say("GPU memory after", gpu_memory())
    say("SGLang processes left", [pid for pid, name in named() if name.startswith("sglang::")] or "none")


class Busy(threading.Thread):
    """How long a server has had something to run: from its first running request to its last, to 0.1 s."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self.url = f"http://127.0.0.1:{port}/v1/loads"
        self.first = self.last = 0.0
        self.most = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.1):
            with urllib.request.urlopen(self.url, timeout=10) as answer:
                running = json.loads(answer.read())["loads"][0]["num_running_reqs"]
            if running:
                self.first, self.last = self.first or time.monotonic(), time.monotonic()
                self.most = max(self.most, running)

    def __enter__(self) -> "Busy":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    @property
    def seconds(self) -> float:
        return self.last - self.first


def speed(options: argparse.Namespace) -> None:
    """Tokens/s through gend and through SGLang's own client: the same requests to the same server, in turn.

    gend is timed by the server, from its first running request to its last, so its canaries and its end count.
    bench_serving times itself in the same way, after a first request that it makes to see whether all is well.
    """
    trial = Trial(options, "speed", options.gpus[:1])
    say("from `gend up` to ready", f"{trial.up():.0f} s")
    loads = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{options.port}/v1/loads").read())["loads"][0]
    say("running requests, KV tokens", f"{loads['max_running_requests']}, {loads['max_total_num_tokens']}")
    warm = trial.enqueue("warm", 64)
    trial.finish(warm)
    for turn in range(options.turns):
        made = server_tokens(options.port)
        with Busy(options.port) as busy:
            run = trial.enqueue(f"speed{turn}", options.rows)
            trial.finish(run)
        tokens = server_tokens(options.port) - made
        mine = tokens / busy.seconds
        told = f"{tokens:.0f} tokens in {busy.seconds:.1f} s, {busy.most} running at most"
        say(f"gend, turn {turn}", f"{options.rows} rows, {told}: {mine:.0f} tokens/s")
        if options.bench_serving:
            said = bench_serving(options, trial, turn, options.concurrency or loads["max_running_requests"])
            theirs, told = said["output_throughput"], f"{options.rows} rows in {said['duration']:.1f} s"
            say(f"bench_serving, turn {turn}", f"{told}: {theirs:.0f} tokens/s")
            say("gend / bench_serving", f"{mine / theirs:.3f}")
    say("gend down", f"{trial.down():.1f} s")
    say("GPU memory after", gpu_memory())


def bench_serving(options: argparse.Namespace, trial: Trial, turn: int, concurrency: int) -> dict[str, Any]:
    """SGLang's own client with the requests that gend has just sent, seeds apart; its figures."""
    requests, figures = trial.folder / f"requests{turn}.jsonl", trial.folder / f"bench_serving{turn}.jsonl"
    with open(trial.folder / f"speed{turn}.jsonl") as prompts, open(requests, "w") as out:
        for line in prompts:
            sampling = Sampling(max_tokens=options.max_tokens, thinking=True)
            body = json.loads(request_body(options.model, json.loads(line)["messages"], None, sampling, 1))
            out.write(json.dumps(body) + "\n")
    command = [
        sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat", "--host", "127.0.0.1",
        "--port", str(options.port), "--dataset-name", "openai", "--dataset-path", str(requests),
        "--sharegpt-output-len", str(options.max_tokens), "--num-prompts", str(options.rows),
        "--max-concurrency", str(concurrency), "--disable-stream", "--disable-tqdm", "--disable-ignore-eos",
        "--warmup-requests", "0", "--model", options.model, "--output-file", str(figures),
    ]  # fmt: skip
    environment = {**os.environ, **dict(pair.split("=", 1) for pair in options.env)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.bench_seconds)
    (trial.folder / f"bench_serving{turn}.log").write_text(answer.stdout + answer.stderr)
    return dict(json.loads(figures.read_text().splitlines()[-1]))


def scale(options: argparse.Namespace) -> None:
    """Tokens/s of one server alone, then of all together; cold and warm starts; CPU of SGLang and of gend."""
    alone = Trial(options, "alone", options.gpus[:1])
    say("one server, cold: ready after", f"{alone.up():.0f} s")
    one = measure(alone, options.rows // len(options.gpus))
    alone.down()
    together = Trial(options, "together", options.gpus)
    say(f"{len(options.gpus)} servers: ready after", f"{together.up():.0f} s")
    every = measure(together, options.rows)
    say("scaling", f"{every / one / len(options.gpus):.3f} of {len(options.gpus)} times one")
    run = together.enqueue("killed", options.rows // 2)
    together.wait(60, "rows in flight", lambda s: all(server["in_flight"] for server in s["servers"]))
    together.scheduler(0).kill()
    together.finish(run)
    say("verify after a killed scheduler", together.gend("verify", run, check=False).replace("\n", "; "))
    together.down()
    say("GPU memory after", gpu_memory())


def measure(trial: Trial, rows: int) -> float:
    assert trial.daemon is not None
    trial.finish(trial.enqueue("warm", 32 * len(trial.gpus)))
    ports = [trial.options.port + 10 * index for index in range(len(trial.gpus))]
    before, made, started = cpu(trial.daemon.pid), sum(map(server_tokens, ports)), time.monotonic()
    trial.finish(trial.enqueue(f"rows{len(ports)}", rows))
    seconds, tokens = time.monotonic() - started, sum(map(server_tokens, ports)) - made
    after = cpu(trial.daemon.pid)
    cores = {kind: (after[kind] - before[kind]) / seconds for kind in after}
    shown = f"cores: SGLang {cores['sglang']:.2f}, gend {cores['gend']:.2f}"
    say(f"{len(ports)} servers", f"{tokens / seconds:.0f} tokens/s; {shown}")
    return tokens / seconds


def cpu(pid: int) -> dict[str, float]:
    """CPU seconds of SGLang and of gend's own processes."""
    seconds = {"sglang": 0.0, "gend": 0.0}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            times, kind = process.cpu_times(), "sglang" if "sglang" in " ".join(process.cmdline()) else "gend"
        except psutil.Error:
            continue
        seconds[kind] += times.user + times.system
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["faults", "speed", "scale"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpus", type=lambda text: [int(gpu) for gpu in text.split(",")], default=[0])
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path("/tmp/gend-gpu-trial"))
    parser.add_argument("--port", type=int, default=21000)
    parser.add_argument("--warm-first", action="store_true")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--bench-serving", action="store_true")
    parser.add_argument("--bench-seconds", type=float, default=240.0)
    options = parser.parse_args()
    options.out = options.out.absolute()
    print(f"# {options.kind}: {options.model}, GPUs {options.gpus}, {options.rows} rows of {options.max_tokens} tokens")
    {"faults": faults, "speed": speed, "scale": scale}[options.kind](options)


if __name__ == "__main__":
    main()
