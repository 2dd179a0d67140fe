"""Fixtures: private folders, ports, services and daemons for each test, and nothing left running after it."""

import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import processes
from harness.daemon import Daemon
from harness.services import Authority, Ports, SeaweedFS, Valkey


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a name short enough for unix sockets in it (107 bytes), which tmp_path is not."""
    path = Path(tempfile.mkdtemp(prefix="gend-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)  # a process that is just dying may still write there


@pytest.fixture
def marker() -> Iterator[str]:
    """A value for the environment of everything that the test starts; all of it is ended after the test."""
    value = uuid.uuid4().hex
    yield value
    processes.end_all(lambda: processes.marked(value))


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Free ports, held for the test."""
    held = Ports()
    yield held
    held.close()


@pytest.fixture
def valkey(folder: Path, marker: str) -> Iterator[Valkey]:
    """A Valkey on a unix socket, empty."""
    with Valkey(folder / "valkey", marker) as server:
        yield server


@pytest.fixture(scope="session")
def _shared_seaweed() -> Iterator[SeaweedFS]:
    folder, held, marker = Path(tempfile.mkdtemp(prefix="gend-")), Ports(), uuid.uuid4().hex
    with SeaweedFS(folder / "seaweed", marker, held.block(5)) as server:
        yield server
    held.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def seaweed(_shared_seaweed: SeaweedFS) -> SeaweedFS:
    """A running S3 server, the same for all tests of this process: keep to your own `prefix`. You may kill it."""
    if _shared_seaweed.process is None or _shared_seaweed.process.poll() is not None:  # the test before killed it
        _shared_seaweed.kill()
        _shared_seaweed.start()
    return _shared_seaweed


@pytest.fixture
def prefix() -> str:
    """A prefix in the bucket that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def authority() -> Iterator[Authority]:
    """A certificate authority and a certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is missing, so there is no certificate to test TLS with")
    folder = Path(tempfile.mkdtemp(prefix="gend-"))
    yield Authority(folder)
    shutil.rmtree(folder)


@pytest.fixture
def make_daemon(folder: Path, ports: Ports) -> Iterator[Callable[..., Daemon]]:
    """Makes Daemon objects below one folder; ends all that they started after the test.

    make_daemon(servers=2, config={...}, ...) takes what Daemon takes, and `name` for a second one in the same test.
    """
    made: list[Daemon] = []

    def make(name: str = "box", **options: Any) -> Daemon:
        made.append(Daemon(folder / name, ports, **options))
        return made[-1]

    make.made = made  # type: ignore[attr-defined]
    yield make
    for daemon in made:
        daemon.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the logs of its daemons."""
    report = yield
    maker = getattr(item, "funcargs", {}).get("make_daemon")
    if report.failed and maker:
        for daemon in maker.made:
            report.sections.append((f"gend logs in {daemon.folder.name}", daemon.logs()))
    return report
