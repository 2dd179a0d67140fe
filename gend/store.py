"""The store: where parts are, the only thing that outlives the box. A folder (`file:///`) or S3 (`s3://bucket/prefix`).

An object is written whole or not at all, and where the store can (`If-None-Match: *`; a hard link in a folder) it is
never replaced. Where a store ignores the condition, the last whole object wins, which is as good: both hold the same
rows of the same prompts.
"""

import base64
import contextlib
import errno
import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast
from urllib.parse import unquote, urlsplit

from gend.config import Store as StoreSettings
from gend.errors import SettingsError, StoreUnavailable

T = TypeVar("T")

LEFTOVER_SECONDS = 3600.0


class Store(Protocol):
    """What both kinds can do. Keys are relative, with `/`. Everything raises StoreUnavailable, SettingsError."""

    url: str

    def put(self, key: str, body: bytes) -> bool:
        """Write an object whole; False when one was there already and was left alone."""

    def replace(self, key: str, body: bytes) -> None:
        """Write an object whole, over one that is there."""

    def get(self, key: str) -> bytes | None:
        """The object, or None."""

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys that begin with `prefix`, sorted, each with its size in bytes."""

    def folders(self, prefix: str) -> Iterator[str]:
        """The names directly below `prefix` (which ends with `/`) that have something below them, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there. Nothing of a run is ever removed: this is for probes."""

    def check(self) -> None:
        """Whether we can read and write here. Raises SettingsError with what to change."""


def open_store(settings: StoreSettings) -> Store:
    """The store that the settings name. Raises SettingsError when they name none."""
    url = settings.url
    if not url:
        raise SettingsError("store.url is empty: say where parts shall go, s3://bucket/prefix or file:///folder")
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc:
            raise SettingsError(f"store.url: {url}: a folder is written file:///folder, with three slashes")
        return FolderStore(Path(unquote(parts.path)))
    if not parts.netloc:
        raise SettingsError(f"store.url: {url}: the bucket is missing; write s3://bucket/prefix")
    return S3Store(parts.netloc, parts.path.strip("/"), settings.endpoint, settings.region, settings.patience_seconds)


class FolderStore:
    """Objects as files below a folder."""

    def __init__(self, root: Path):
        self.root = root
        self.url = root.absolute().as_uri()

    def _path(self, key: str) -> Path:
        path = self.root / key
        if key.startswith("/") or "\0" in key or ".." in key.split("/"):
            raise SettingsError(f"store key {key!r} would leave {self.root}")
        return path

    def _write(self, key: str, body: bytes, replace: bool) -> bool:
        path = self._path(key)
        with self._reachable():
            _make_folder(path.parent)
            descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
            try:
                with open(descriptor, "wb") as file:
                    os.fchmod(file.fileno(), 0o644)
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                if replace:
                    os.replace(temporary, path)
                else:
                    _link(temporary, path)
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
            _sync_folder(path.parent)
        return True

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"store {self.root}: {error.strerror or error}") from error

    def put(self, key: str, body: bytes) -> bool:
        return self._write(key, body, replace=False)

    def replace(self, key: str, body: bytes) -> None:
        self._write(key, body, replace=True)

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        with self._reachable():
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with self._reachable():
            return path.is_file()

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        base = self._path(prefix)
        start = base if prefix.endswith("/") or not prefix else base.parent
        found = []
        with self._reachable():
            # A folder that cannot be read must not look empty: the batches in it would be made again.
            for home, folders, names in os.walk(start, onerror=_raise_unless_gone):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for name in names:
                    path = Path(home, name)
                    key = path.relative_to(self.root).as_posix()
                    if key.startswith(prefix) and not name.startswith(".new-"):
                        with contextlib.suppress(FileNotFoundError):
                            found.append((key, path.stat().st_size))
        return iter(sorted(found))

    def folders(self, prefix: str) -> Iterator[str]:
        home = self._path(prefix)
        with self._reachable():
            names = sorted(path.name for path in home.iterdir() if path.is_dir()) if home.is_dir() else []
        return iter(names)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._reachable():
            path.unlink(missing_ok=True)

    def check(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise SettingsError(f"store.url: {self.root} cannot be written: {error.strerror}") from error
        self._clear_leftovers()

    def _clear_leftovers(self) -> None:
        """Remove what killed writers left: no write takes so long, on this box or on another with the same folder."""
        for place in ("runs", "sets"):
            for home, _, names in os.walk(self.root / place):
                for name in names:
                    path = os.path.join(home, name)
                    with contextlib.suppress(OSError):  # its writer has just ended, or it is somebody else's
                        if name.startswith(".new-") and time.time() - os.stat(path).st_mtime > LEFTOVER_SECONDS:
                            os.unlink(path)


def _make_folder(path: Path) -> None:
    """Make a folder with its parents so that a power cut does not take their names away again."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(temporary: str, path: Path) -> None:
    """Give a file its name unless the name is taken, which rename would not notice. Raises FileExistsError."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.replace(temporary, path)  # a file system without hard links: the last whole object wins there


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


# Answers that mean "not now": asked to slow down, their own trouble, or credentials that may come back.
_LATER = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "OperationAborted", "ExpiredToken", "RequestTimeTooSkewed", "TokenRefreshRequired",
    "500", "502", "503", "504", "429", "408", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch",
}  # fmt: skip
# Answers that may be over once somebody has renewed the credentials (HEAD has no body: 400 and 403 say no more).
_CREDENTIALS = {
    "ExpiredToken", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "AccessDenied", "400", "401", "403",
}  # fmt: skip
# Answers that no waiting mends when we have only just started.
_SETTINGS = {
    "NoSuchBucket": "the bucket does not exist: create it, or change store.url",
    "InvalidAccessKeyId": "the access key is unknown there: check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "these credentials may not do that here: check key, secret and the bucket's policy",
    "403": "these credentials may not do that here: check key, secret and the bucket's policy",
    "PermanentRedirect": "the bucket is in another region: set store.region",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set store.region",
    "InvalidBucketName": "not a bucket name: change store.url",
}


class S3Store:
    """Objects in S3 or a compatible store (`endpoint`), through boto3."""

    def __init__(self, bucket: str, prefix: str, endpoint: str, region: str, patience_seconds: float):
        self.bucket, self.prefix, self.endpoint, self.region = bucket, prefix, endpoint, region
        self.patience_seconds = patience_seconds
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._conditional = True
        self._made_client: Any = None

    @property
    def _client(self) -> Any:
        if self._made_client is None:
            import boto3
            from botocore.config import Config

            config = Config(
                # One retry policy for the store, and it is `_retry`: the SDK's own gives up after about 1.6 s.
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=10,
                read_timeout=60,
                max_pool_connections=32,
                s3={"addressing_style": "path"} if self.endpoint else {},
                # The default sends bodies as aws-chunked over TLS, which compatible stores answer with 501.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            )
            self._made_client = boto3.session.Session().client(
                "s3", endpoint_url=self.endpoint or None, region_name=self.region or None, config=config
            )
        return self._made_client

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _retry(self, what: str, call: Callable[[], T]) -> T:
        """Run `call`, again and again with jitter while the store is away, for at most `patience_seconds`."""
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            NoCredentialsError,
            ParamValidationError,
            PartialCredentialsError,
        )
        from botocore.parsers import ResponseParserError

        deadline, pause = time.monotonic() + self.patience_seconds, 0.2
        while True:
            try:
                return call()
            except (NoCredentialsError, PartialCredentialsError) as error:
                self._made_client = None
                raise SettingsError(
                    f"store {self.url}: {error}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"
                ) from error
            except ParamValidationError as error:  # a bucket name that S3 does not know as one, before it is asked
                raise SettingsError(f"store.url: {self.url}: {' '.join(str(error).split())}") from error
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code", ""))
                if code in _CREDENTIALS:
                    self._made_client = None  # the next one reads them again
                if code in _SETTINGS:
                    raise SettingsError(f"store {self.url}: {what}: {code}: {_SETTINGS[code]}") from error
                if code not in _LATER:
                    raise
                reason = code
            except (BotoCoreError, ResponseParserError, OSError) as error:  # no route, reset, timeout, cut, not S3
                reason = " ".join(str(error).split())[:200]
            if time.monotonic() + pause > deadline:
                raise StoreUnavailable(f"store {self.url}: {what}: {reason}")
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, 15.0)

    def put(self, key: str, body: bytes) -> bool:
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if self._conditional else {}
        try:
            self._retry(f"put {key}", lambda: self._put(key, body, condition))
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in ("PreconditionFailed", "412"):
                return False
            if code in ("NotImplemented", "501") and condition:
                self._conditional = False  # a store that refuses the condition: the last whole object wins there
                return self.put(key, body)
            raise StoreUnavailable(f"store {self.url}: put {key}: {code}: {_message(error)}") from error
        return True

    def replace(self, key: str, body: bytes) -> None:
        self._call(f"put {key}", lambda: self._put(key, body, {}))

    def _put(self, key: str, body: bytes, condition: dict[str, str]) -> None:
        # The digest is sent as a header, so that a body damaged on the way is refused, over TLS and plain alike.
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        self._client.put_object(
            Bucket=self.bucket, Key=self._key(key), Body=body, ChecksumSHA256=digest, **condition
        )  # fmt: skip

    def get(self, key: str) -> bytes | None:
        def read() -> bytes:
            return cast(bytes, self._client.get_object(Bucket=self.bucket, Key=self._key(key))["Body"].read())

        return self._call(f"get {key}", read)

    def exists(self, key: str) -> bool:
        return (
            self._call(f"head {key}", lambda: self._client.head_object(Bucket=self.bucket, Key=self._key(key)))
            is not None
        )

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        cut = len(self._key(""))
        for page in self._pages(prefix):
            yield from ((item["Key"][cut:], item["Size"]) for item in page.get("Contents", ()))

    def folders(self, prefix: str) -> Iterator[str]:
        cut = len(self._key(prefix))
        for page in self._pages(prefix, Delimiter="/"):
            yield from (item["Prefix"][cut:].rstrip("/") for item in page.get("CommonPrefixes", ()))

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        while True:
            query = {"Bucket": self.bucket, "Prefix": self._key(prefix), "MaxKeys": 1000, **options}
            page = self._call(f"list {prefix}", lambda query=query: self._client.list_objects_v2(**query))  # type: ignore[misc]
            if page is None:
                raise SettingsError(f"store {self.url}: list: {_SETTINGS['NoSuchBucket']}")
            yield page
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    def _call(self, what: str, call: Callable[[], T]) -> T | None:
        """`_retry`, with None for what is not there."""
        from botocore.exceptions import ClientError

        try:
            return self._retry(what, call)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in ("NoSuchKey", "404", "NotFound"):
                return None
            raise StoreUnavailable(f"store {self.url}: {what}: {code}: {_message(error)}") from error

    def delete(self, key: str) -> None:
        self._call(f"delete {key}", lambda: self._client.delete_object(Bucket=self.bucket, Key=self._key(key)))

    def put_multipart(self, key: str, pieces: Sequence[bytes]) -> None:
        """Write an object in several requests, as S3 wants it above 5 GB. All pieces but the last: 5 MiB or more."""
        where = {"Bucket": self.bucket, "Key": self._key(key)}
        upload = self._call(f"begin {key}", lambda: self._client.create_multipart_upload(**where)["UploadId"])
        if upload is None:
            raise SettingsError(f"store {self.url}: {_SETTINGS['NoSuchBucket']}")

        def put_piece(number: int, piece: bytes) -> str:
            answer = self._client.upload_part(**where, UploadId=upload, PartNumber=number, Body=piece)
            return cast(str, answer["ETag"])

        try:
            tags = [
                self._call(f"put {key}", lambda number=number, piece=piece: put_piece(number, piece))  # type: ignore[misc]
                for number, piece in enumerate(pieces, 1)
            ]
            parts = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]}
            self._call(
                f"end {key}",
                lambda: self._client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload=parts),
            )
        except BaseException:
            with contextlib.suppress(StoreUnavailable):  # what is left of it costs money until somebody removes it
                self._call(f"abort {key}", lambda: self._client.abort_multipart_upload(**where, UploadId=upload))
            raise

    def check(self) -> None:
        for _ in self.list("runs/"):
            break
        probe = f"probe-{os.getpid()}-{time.time_ns():x}"
        self.replace(probe, b"gend was here")
        self.delete(probe)


def open_object(endpoint: str, region: str) -> Callable[[str], BinaryIO]:
    """A function that opens any `s3://bucket/key` for reading as a stream, for prompt files that lie there."""

    def open_it(url: str) -> BinaryIO:
        parts = urlsplit(url)
        reader = S3Store(parts.netloc, "", endpoint, region, 20.0)
        key = parts.path.lstrip("/")
        answer: Any = reader._call(f"get {key}", lambda: reader._client.get_object(Bucket=reader.bucket, Key=key))
        if answer is None:
            raise SettingsError(f"{url}: there is no such object")
        return cast(BinaryIO, answer["Body"])

    return open_it


def _message(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Message", ""))[:200]
