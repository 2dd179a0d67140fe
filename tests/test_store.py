"""The store: a folder and a real S3 server, which behave alike; and what is wrong with one is said in time."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.proxy import S3Fault, S3Proxy, TcpProxy, internal_error, slow_down
from harness.services import BUCKET, Authority, Ports, SeaweedFS

from gend.config import Store as StoreSettings
from gend.errors import SettingsError, StoreUnavailable
from gend.store import LEFTOVER_SECONDS, FolderStore, Store, open_object, open_store


@pytest.fixture
def keys(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> SeaweedFS:
    """The S3 server, with its keys where the store looks for them and nobody else's."""
    for name, value in {
        **seaweed.variables(), "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return seaweed


def s3(endpoint: str, prefix: str, bucket: str = BUCKET, patience_seconds: float = 2.0) -> Store:
    return open_store(
        StoreSettings(
            url=f"s3://{bucket}/{prefix}", endpoint=endpoint, region="us-east-1", patience_seconds=patience_seconds
        )
    )


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, prefix: str) -> Iterator[Store]:
    if request.param == "folder":
        yield open_store(StoreSettings(url=(tmp_path / "a store").as_uri()))
    else:
        yield s3(request.getfixturevalue("keys").endpoint, prefix)


def test_what_was_put_is_there_and_is_not_replaced(store: Store) -> None:
    assert store.get("runs/r/parts/00000000.jsonl") is None
    assert not store.exists("runs/r/parts/00000000.jsonl")
    assert store.put("runs/r/parts/00000000.jsonl", b"first\n")
    assert not store.put("runs/r/parts/00000000.jsonl", b"second\n")
    assert store.get("runs/r/parts/00000000.jsonl") == b"first\n"
    assert store.exists("runs/r/parts/00000000.jsonl")
    assert not store.exists("runs/r/parts"), "a folder is no object"


def test_what_is_replaced_is_new(store: Store) -> None:
    store.replace("runs/r/control.json", b"one")
    store.replace("runs/r/control.json", b"")
    assert store.get("runs/r/control.json") == b""


@pytest.mark.parametrize("body", [b"", b"\0\xff\n" * 3, os.urandom(9 << 20)], ids=["empty", "bytes", "9 MiB"])
def test_bodies_come_back_byte_for_byte(body: bytes, store: Store) -> None:
    store.put("x", body)
    assert store.get("x") == body
    assert list(store.list("")) == [("x", len(body))]


def test_of_many_who_put_at_once_one_wins_and_its_object_is_whole(store: Store) -> None:
    bodies = [bytes([number]) * 100_000 for number in range(8)]
    together, won = threading.Barrier(len(bodies)), []

    def put(body: bytes) -> None:
        together.wait()
        if store.put("runs/r/parts/00000000.jsonl", body):
            won.append(body)

    threads = [threading.Thread(target=put, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("runs/r/parts/00000000.jsonl") == won[0]


def test_listing_goes_over_page_ends_and_into_no_neighbour(store: Store) -> None:
    expected = [(f"runs/r/parts/{number:08d}.jsonl", number % 3) for number in range(1003)]  # S3 lists 1000 at a time
    threads = [
        threading.Thread(target=lambda some=expected[n::16]: [store.replace(key, b"x" * size) for key, size in some])
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.put("runs/r2/parts/00000000.jsonl", b"x")
    assert list(store.list("runs/r/parts/")) == expected
    assert [key for key, _ in store.list("runs/r/parts/0000100")] == [key for key, _ in expected[1000:]]
    assert list(store.list("runs/q")) == []


def test_folders_are_the_names_directly_below(store: Store) -> None:
    assert list(store.folders("runs/")) == []
    for key in ("runs/b/run.json", "runs/a/parts/0", "runs/a-1/x/y/z", "sets/s/set.json", "runs.txt"):
        store.put(key, b"x")
    assert list(store.folders("runs/")) == ["a", "a-1", "b"]


def test_a_check_leaves_nothing_behind(store: Store) -> None:
    store.check()
    assert list(store.list("")) == []


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/x", "a\0b"])
def test_no_key_leads_out_of_a_folder(key: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        FolderStore(tmp_path / "store").put(key, b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_in_a_folder_is_no_object(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("runs/r/parts/00000000.jsonl", b"x")
    young, old = (tmp_path / "runs/r/parts" / name for name in (".new-abc", ".new-def"))
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - 2 * LEFTOVER_SECONDS))
    assert list(store.list("runs/r/parts/")) == [("runs/r/parts/00000000.jsonl", 1)]
    store.check()
    assert young.exists() and not old.exists(), "what is being written is left alone"


def test_a_folder_that_is_full_or_gone_may_come_back(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder belongs")
    with pytest.raises(StoreUnavailable, match=r"Not a directory|File exists"):
        FolderStore(tmp_path).put("runs/r/x", b"x")


# -- S3: what is wrong, and whether waiting helps --------------------------------------------------------------------


def wrong_key(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    return s3(seaweed.endpoint, "x")


def wrong_secret(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    return s3(seaweed.endpoint, "x")


def no_keys(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return s3(seaweed.endpoint, "x")


def no_bucket(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Store:
    return s3(seaweed.endpoint, "x", bucket="nowhere")


def no_bucket_name(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Store:
    return s3(seaweed.endpoint, "x", bucket="a b")


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (wrong_key, "check AWS_ACCESS_KEY_ID"),
        (wrong_secret, "check AWS_SECRET_ACCESS_KEY"),
        (no_keys, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (no_bucket, "the bucket does not exist: create it, or change store.url"),
        (no_bucket_name, "Invalid bucket name"),
    ],
)
def test_what_no_waiting_mends_is_a_matter_of_settings(
    make: Callable[[SeaweedFS, pytest.MonkeyPatch], Store],
    advice: str,
    keys: SeaweedFS,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SettingsError) as raised:
        make(keys, monkeypatch).check()
    assert advice in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_endpoint_where_nobody_listens_is_away(keys: SeaweedFS, ports: Ports) -> None:
    with pytest.raises(StoreUnavailable, match="runs/"):
        s3(f"http://127.0.0.1:{ports.block(1)}", "x", patience_seconds=0.5).check()


def test_a_store_that_comes_back_in_time_was_never_away(keys: SeaweedFS, prefix: str, ports: Ports) -> None:
    with TcpProxy(("127.0.0.1", keys.port), ports.block(1)) as proxy:
        proxy.set("refuse")
        back = threading.Timer(1.0, proxy.set, ["pass"])
        back.start()
        assert s3(f"http://127.0.0.1:{proxy.port}", prefix, patience_seconds=60).put("x", b"x")
        back.join()


@pytest.mark.parametrize(
    "fault",
    [slow_down(times=3), internal_error(times=3), S3Fault("cut_put", times=3), S3Fault("lose_answer", times=1)],
    ids=lambda fault: f"{fault.what} {fault.code}",
)
def test_a_put_through_trouble_leaves_the_object_whole(
    fault: S3Fault, keys: SeaweedFS, prefix: str, ports: Ports
) -> None:
    with S3Proxy(keys.endpoint, ports.block(1)) as proxy:
        proxy.set(fault)
        s3(proxy.endpoint, prefix, patience_seconds=60).put("x", b"x" * 100_000)
    assert s3(keys.endpoint, prefix).get("x") == b"x" * 100_000


def test_what_is_read_through_trouble_is_whole(keys: SeaweedFS, prefix: str, ports: Ports) -> None:
    s3(keys.endpoint, prefix).put("x", b"x" * 100_000)
    with S3Proxy(keys.endpoint, ports.block(1)) as proxy:
        store = s3(proxy.endpoint, prefix, patience_seconds=60)
        for kind in ("GetObject", "ListObjectsV2"):
            proxy.set(S3Fault("cut_answer", {kind}, times=3))
            assert store.get("x") == b"x" * 100_000
            assert list(store.list("")) == [("x", 100_000)]
            assert proxy.faults[0].times == 0


def test_a_store_that_does_not_know_the_condition_keeps_the_last_whole_object(
    keys: SeaweedFS, prefix: str, ports: Ports
) -> None:
    with S3Proxy(keys.endpoint, ports.block(1), keys=keys.keys) as proxy:
        proxy.set(S3Fault("ignore_if_none_match"))
        store = s3(proxy.endpoint, prefix)
        assert store.put("x", b"first")
        assert store.put("x", b"second")
        assert store.get("x") == b"second"


def test_over_tls_nothing_is_sent_as_aws_chunked(
    keys: SeaweedFS, prefix: str, authority: Authority, ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDKs send bodies so by default over TLS, which some stores answer with 501."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    with S3Proxy(keys.endpoint, ports.block(1), tls=authority.context()) as proxy:
        proxy.set(S3Fault("refuse_aws_chunked"))
        store = s3(proxy.endpoint, prefix)
        store.check()
        assert store.put("x", b"x" * 100_000)
        assert store.get("x") == b"x" * 100_000


def test_prompt_files_are_streamed_from_any_bucket(keys: SeaweedFS, prefix: str) -> None:
    keys.client().put_object(Bucket=BUCKET, Key=f"{prefix}/prompts.jsonl", Body=b"1\n2\n")
    open_remote = open_object(keys.endpoint, "us-east-1")
    with open_remote(f"s3://{BUCKET}/{prefix}/prompts.jsonl") as stream:
        assert (stream.read(2), stream.read()) == (b"1\n", b"2\n")
    with pytest.raises(SettingsError, match="there is no such object"):
        open_remote(f"s3://{BUCKET}/{prefix}/nothing.jsonl")
