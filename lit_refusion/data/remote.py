"""Prepared data on a remote store, cached on the local disk."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from lit_refusion.errors import UserError, first_line

CHUNK = 2**20
NUM_TRIES = 10
NUM_DOWNLOADS = 4
PAUSE = 0.5
"""Seconds before the second try; doubled before each further one."""
PASSING = (asyncio.TimeoutError, ConnectionError, aiohttp.ClientError)
"""Failures that may pass."""
MARK = ".fetched"
"""File that marks a folder as the cache's own, so that nothing else is ever removed."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Where the files of remote data are kept.

    Args:
        folder: local folder; one a machine, shared by its processes.
        max_gigabytes: size limit of the shards in it; those used least recently make room.
    """

    folder: str
    max_gigabytes: float

    def __post_init__(self) -> None:
        if self.max_gigabytes <= 0:
            raise UserError(f"cache.max_gigabytes={self.max_gigabytes}: must be positive")


def is_remote(folder: str) -> bool:
    """Whether it is a URL rather than a local path."""
    return "://" in folder


@dataclass(frozen=True)
class RemoteFolder:
    """A folder behind a URL, and its copy.

    Args:
        url: the folder.
        cache: where copies go.
        folder: local folder with this data set's copies.
    """

    url: str
    cache: CacheConfig
    folder: Path

    @classmethod
    def open(cls, url: str, cache: CacheConfig | None, *, manifest: str) -> RemoteFolder:
        """The folder at `url`; its manifest, which names the copy, is always fetched anew."""
        url = url.rstrip("/")
        if cache is None:
            raise UserError(f"data.folder={url}: a remote folder needs a cache; give cache.folder")
        with _network_errors(f"{url}/{manifest}"), _opened(f"{url}/{manifest}") as file:
            content = file.read()
        folder = Path(cache.folder) / hashlib.sha256(content).hexdigest()[:16]
        remote = cls(url, cache, folder)
        with _disk_errors(cache):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARK).touch()
            temporary = folder / f".{manifest}.{os.getpid()}"
            temporary.write_bytes(content)
            temporary.replace(folder / manifest)
        return remote

    def fetch_all(self, files: Sequence[dict[str, Any]], *, shards: Sequence[dict[str, Any]]) -> None:
        """Fetch the small files; look whether the shards fit into the cache."""
        for file in files:
            self.fetch(file)
        limit = self._limit()
        for shard in shards:
            if shard["num_bytes"] > limit:
                raise UserError(
                    f"cache.max_gigabytes={self.cache.max_gigabytes}: smaller than {self.url}/{shard['name']} "
                    f"({shard['num_bytes'] / 1e9:.2f} GB); raise it"
                )
        total = sum(shard["num_bytes"] for shard in shards)
        if total > limit:
            print(
                f"cache.max_gigabytes={self.cache.max_gigabytes}: the shards of {self.url} have {total / 1e9:.1f} GB; "
                "training reads them in random order, so they will be fetched again and again",
                flush=True,
            )

    def fetch(self, file: dict[str, Any]) -> Path:
        """The local copy of a file, downloaded and checked where there is none yet.

        Raises:
            UserError: it cannot be fetched or stored, or is not the file that the manifest describes.
        """
        path, source = self.folder / file["name"], f"{self.url}/{file['name']}"
        with _disk_errors(self.cache):
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path.with_name(f".{path.name}.lock")):
                if _is_there(path, file["num_bytes"]):
                    return path
                temporary = path.with_name(f".{path.name}.partial")
                try:
                    found = self._download_patiently(source, temporary)
                    if found != file["sha256"]:
                        raise UserError(f"{source}: damaged or changed (its checksum is not that of the manifest)")
                    self._keep(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
        return path

    def open_shard(self, file: dict[str, Any]) -> int:
        """A descriptor of the local copy; fetched again if another process made room of it in between."""
        for _ in range(NUM_TRIES):
            try:
                return os.open(self.fetch(file), os.O_RDONLY)
            except FileNotFoundError:
                continue
        raise UserError(f"cache.max_gigabytes={self.cache.max_gigabytes}: too small for the processes that share it")

    def _download_patiently(self, source: str, target: Path) -> str:
        """A download that outlives a short failure of the network."""
        for number in range(NUM_DOWNLOADS - 1):
            try:
                return self._download(source, target)
            except UserError as error:
                if not isinstance(error.__cause__, PASSING):
                    raise
                time.sleep(PAUSE * 2**number)
        return self._download(source, target)

    def _download(self, source: str, target: Path) -> str:
        digest = hashlib.sha256()
        with target.open("wb") as out, _network_errors(source), _opened(source) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                try:
                    out.write(chunk)
                except OSError as error:
                    raise _cache_error(self.cache, error) from error
        return digest.hexdigest()

    def _limit(self) -> float:
        return self.cache.max_gigabytes * 1e9

    def _keep(self, temporary: Path, target: Path) -> None:
        """Give a download its name; for a shard, those used least recently make room. Open ones stay readable."""
        root = Path(self.cache.folder)
        with _lock(root / ".lock"):
            if target.suffix == ".tar":
                ours = [path for mark in root.glob(f"*/{MARK}") for path in mark.parent.glob("*.tar")]
                shards = sorted((path.stat().st_mtime, path) for path in ours)
                used = temporary.stat().st_size + sum(path.stat().st_size for path in ours)
                while shards and used > self._limit():
                    _, path = shards.pop(0)
                    used -= path.stat().st_size
                    path.unlink()
            temporary.replace(target)


def _is_there(path: Path, num_bytes: int) -> bool:
    """Whether the copy is whole; notes its use. Another process may remove it at any moment."""
    try:
        os.utime(path)
        return path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False


@contextmanager
def _opened(url: str) -> Iterator[Any]:
    """A remote file; file system and session are this file's alone, since they do not survive a fork."""
    import fsspec.asyn

    system, path = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    # From HTTP as one stream: not every server knows range requests.
    options: dict[str, Any] = {"block_size": 0} if url.startswith("http") else {"cache_type": "none"}
    try:
        with system.open(path, "rb", **options) as file:
            yield file
    finally:
        session = getattr(system, "_session", None)
        if session is not None and hasattr(session, "close"):
            fsspec.asyn.sync(system.loop, session.close)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _network_errors(url: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{url}: {first_line(error)}; pip install 'lit-refusion[remote]'") from error
    except Exception as error:  # every store has errors of its own
        what = "there is no such file" if isinstance(error, FileNotFoundError) else first_line(error)
        if isinstance(error.__cause__, Exception):  # fsspec puts its own, without the reason, in front
            what = first_line(error.__cause__)
        raise UserError(f"{url}: cannot fetch it: {what}") from error


@contextmanager
def _disk_errors(cache: CacheConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cache_error(cache, error) from error


def _cache_error(cache: CacheConfig, error: OSError) -> UserError:
    return UserError(
        f"cache.folder={cache.folder}: cannot store the data there: {error.strerror or error}; choose another folder "
        "or lower cache.max_gigabytes"
    )
