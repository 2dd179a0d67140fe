"""gend as a service: under a real systemd, as a container's first process, without its terminal, put on a box.

Most of it needs root, and pids and mounts of its own; it is skipped where the machine gives none.
"""

import contextlib
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import processes
from harness.daemon import REPO, Daemon, toml
from harness.processes import wait_until
from harness.services import FAKE_SERVER, Ports, write_whole

SYSTEMD = Path("/usr/lib/systemd/systemd")
UNIT = REPO / "systemd" / "gend.service"


class Namespace:
    """Pids and mounts of its own, where a bash script has set things up and goes on as pid 1."""

    def __init__(self, folder: Path, script: str, environment: dict[str, str]) -> None:
        """Starts `script`; `folder` is for its output. Skips the test where it may not."""
        if os.geteuid() != 0:
            pytest.skip("needs root, for namespaces and other users")
        self.folder, self.environment = folder, environment
        self.process = processes.start(
            ["unshare", "-fpm", "--kill-child", "--mount-proc", "bash", "-ec", script], folder, "namespace",
            env=environment,
        )  # fmt: skip

    def wait_for(self, *command: str) -> None:
        """Wait until `command` succeeds in there. Skips the test if the script ends instead: this machine refuses."""

        def there() -> bool:
            if self.process.poll() is not None:
                pytest.skip(f"no namespaces like that here: {self.said()}")
            return bool(psutil.Process(self.process.pid).children()) and self.run(*command).returncode == 0

        wait_until(there, " ".join(command), failed=self.said)

    def said(self) -> str:
        return (self.folder / "namespace.log").read_text(errors="replace").strip()

    def entered(self, *command: str) -> list[str]:
        """The command line that runs `command` in there."""
        (first,) = psutil.Process(self.process.pid).children()
        return ["nsenter", "--target", str(first.pid), "--mount", "--pid", "--wd=/", "--", *command]

    def run(self, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run `command` in there."""
        return subprocess.run(
            self.entered(*command), env=self.environment, capture_output=True, text=True, timeout=120, **more
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


# ---- systemd


def test_systemd_finds_nothing_wrong_with_the_unit() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing here: apt-get install systemd")
    done = subprocess.run(["systemd-analyze", "verify", UNIT], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


class Systemd:
    """A `systemd --user` of its own with gend's unit as it is, and a drop-in.

    A user's systemd cannot change users, and the tests want shorter times: that is all the drop-in is for.
    """

    # It wants the folder that says systemd runs here, what it shows a service in place of a file it may not see, a
    # runtime folder on a tmpfs and a cgroup; and it is nobody's manager as pid 1, so the shell stays.
    SCRIPT = """
        mount -t tmpfs tmpfs /run/systemd
        mkdir -p /run/systemd/system /run/systemd/inaccessible/dir
        touch /run/systemd/inaccessible/reg
        mount -t tmpfs -o mode=700 tmpfs "$XDG_RUNTIME_DIR"
        for root in $CGROUP_ROOTS; do
            mkdir $root/$CGROUP
            echo $$ >$root/$CGROUP/cgroup.procs
        done
        "$SYSTEMD" --user --log-target=console
        exit 1
    """

    def __init__(self, folder: Path, base_port: int, marker: str) -> None:
        self.port, self.work, self.log, self.modes = base_port, folder / "work", folder / "up.log", folder / "modes"
        units = folder / "config" / "systemd" / "user"
        for path in (folder / "run", folder / "bin", folder / "store", self.work, units / "gend.service.d"):
            path.mkdir(parents=True)
        shutil.copy(UNIT, units)
        command = [sys.executable, str(FAKE_SERVER), "--mode-file", str(self.modes)]
        (folder / "config.toml").write_text(toml({
            "model": {"path": "fake"},
            "servers": {"count": 1, "command": command, "base_port": base_port},
            "store": {"url": f"file://{folder}/store"},
            "work": {"folder": str(self.work), "batch_size": 8, "drain_seconds": 3},
        }))  # fmt: skip
        # The systemctl that gend finds is the one of this systemd.
        (folder / "bin" / "systemctl").write_text('#!/bin/sh\nexec /usr/bin/systemctl --user "$@"\n')
        (folder / "bin" / "systemctl").chmod(0o755)
        variables = {
            "PATH": f"{folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(REPO),
            "GEND_CONFIG": f"{folder}/config.toml",
            processes.MARKER: marker,
        }
        (units / "gend.service.d" / "test.conf").write_text(
            "[Service]\nUser=\nGroup=\nEnvironmentFile=\nExecStartPre=\n"
            + "".join(f"Environment={name}={value}\n" for name, value in variables.items())
            + f"StandardOutput=append:{self.log}\nStandardError=append:{self.log}\n"
            "RestartSec=100ms\nWatchdogSec=2\nTimeoutStopSec=1\n"
        )
        # Version 1, version 1 beside 2, version 2: where systemd wants its services' cgroups.
        roots = [Path("/sys/fs/cgroup", name) for name in ("systemd", "unified", "")]
        roots = [root for root in roots if (root / "cgroup.procs").exists()]
        self.cgroup = f"gend-test-{uuid.uuid4().hex[:8]}"
        self.cgroups = [root / self.cgroup for root in roots]
        self.namespace = Namespace(folder, self.SCRIPT, {
            **os.environ, **variables, "SYSTEMD": str(SYSTEMD),
            "XDG_RUNTIME_DIR": f"{folder}/run", "XDG_CONFIG_HOME": f"{folder}/config",
            "CGROUP_ROOTS": " ".join(map(str, roots)), "CGROUP": self.cgroup,
        })  # fmt: skip
        try:
            self.namespace.wait_for("systemctl", "show", "--property", "Version")
        except BaseException:  # pytest.skip is one
            self.close()
            raise

    def start(self, mode: str = "ok") -> None:
        """Returns when systemd takes the unit for up. `mode` is what the server is like."""
        write_whole(self.modes, json.dumps({"mode": mode}))
        done = self.namespace.run("systemctl", "start", "gend")
        assert done.returncode == 0, done.stderr + self.logs()

    def stop(self) -> None:
        self.namespace.run("systemctl", "stop", "gend")

    def __getitem__(self, name: str) -> str:
        """A property of the unit, as it is now."""
        return self.namespace.run("systemctl", "show", "gend", "--property", name, "--value").stdout.strip()

    def wait_for(self, name: str, value: str) -> None:
        """Wait until a property has `value` in it."""
        wait_until(lambda: value in self[name], f"{name} {value}", failed=self.logs)

    def processes(self) -> list[psutil.Process]:
        """All that lives in the unit's cgroup."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                cgroups = Path(f"/proc/{process.pid}/cgroup").read_text()
                if f"/{self.cgroup}/" in cgroups and "/gend.service\n" in cgroups:
                    found.append(process)
        return [process for process in found if processes.alive(process)]

    def supervisor(self) -> psutil.Process:
        """The one that systemd has started."""
        (main,) = [process for process in self.processes() if process.parent().name() == "systemd"]
        return main

    def logs(self) -> str:
        texts = [path.read_text(errors="replace")[-3000:] for path in [self.log, *self.work.glob("logs/*.log")]]
        return "\n----\n".join([self.namespace.said(), *texts])

    def close(self) -> None:
        self.namespace.close()
        for cgroup in self.cgroups:
            wait_until(functools.partial(_remove, cgroup), f"{cgroup} is empty")


def _remove(cgroup: Path) -> bool:
    try:
        for folder in sorted(cgroup.rglob("*/"), reverse=True):
            folder.rmdir()
        cgroup.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # who lived in it is just dying
        return False
    return True


@pytest.fixture(scope="module")
def _systemd() -> Iterator[Systemd]:
    if not SYSTEMD.exists():
        pytest.skip(f"{SYSTEMD} is missing here: apt-get install systemd")
    folder, ports, marker = Path(tempfile.mkdtemp(prefix="gend-")), Ports(), uuid.uuid4().hex
    try:
        systemd = Systemd(folder, ports.block(10), marker)
        yield systemd
        systemd.close()
    finally:
        processes.end_all(lambda: processes.marked(marker, folder))
        ports.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def systemd(_systemd: Systemd) -> Iterator[Systemd]:
    """A real systemd with gend's unit, which is stopped after the test."""
    yield _systemd
    _systemd.stop()


def test_a_supervisor_that_is_killed_comes_back_and_its_children_do_not_stay(systemd: Systemd) -> None:
    systemd.start()
    systemd.wait_for("StatusText", "1 ready")
    before = systemd.processes()
    systemd.supervisor().kill()
    systemd.wait_for("NRestarts", "1")
    systemd.wait_for("StatusText", "1 ready")
    assert not [processes.describe(process) for process in before if processes.alive(process)]


def test_a_supervisor_that_hangs_is_ended_by_the_watchdog_and_comes_back(systemd: Systemd) -> None:
    systemd.start()
    hung = systemd.supervisor()
    hung.suspend()
    systemd.wait_for("NRestarts", "1")
    systemd.wait_for("ActiveState", "active")
    assert not processes.alive(hung)
    assert "Fatal Python error: Aborted" in systemd.log.read_text(), "it does not say where it hung"


def test_gend_drain_stops_the_unit_for_good_and_has_the_time_it_needs(systemd: Systemd, tmp_path: Path) -> None:
    # Replies that never come hold the drain for drain_seconds (3 s), which is more than this TimeoutStopSec (1 s).
    systemd.start()
    systemd.wait_for("StatusText", "1 ready")
    write_whole(systemd.modes, json.dumps({"mode": "hang"}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "What is a drain?"}\n')
    done = systemd.namespace.run("gend", "enqueue", str(tmp_path / "prompts.jsonl"))
    assert done.returncode == 0, done.stderr

    def in_flight() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{systemd.port}/fake/stats", timeout=10) as answer:
            return json.load(answer)["in_flight"] > 0

    wait_until(in_flight, "a prompt is in flight", failed=systemd.logs)
    done = systemd.namespace.run("gend", "drain")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: systemd["ActiveState"] in ("inactive", "failed"), "the unit is down", failed=systemd.logs)
    assert (systemd["Result"], systemd["NRestarts"]) == ("success", "0"), systemd.logs()
    assert not [processes.describe(process) for process in systemd.processes()]


def test_it_is_up_while_its_servers_load(systemd: Systemd) -> None:
    systemd.start("loading")
    assert (systemd["ActiveState"], systemd["StatusText"]) == ("active", "servers: 1 starting")


def test_when_memory_runs_out_what_the_supervisor_started_goes_first(systemd: Systemd) -> None:
    systemd.start()
    systemd.wait_for("StatusText", "1 ready")
    scores = {}
    for process in systemd.processes():
        command = " ".join(process.cmdline())
        kinds = ("valkey-server", "fake_server", "loader", "worker", "up")
        if kind := next((kind for kind in kinds if kind in command), None):  # else one that has just been forked
            scores[kind] = int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())
    ours = scores["up"]  # -900, where systemd may set it
    assert scores == {"up": ours, "valkey-server": ours, "fake_server": 500, "loader": 500, "worker": 500}


# ---- without systemd


def test_as_pid_1_it_buries_orphans_and_drains(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(servers=1)
    arguments = [sys.executable, "-m", "gend", "--config", str(daemon.config), "up"]
    container = Namespace(daemon.folder, shlex.join(["exec", *arguments]), daemon.environment)
    container.wait_for("true")
    (gend,) = psutil.Process(container.process.pid).children()
    wait_until(lambda: "server-0: starting -> ready" in container.said(), "a server is ready", failed=container.said)

    container.run("bash", "-c", "sleep 0.3 & disown")  # its parent ends before it, so pid 1 inherits it

    def orphans() -> list[psutil.Process]:
        return [child for child in gend.children() if child.name() == "sleep"]

    wait_until(orphans, "the orphan came to pid 1")
    wait_until(lambda: not orphans(), "the orphan is buried")
    gend.terminate()
    assert container.process.wait(60) == 0, container.said()
    assert "SIGTERM: draining" in container.said()


def test_it_outlives_the_terminal_it_was_started_in(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(servers=1)
    terminal, its_side = os.openpty()
    daemon.process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "gend", "--config", daemon.config, "up"],
        stdin=its_side, stdout=its_side, stderr=its_side, env=daemon.environment, cwd=daemon.folder,
    )  # fmt: skip
    os.close(its_side)
    seen = b""
    while b"server-0: starting -> ready" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)  # the SSH connection breaks: SIGHUP, and nothing can be written any more
    assert daemon.stop() == 0
    assert "SIGTERM: draining" in (daemon.work / "logs" / "daemon.log").read_text()


# ---- on a box


class Box(Namespace):
    """This machine, on which nothing that is installed or removed stays; the checkout is at /opt/checkout."""

    # /etc is copied since files in it may be mounts, which an overlay would hide. The packages that the tests have are
    # lent to the new venv: this is not about downloads. Whoever may not enter our checkout may enter /opt.
    SCRIPT = """
        mount -t tmpfs tmpfs "$LAYERS"
        mkdir "$LAYERS/etc"
        cp -a /etc/. "$LAYERS/etc"
        mount --bind "$LAYERS/etc" /etc
        for folder in /opt /usr/local/bin /var/lib; do
            upper=$LAYERS/upper$folder work=$LAYERS/work$folder
            mkdir -p $upper $work
            mount -t overlay -o lowerdir=$folder,upperdir=$upper,workdir=$work overlay $folder
        done
        mkdir /opt/checkout /opt/packages
        mount --bind "$CHECKOUT" /opt/checkout
        mount --bind "$PACKAGES" /opt/packages
        mount -o remount,bind,ro /opt/checkout
        mount -o remount,bind,ro /opt/packages
        touch /opt/ready
        exec sleep infinity
    """

    def __init__(self, folder: Path) -> None:
        (folder / "layers").mkdir()
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        super().__init__(folder, self.SCRIPT, {
            **inherited, "LAYERS": f"{folder}/layers", "CHECKOUT": str(REPO), "PACKAGES": sysconfig.get_path("purelib"),
        })  # fmt: skip
        self.wait_for("test", "-e", "/opt/ready")

    def must(self, *command: str) -> str:
        """Run `command`; gives what it prints. Fails unless it ends well."""
        done = self.run(*command)
        assert done.returncode == 0, f"{shlex.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run_as(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run `command` as this user, who has just logged in: nothing is set."""
        return self.run("runuser", "-u", name, "--", "env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", *command)

    def must_as(self, name: str, *command: str) -> str:
        """Like `must`, as this user."""
        done = self.run_as(name, *command)
        assert done.returncode == 0, f"{name}: {shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def lend_packages(self) -> str:
        """Make the venv for tools/install, with the tests' packages; gives the Python that it is of."""
        for python in filter(None, ("/usr/bin/python3", shutil.which("python3"))):
            done = self.run_as("nobody", python, "-c", "import sys; print(sys.version_info[:2])")
            if done.stdout.strip() == str(sys.version_info[:2]):
                self.must(python, "-m", "venv", "--without-pip", "/opt/gend/venv")
                self.must("bash", "-c", "cd /opt/gend/venv/lib/python3*/site-packages && echo /opt/packages >lent.pth")
                return python
        pytest.skip(f"no python3 here that is ours ({sys.version.split()[0]}) and that every user may run")


@pytest.fixture
def box(folder: Path) -> Iterator[Box]:
    """A box to install on."""
    made = Box(folder)
    yield made
    made.close()


def test_on_a_box_the_service_and_the_people_of_its_group_share_one_folder(box: Box, ports: Ports) -> None:
    box.environment["PYTHON"] = box.lend_packages()
    box.must("/opt/checkout/tools/install")
    settings = {
        "url = ..  .*s3:.*": 'url = "file:///var/lib/gend/store"',
        "command = .*": 'command = ["python", "/opt/checkout/tests/harness/fake_server.py", "--speed", "50"]',
        "count = .*": "count = 1",
        "base_port = .*": f"base_port = {ports.block(10)}",
    }
    for key, line in settings.items():
        box.must("sed", "-i", f"s|^{key}|{line}|", "/etc/gend/config.toml")
    box.must("bash", "-c", "useradd alice --groups gend && useradd bob")
    box.must("bash", "-c", """printf '{"prompt": "%s"}\\n' What Who Where >/var/lib/prompts.jsonl""")

    # One after the other they start Valkey themselves, and go on with the files of the one before.
    run = json.loads(box.must_as("alice", "gend", "enqueue", "/var/lib/prompts.jsonl", "--json"))["run"]
    for name in ("gend", "alice", "root"):
        assert run in box.must_as(name, "gend", "status"), name
    box.must_as("gend", "gend", "up", "--until-idle")
    assert "whole and sound" in box.must_as("alice", "gend", "verify", run)
    stranger = box.run_as("bob", "gend", "status")
    assert (stranger.returncode, "usermod -aG gend bob" in stranger.stderr) == (2, True), stranger.stderr

    box.must("/opt/checkout/tools/uninstall")
    assert box.must("bash", "-c", "ls -d /opt/gend /usr/local/bin/gend || true") == ""
    box.must("test", "-s", "/etc/gend/config.toml", "-a", "-d", "/var/lib/gend/store")
    box.must("/opt/checkout/tools/uninstall", "--purge")
    left = box.run("bash", "-c", "ls -d /etc/gend /var/lib/gend; getent passwd gend; getent group gend")
    assert left.stdout == ""
