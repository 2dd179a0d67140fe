"""The doctor, by breaking each thing for real: files, disks, ports, limits, Redis, the store; GPUs, which no test
machine has, as the driver would show them."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.processes import environment as marked_environment
from harness.proxy import S3Fault, S3Proxy, TcpProxy
from harness.services import BUCKET, FAKE_SERVER, Authority, FakeServer, Ports, SeaweedFS, Valkey

from gend import doctor, processes
from gend.config import Settings, settings_from
from gend.doctor import Finding
from gend.gpus import Driver, Gpu

GIB = 2**30
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


@pytest.fixture
def make(folder: Path, ports: Ports) -> Any:
    """Settings of a machine without GPUs, with changes: make(model={"path": ...})."""
    base_port = ports.block(10)

    def made(**changes: dict[str, Any]) -> Settings:
        tables: dict[str, dict[str, Any]] = {
            "model": {"path": str(folder / "model")},
            "servers": {"count": 1, "base_port": base_port, "command": [sys.executable, str(FAKE_SERVER)]},
            "store": {"url": f"file://{folder}/store"},
            "work": {"folder": str(folder / "work")},
        }
        for name, table in changes.items():
            tables[name] = {**tables.get(name, {}), **table}
        return settings_from(tables, "test")

    return made


def state_of(found: Iterator[Finding] | list[Finding], check: str) -> tuple[str, str]:
    """The worst state of a check, and all that it said."""
    of_it = [finding for finding in found if finding.check == check]
    assert of_it, f"no finding about {check}"
    worst = max(of_it, key=lambda finding: ["skipped", "ok", "warning", "fail"].index(finding.state))
    return worst.state, " | ".join(f"{finding.says} {finding.do}" for finding in of_it)


def run_one(check: doctor.Check, settings: Settings, seconds: float = 8.0) -> list[Finding]:
    """One check as the doctor runs it: on a thread, errors made findings."""
    job = doctor.Job(check.__name__, check, "hint", seconds)
    job.start(settings)
    return job.findings()


# -- the whole -------------------------------------------------------------------------------------------------------


def gend(config: Path, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    prefix = options.pop("prefix", [])
    command = [*prefix, sys.executable, "-m", "gend", "--config", str(config), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def write_config(folder: Path, settings: Settings) -> Path:
    config = folder / "config.toml"
    servers, flags = settings.servers, json.dumps(settings.store.url)
    config.write_text(
        f'[model]\npath = "{settings.model.path}"\n[servers]\ncount = 1\nbase_port = {servers.base_port}\n'
        f'command = {json.dumps(servers.command)}\n[store]\nurl = {flags}\n[work]\nfolder = "{settings.work.folder}"\n'
    )
    return config


def test_a_fit_box_passes_and_an_unfit_one_exits_with_1(folder: Path, make: Any) -> None:
    write_model(folder / "model")
    config = write_config(folder, make())

    fit = gend(config, "doctor", "--json")
    assert fit.returncode == 0, fit.stdout + fit.stderr
    report = json.loads(fit.stdout)
    assert report["fit"] is True
    assert {finding["check"] for finding in report["findings"]} >= {
        "gpus", "software", "model", "template", "disk", "shm", "nofile", "pids", "memory", "ports", "init", "redis",
        "store", "once", "multipart", "tls", "clock",
    }  # fmt: skip
    assert not list((folder / "store").rglob("probe-*/*")), "probes stay in the store"

    (folder / "model" / "config.json").unlink()
    unfit = gend(config, "doctor")
    assert unfit.returncode == 1
    assert "fail     model" in unfit.stdout and "config.json is missing" in unfit.stdout


def test_a_check_that_hangs_is_a_finding_and_holds_nobody_up() -> None:
    def hangs(settings: Settings) -> Iterator[Finding]:
        yield doctor.ok("hangs", "so far")
        time.sleep(3600)
        yield doctor.ok("hangs", "never")

    found = run_one(hangs, Settings(), seconds=0.2)
    assert [finding.state for finding in found] == ["ok", "fail"]
    assert "hangs" in found[1].says and found[1].do == "hint"


def test_a_check_that_breaks_off_is_a_failure() -> None:
    def breaks(settings: Settings) -> Iterator[Finding]:
        yield doctor.ok("breaks", "so far")
        raise ZeroDivisionError("of its own")

    assert state_of(run_one(breaks, Settings()), "breaks")[0] == "fail"


# -- model and template ----------------------------------------------------------------------------------------------


def safetensors(path: Path, *names: str) -> None:
    """A weight file with a tensor of 64 bytes for each name."""
    header = {
        name: {"dtype": "U8", "shape": [64], "data_offsets": [64 * i, 64 * i + 64]} for i, name in enumerate(names)
    }
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(64 * len(names)))


def write_model(home: Path, template: str = THINKING) -> Path:
    home.mkdir()
    (home / "config.json").write_text("{}")
    (home / "tokenizer.json").write_text("{}")
    (home / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    shards = {"a-1.safetensors": ("embed", "layer.0"), "a-2.safetensors": ("layer.1", "head")}
    for name, tensors in shards.items():
        safetensors(home / name, *tensors)
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (home / "model.safetensors.index.json").write_text(json.dumps(index))
    return home


def cut_short(home: Path) -> None:
    os.truncate(home / "a-2.safetensors", (home / "a-2.safetensors").stat().st_size - 1)


def cut_in_header(home: Path) -> None:
    os.truncate(home / "a-2.safetensors", 20)


def remove_shard(home: Path) -> None:
    (home / "a-2.safetensors").unlink()


def lose_a_tensor(home: Path) -> None:
    safetensors(home / "a-2.safetensors", "layer.1")


def spoil_index(home: Path) -> None:
    (home / "model.safetensors.index.json").write_text('{"weight_map":')


def remove_tokenizer(home: Path) -> None:
    (home / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut_short, "a-2.safetensors is"),
        (cut_in_header, "its header alone"),
        (remove_shard, "a-2.safetensors is missing"),
        (lose_a_tensor, "lacks 1 tensors"),
        (spoil_index, "cannot be read"),
        (remove_tokenizer, "no tokenizer"),
    ],
)
def test_a_model_that_is_not_whole_fails(folder: Path, make: Any, spoil: Any, says: str) -> None:
    home = write_model(folder / "model")
    assert state_of(run_one(doctor.model, make()), "model")[0] == "ok"
    spoil(home)
    state, said = state_of(run_one(doctor.model, make()), "model")
    assert state == "fail"
    assert says in said


def test_a_model_is_found_in_the_hugging_face_cache_or_must_be_fetched_first(folder: Path, make: Any) -> None:
    sglang = ["python", "-m", "sglang.launch_server"]
    settings = make(
        model={"path": "Qwen/Some-1B"}, servers={"command": sglang, "environment": {"HF_HOME": str(folder / "hf")}}
    )
    state, said = state_of(run_one(doctor.model, settings), "model")
    assert state == "fail" and "tools/fetch-model Qwen/Some-1B" in said

    cache = folder / "hf" / "hub" / "models--Qwen--Some-1B"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc123\n")
    (cache / "snapshots").mkdir()
    write_model(cache / "snapshots" / "abc123")
    assert state_of(run_one(doctor.model, settings), "model")[0] == "ok"


@pytest.mark.parametrize(
    ("template", "state", "says"),
    [
        (THINKING, "ok", r"<think>\n"),
        (THINKING.replace("{% else %}<think>\n", "{% else %}<think></think>"), "fail", "closes the thought"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "warning", "knows no enable_thinking"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "fail", "drops what the user says"),
        ("{{ raise_exception('no system message') }}", "fail", "no system message"),
        ("{% if %}", "fail", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "fail", "SecurityError"),
        (THINKING + "{% generation %}{% endgeneration %}{{ strftime_now('%Y') }}{{ {} | tojson(indent=2) }}", "ok", ""),
    ],
)
def test_the_chat_template_is_rendered(folder: Path, make: Any, template: str, state: str, says: str) -> None:
    write_model(folder / "model", template)
    found, said = state_of(run_one(doctor.template, make()), "template")
    assert (found, says in said) == (state, True), said


def test_a_thought_that_nobody_takes_out_of_the_reply_fails(folder: Path, make: Any) -> None:
    write_model(folder / "model")
    sglang = ["python", "-m", "sglang.launch_server"]
    state, said = state_of(run_one(doctor.template, make(servers={"command": sglang})), "template")
    assert state == "fail" and "reasoning-parser" in said
    told = make(servers={"command": sglang, "flags": {"reasoning_parser": "qwen3"}})
    assert state_of(run_one(doctor.template, told), "template")[0] == "ok"


# -- the box ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_fails(folder: Path, make: Any) -> None:
    (folder / "file").write_text("in the way")
    state, said = state_of(run_one(doctor.disk, make(work={"folder": str(folder / "file" / "work")})), "disk")
    assert state == "fail" and "cannot be written" in said


@contextlib.contextmanager
def small_disk(path: Path, options: str) -> Iterator[None]:
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here, so there is no full disk to test with")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_disk_fails_and_a_small_one_too(folder: Path, make: Any) -> None:
    settings = make(work={"folder": str(folder / "tmpfs")})
    with small_disk(folder / "tmpfs", "size=8m"):
        state, said = state_of(run_one(doctor.disk, settings), "disk")
        assert state == "fail" and "too little" in said
        with contextlib.suppress(OSError):
            (folder / "tmpfs" / "filler").write_bytes(bytes(9 << 20))
        state, said = state_of(run_one(doctor.disk, settings), "disk")
        assert state == "fail" and "No space left" in said


def test_a_port_that_is_taken_fails_unless_it_is_our_own_server(make: Any, marker: str) -> None:
    settings = make()
    port = settings.servers.base_port
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port + 3))
        taken.listen()
        state, said = state_of(run_one(doctor.ports, settings), "ports")
    assert state == "fail" and str(port + 3) in said and f"pid {os.getpid()}" in said

    process = processes.start(
        settings.folder, "server-0", [sys.executable, str(FAKE_SERVER), "--port", str(port)],
        marked_environment(marker), port,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while processes.port_free(port) and time.monotonic() < deadline:
        time.sleep(0.02)
    state, said = state_of(run_one(doctor.ports, settings), "ports")
    process.kill()
    assert (state, "gend's own servers" in said) == ("ok", True), said


def test_too_few_open_files_fail(folder: Path, make: Any) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("the prlimit command is missing, so limits cannot be lowered for one process")
    write_model(folder / "model")
    config = write_config(folder, make())
    few = gend(config, "doctor", "--json", prefix=["prlimit", "--nofile=300:300"])
    findings = {finding["check"]: finding for finding in json.loads(few.stdout)["findings"]}
    assert few.returncode == 1
    assert findings["nofile"]["state"] == "fail" and "300 open files" in findings["nofile"]["says"]
    assert "LimitNOFILE" in findings["nofile"]["do"]


def test_too_few_processes_in_the_control_group_fail(folder: Path, make: Any) -> None:
    base = Path("/sys/fs/cgroup/pids" if Path("/sys/fs/cgroup/pids").is_dir() else "/sys/fs/cgroup")
    group = base / f"gend-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").write_text("100")
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        write_model(folder / "model")
        config = write_config(folder, make())
        enter = ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]
        few = gend(config, "doctor", "--json", prefix=enter)
    finally:
        group.rmdir()
    findings = {finding["check"]: finding for finding in json.loads(few.stdout)["findings"]}
    assert findings["pids"]["state"] == "fail" and "room for 9" in findings["pids"]["says"]


def test_a_hierarchical_cache_that_is_larger_than_the_ram_fails(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_driver", lambda: driver(2))
    flags = {"enable-hierarchical-cache": True, "hicache-size": 100_000}
    state, said = state_of(run_one(doctor.memory, make(servers={"count": 0, "flags": flags})), "memory")
    assert state == "fail" and "hierarchical cache for 2 GPUs" in said


# -- GPUs and software, as the driver would show them ----------------------------------------------------------------


def gpu(index: int, **changes: Any) -> Gpu:
    return Gpu(**{"index": index, "name": "NVIDIA H200", "total_bytes": 140 * GIB, "used_bytes": 5 << 20} | changes)


def driver(count: int, cuda: tuple[int, int] = (13, 0), **changes: Any) -> Driver:
    return Driver(version="580.1", cuda=cuda, gpus=[gpu(index, **changes) for index in range(count)])


@pytest.mark.parametrize(
    ("servers", "shown", "own", "state", "says"),
    [
        ({"count": 0}, driver(8), False, "ok", "8 x NVIDIA H200"),
        ({"count": 0}, None, False, "fail", "no NVIDIA driver"),
        ({"count": 0}, driver(0), False, "fail", "shows no GPU"),
        ({"count": 2}, None, False, "skipped", "servers.count asks for 2"),
        ({"count": 0, "gpus": [0, 7]}, driver(4), False, "fail", "wants [7]"),
        ({"count": 0, "gpus": [0, 1]}, driver(4), False, "ok", "2 x NVIDIA H200"),
        ({"count": 0}, driver(2, used_bytes=30 * GIB, pids=(77,)), False, "fail", "30.0 of 140 GiB in use by pid 77"),
        ({"count": 0}, driver(2, used_bytes=130 * GIB), True, "ok", "gend's own servers are up"),
        ({"count": 0}, driver(2, worn_out=True), False, "fail", "memory failed"),
        (
            {"count": 0},
            Driver(version="580.1", cuda=(13, 0), gpus=[gpu(0), gpu(1, name="NVIDIA H100")]),
            False,
            "warning",
            "different cards",
        ),
    ],
)
def test_gpus(make: Any, servers: dict[str, Any], shown: Driver | None, own: bool, state: str, says: str) -> None:
    found, said = state_of(list(doctor.judge_gpus(make(servers=servers), shown, own)), "gpus")
    assert (found, says in said) == (state, True), said


def test_tensor_parallel_servers_want_nvlink(make: Any) -> None:
    two = make(servers={"count": 0, "gpus_per_server": 2})
    assert state_of(doctor.judge_gpus(two, driver(2), False), "nvlink")[0] == "warning"
    assert state_of(doctor.judge_gpus(two, driver(2, nvlinks=18), False), "nvlink")[0] == "ok"
    assert state_of(doctor.judge_gpus(make(servers={"count": 0}), driver(2), False), "nvlink")[0] == "skipped"


@pytest.mark.parametrize(
    ("torch_cuda", "sglang", "cuda", "state", "says"),
    [
        ("12.9", "0.5.17", (13, 0), "ok", "SGLang 0.5.17"),
        ("13.0", "0.5.17", (12, 8), "fail", "runs CUDA 12.8 and older"),
        ("12.9", "0.5.17", (12, 8), "warning", "kernels made on the box"),
        (None, "0.5.17", (12, 8), "fail", "for the CPU"),
        ("12.8", "0.5.9", (12, 8), "warning", "0.5.17 and later"),
        ("12.8", None, (12, 8), "fail", "SGLang missing"),
    ],
)
def test_software_against_the_driver(
    folder: Path, make: Any, torch_cuda: str | None, sglang: str | None, cuda: tuple[int, int], state: str, says: str
) -> None:
    """What is installed is asked of the servers' own Python, here one with packages made up for the test."""
    site = folder / "site"
    for name, version in (("torch", "2.11.0"), ("sglang", sglang)):
        if version:
            (site / f"{name}-{version}.dist-info").mkdir(parents=True)
            (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "torch" / "version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = {torch_cuda!r}\n")
    settings = make(
        servers={"command": ["python", "-m", "sglang.launch_server"], "environment": {"PYTHONPATH": str(site)}}
    )
    software = doctor.server_software(settings)
    found, said = state_of(doctor.judge_software(settings, driver(1, cuda), software), "software")
    assert (found, says in said) == (state, True), said


def test_a_flag_that_the_installed_sglang_has_not_fails(folder: Path, make: Any) -> None:
    site = folder / "site"
    for name in ("torch-2.11.0", "sglang-0.5.17"):
        (site / f"{name}.dist-info").mkdir(parents=True)
        (site / f"{name}.dist-info" / "METADATA").write_text("Name: {}\nVersion: {}\n".format(*name.split("-")))
    (site / "sglang" / "srt").mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("")
    known = ["model-path", "host", "port", "enable-metrics", "nccl-port", "dist-init-addr", "max-running-requests"]
    source = "".join(f"parser.add_argument('--{name}')\n" for name in known)
    (site / "sglang" / "srt" / "server_args.py").write_text(source)
    sglang = {"command": ["python", "-m", "sglang.launch_server"], "environment": {"PYTHONPATH": str(site)}}
    good = make(servers={**sglang, "flags": {"max-running-requests": 8}})
    assert state_of(run_one(doctor.software, good), "flags")[0] == "ok"
    wrong = make(servers={**sglang, "flags": {"max-runing-requests": 8}})
    state, said = state_of(run_one(doctor.software, wrong), "software")
    assert state == "fail" and "did you mean max-running-requests?" in said


# -- Redis -----------------------------------------------------------------------------------------------------------


def test_redis_that_throws_keys_away_fails(folder: Path, marker: str, make: Any) -> None:
    evicting = {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}
    with Valkey(folder / "v", marker, settings=evicting) as server:
        state, said = state_of(run_one(doctor.redis, make(redis={"url": server.url})), "redis")
    assert state == "fail" and "CONFIG SET maxmemory-policy noeviction" in said


def test_redis_that_forgets_is_a_warning(folder: Path, marker: str, make: Any) -> None:
    with Valkey(folder / "v", marker, settings={"appendonly": "no"}) as server:
        state, said = state_of(run_one(doctor.redis, make(redis={"url": server.url})), "redis")
    assert state == "warning" and "appendonly yes" in said


def test_redis_that_is_not_what_we_need_fails(folder: Path, marker: str, ports: Ports, make: Any) -> None:
    with Valkey(folder / "v", marker, port=ports.block(1)) as server:
        assert state_of(run_one(doctor.redis, make(redis={"url": server.url})), "redis")[0] == "ok"

        wrong = server.url.replace(server.password, "wrong")
        state, said = state_of(run_one(doctor.redis, make(redis={"url": wrong})), "redis")
        assert state == "fail" and "password" in said and "wrong@" not in said

        server.client().replicaof("127.0.0.1", 1)
        state, said = state_of(run_one(doctor.redis, make(redis={"url": server.url})), "redis")
        assert state == "fail" and "replica" in said and server.password not in said


def test_redis_behind_a_black_hole_fails_in_time(folder: Path, marker: str, ports: Ports, make: Any) -> None:
    port = ports.block(1)
    with (
        Valkey(folder / "v", marker, port=ports.block(1)) as server,
        TcpProxy(("127.0.0.1", server.port), port) as proxy,
    ):
        proxy.set("blackhole")
        found = run_one(doctor.redis, make(redis={"url": server.url_at(port)}), seconds=1.0)
    assert state_of(found, "redis")[0] == "fail"


# -- the store -------------------------------------------------------------------------------------------------------


@pytest.fixture
def s3(seaweed: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch, make: Any) -> Any:
    """Settings with the S3 server as store, at another endpoint if wanted."""
    for name, value in {**seaweed.variables(), "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)

    def made(endpoint: str = "") -> Settings:
        url = {"url": f"s3://{BUCKET}/{prefix}", "endpoint": endpoint or seaweed.endpoint, "region": "us-east-1"}
        return make(store=url)  # type: ignore[no-any-return]

    return made


def test_a_good_store_passes_and_nothing_stays_there(s3: Any, seaweed: SeaweedFS, prefix: str) -> None:
    found = run_one(doctor.store, s3())
    assert {finding.check: finding.state for finding in found} == {"store": "ok", "once": "ok", "multipart": "ok"}
    left = seaweed.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    assert left["KeyCount"] == 0, left
    found = run_one(doctor.tls, s3())
    assert {finding.check: finding.state for finding in found} == {"tls": "ok", "clock": "ok"}


@pytest.mark.parametrize(
    ("fault", "check", "state"),
    [
        (S3Fault("ignore_if_none_match"), "once", "warning"),
        (S3Fault("status", {"CreateMultipartUpload"}, status=501, code="NotImplemented"), "multipart", "warning"),
        (S3Fault("status", {"PutObject"}, status=403, code="AccessDenied"), "store", "fail"),
        (S3Fault("status", {"ListObjectsV2"}, status=403, code="AccessDenied"), "store", "fail"),
        (S3Fault("status", {"DeleteObject"}, status=403, code="AccessDenied"), "store", "fail"),
        (S3Fault("status", {"GetObject"}, status=404, code="NoSuchKey"), "store", "fail"),
        (S3Fault("blackhole"), "store", "fail"),
    ],
    ids=lambda value: f"{value.what}-{'-'.join(value.kinds)}" if isinstance(value, S3Fault) else None,
)
def test_what_a_store_cannot_do_is_found(
    s3: Any, seaweed: SeaweedFS, ports: Ports, fault: S3Fault, check: str, state: str
) -> None:
    with S3Proxy(seaweed.endpoint, ports.block(1), keys=seaweed.keys) as proxy:
        proxy.set(fault)
        seconds = 1.0 if fault.what == "blackhole" else 8.0
        found, said = state_of(run_one(doctor.store, s3(proxy.endpoint), seconds), check)
    assert found == state, said


def test_wrong_keys_fail_with_what_to_change(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    state, said = state_of(run_one(doctor.store, s3()), "store")
    assert state == "fail" and "AWS_SECRET_ACCESS_KEY" in said


def test_a_certificate_of_nobody_fails_until_its_authority_is_known(
    s3: Any, seaweed: SeaweedFS, ports: Ports, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Proxy(seaweed.endpoint, ports.block(1), tls=authority.context(), keys=seaweed.keys) as proxy:
        state, said = state_of(run_one(doctor.tls, s3(proxy.endpoint)), "tls")
        assert state == "fail" and "AWS_CA_BUNDLE" in said
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
        assert state_of(run_one(doctor.tls, s3(proxy.endpoint)), "tls")[0] == "ok"
        assert state_of(run_one(doctor.store, s3(proxy.endpoint)), "multipart")[0] == "ok"


@pytest.mark.parametrize(("ahead", "state"), [(0.6, "ok"), (-90.0, "warning"), (1200.0, "fail"), (-1200.0, "fail")])
def test_a_clock_that_is_wrong(ahead: float, state: str) -> None:
    assert doctor.judge_clock(ahead).state == state


# -- replies ---------------------------------------------------------------------------------------------------------


def test_each_server_gives_a_real_reply_or_is_not_up(folder: Path, marker: str, make: Any) -> None:
    settings = make()
    state, said = state_of(run_one(doctor.replies, settings, 30), "server-0")
    assert state == "fail" and "not up" in said and "gend up" in said

    with FakeServer(folder / "fake", marker, settings.servers.base_port, "--speed", "1000") as server:
        state, said = state_of(run_one(doctor.replies, settings, 30), "server-0")
        assert state == "warning" and "2 h 35 min is not in" in said, "the fake server knows no trains"
        server.mode("thought_inside")
        state, said = state_of(run_one(doctor.replies, settings, 30), "server-0")
        assert state == "fail" and "reasoning-parser" in said
