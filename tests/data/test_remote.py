"""Remote data: the same examples as on the local disk, fetched once, checked, and no more than the cache may hold."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import numpy as np
import pytest
from torch.utils.data import DataLoader

from lit_refusion.data import remote as module
from lit_refusion.data import shards as shards_module
from lit_refusion.data.remote import CacheConfig, RemoteFolder
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError
from tests.data.test_shards import ADDITIONS, OTHERS, all_ids, change_manifest, flip_byte, ids, prepare_folder, rewrite

SHARD_BYTES = 20_480
"""Each of the four shards."""


class Server(ThreadingHTTPServer):
    """Serves a folder on a free port of this machine, and notes what is asked for."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        self.requests: list[tuple[str, str]] = []
        self.before_get: Callable[[str], None] = lambda name: None
        self.breaks_off = False  # close the connection halfway through the body
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(root)))
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def url(self, path: str = "data") -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"

    def fetched(self, suffix: str = ".tar") -> Counter:
        """How often the content of each such file was asked for."""
        return Counter(Path(path).name for method, path in self.requests if method == "GET" and path.endswith(suffix))

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none of the test's business."""


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.before_get(Path(self.path).name)
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        outputfile.write(content[: len(content) // 2] if self.server.breaks_off else content)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        self.server.requests.append((self.command, self.path))

    def log_message(self, *arguments: Any) -> None:
        """No lines on the terminal."""


@pytest.fixture(scope="module")
def prepared(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 60 additions in four shards."""
    return prepare_folder(tmp_path_factory.mktemp("remote") / "data", tokenizer_folder, records=ADDITIONS)


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of them, to serve and to damage."""
    return Path(shutil.copytree(prepared, tmp_path / "web" / "data"))


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder.parent)
    yield server
    server.stop()


@pytest.fixture
def cache(tmp_path: Path) -> CacheConfig:
    return CacheConfig(folder=str(tmp_path / "cache"), max_gigabytes=1.0)


def shard_limit(cache: CacheConfig, count: float) -> CacheConfig:
    """The same cache with room for so many shards."""
    return CacheConfig(folder=cache.folder, max_gigabytes=(count * SHARD_BYTES + 1) / 1e9)


def cached(cache: CacheConfig, pattern: str = "*.tar") -> list[str]:
    return sorted(path.name for path in Path(cache.folder).rglob(pattern))


def remote_folder(shards: Shards) -> RemoteFolder:
    assert shards._remote is not None
    return shards._remote


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# The same as local data


def test_examples_are_those_of_the_local_folder(server: Server, folder: Path, cache: CacheConfig) -> None:
    local, remote = Shards(folder), Shards(server.url(), cache=cache)
    assert server.fetched() == {}  # shards come when they are read
    assert all_ids(remote) == all_ids(local)
    assert (remote.keys == local.keys).all()
    assert remote.token_counts().tolist() == local.token_counts().tolist()
    assert (remote.manifest, remote.origin) == (local.manifest, server.url())
    assert set(server.fetched().values()) == {1}
    copies = [path for path in remote.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert {path.relative_to(remote.folder): path.read_bytes() for path in copies} == {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lengths.png"  # nobody reads it
    }


def test_files_come_through_any_file_system_of_fsspec(folder: Path, cache: CacheConfig) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/test_remote", recursive=True)
    try:
        for url in ("memory://test_remote", f"file://{folder}"):
            shards = Shards(url, cache=CacheConfig(folder=f"{cache.folder}/{url[:4]}", max_gigabytes=1.0))
            assert all_ids(shards) == all_ids(Shards(folder))
    finally:
        memory.rm("/test_remote", recursive=True)


def test_a_slash_at_the_end_of_the_url_changes_nothing(server: Server, cache: CacheConfig) -> None:
    assert ids(Shards(f"{server.url()}/", cache=cache)[0]) == ids(Shards(server.url(), cache=cache)[0])
    assert not [path for _, path in server.requests if "//" in path]


@pytest.mark.parametrize(
    "megabytes",
    [
        2,
        12,
    ],
)
def test_large_files_come_from_a_server_without_range_requests(
    megabytes: int, server: Server, folder: Path, cache: CacheConfig
) -> None:
    content = np.random.default_rng(0).bytes(megabytes * 2**20 + 7)
    (folder / "large.bin").write_bytes(content)
    remote = RemoteFolder.open(server.url(), cache, manifest="manifest.json")
    entry = {"name": "large.bin", "num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert remote.fetch(entry).read_bytes() == content
    assert server.fetched(".bin") == {"large.bin": 1}


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_loader_processes_fetch_for_themselves(scheme: str, server: Server, folder: Path, cache: CacheConfig) -> None:
    """The parent has a network loop running, in a thread that no fork carries over."""
    shards = Shards(server.url() if scheme == "http" else f"file://{folder}", cache=cache)
    first = ids(shards[0])
    loader = DataLoader(shards, batch_size=None, sampler=range(60), num_workers=2, timeout=60)
    assert [ids(example) for example in loader] == all_ids(Shards(folder))
    assert ids(shards[0]) == first
    if scheme == "http":
        assert server.fetched() == {f"shard-{number:05d}.tar": 1 for number in range(4)}


def test_opening_leaves_no_network_session_for_a_fork_to_inherit(server: Server, cache: CacheConfig) -> None:
    """To close one, fsspec waits a second for a network loop that did not survive the fork."""
    gc.collect()
    gc.disable()
    try:
        shards = Shards(server.url(), cache=cache)
        left = [found for found in gc.get_objects() if type(found) is aiohttp.ClientSession and not found.closed]
    finally:
        gc.enable()
    assert len(shards) == 60
    assert len(left) == 0


def test_a_copy_sent_to_another_process_asks_for_nothing_again(server: Server, cache: CacheConfig) -> None:
    shards = Shards(server.url(), cache=cache)
    expected = all_ids(shards)
    server.requests.clear()
    content = pickle.dumps(shards)
    assert len(content) < 10_000
    assert all_ids(pickle.loads(content)) == expected
    assert server.requests == []


# The cache


def test_opening_again_fetches_the_manifest_alone(server: Server, cache: CacheConfig) -> None:
    expected = all_ids(Shards(server.url(), cache=cache))
    server.requests.clear()
    assert all_ids(Shards(server.url(), cache=cache)) == expected
    assert {path for _, path in server.requests} == {"/data/manifest.json"}


def test_a_copy_of_another_length_is_fetched_anew(server: Server, cache: CacheConfig) -> None:
    shards = Shards(server.url(), cache=cache)
    expected = all_ids(shards)
    for name in ("shard-00002.tar", "index.npy"):
        os.truncate(shards.folder / name, 100)  # as after a crash of the machine
    assert all_ids(Shards(server.url(), cache=cache)) == expected
    assert server.fetched()["shard-00002.tar"] == server.fetched(".npy")["index.npy"] == 2


def test_data_prepared_anew_under_the_same_url_is_not_mixed_with_the_old_copy(
    server: Server, folder: Path, tokenizer_folder: Path, cache: CacheConfig
) -> None:
    old = Shards(server.url(), cache=cache)
    expected = ids(old[0])
    shutil.rmtree(folder)
    other = [{**record, "response": record["response"].replace("answer", "result")} for record in ADDITIONS]
    prepare_folder(folder, tokenizer_folder, records=other)
    new = Shards(server.url(), cache=cache)
    assert all_ids(new) == all_ids(Shards(folder))
    assert new.folder != old.folder
    assert ids(old[0]) == expected  # what it has, it keeps
    with pytest.raises(UserError, match=r"/data/shard-00003\.tar: damaged or changed"):
        old[59]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_cache_never_holds_more_shards_than_it_may(
    count: int, server: Server, folder: Path, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "MAX_OPEN", 1)  # an open shard is not fetched again
    shards = Shards(server.url(), cache=shard_limit(cache, count + 0.5))
    expected = all_ids(Shards(folder))
    for number in np.random.default_rng(0).integers(0, 60, 40):
        assert ids(shards[int(number)]) == expected[number]
        assert f"shard-{number // 16:05d}.tar" in cached(cache)
        assert len(cached(cache)) <= count
    assert len(cached(cache)) == count
    assert len(cached(cache, "*.npy")) == 3  # the small files stay


def test_the_shards_used_least_recently_make_room(server: Server, cache: CacheConfig) -> None:
    shards = Shards(server.url(), cache=shard_limit(cache, 3))
    files = shards.manifest.shards
    for time, file in enumerate(files[:3], start=1000):
        os.utime(remote_folder(shards).fetch(file), (time, time))  # clocks of file systems are coarse
    remote_folder(shards).fetch(files[0])  # used again, so the second is the oldest
    remote_folder(shards).fetch(files[3])
    assert cached(cache) == ["shard-00000.tar", "shard-00002.tar", "shard-00003.tar"]
    assert server.fetched()["shard-00000.tar"] == 1


def test_the_limit_counts_all_data_sets_in_the_cache(
    server: Server, folder: Path, tokenizer_folder: Path, cache: CacheConfig
) -> None:
    prepare_folder(folder.parent / "others", tokenizer_folder, records=OTHERS)
    first = Shards(server.url(), cache=shard_limit(cache, 4.5))
    all_ids(first)
    second = Shards(server.url("others"), cache=shard_limit(cache, 4.5))
    assert all_ids(second) == all_ids(Shards(folder.parent / "others"))
    used = sum(path.stat().st_size for path in Path(cache.folder).rglob("*.tar"))
    assert used <= 4.5 * SHARD_BYTES
    assert len(list(first.folder.glob("*.tar"))) < 4
    assert len(list(second.folder.glob("*.tar"))) == 2


def test_an_open_shard_stays_readable_when_it_has_made_room(server: Server, folder: Path, cache: CacheConfig) -> None:
    shards = Shards(server.url(), cache=shard_limit(cache, 1))
    expected = all_ids(Shards(folder))
    for number in (0, 16, 32, 48, 1, 17, 33, 49):
        assert ids(shards[number]) == expected[number]
    assert len(cached(cache)) == 1
    assert sum(server.fetched().values()) == 4


def test_a_shard_evicted_before_it_is_opened_is_fetched_again(
    server: Server, folder: Path, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(server.url(), cache=cache)
    real, evictions = os.open, [True]

    def lose_and_open(path: Any, *arguments: Any, **settings: Any) -> int:
        if str(path).endswith(".tar") and evictions:
            evictions.pop()
            Path(path).unlink()  # as another process does that makes room
        return real(path, *arguments, **settings)

    monkeypatch.setattr(os, "open", lose_and_open)
    assert ids(shards[0]) == ids(Shards(folder)[0])
    assert not evictions


@pytest.mark.parametrize("call", ["utime", "stat"])
def test_a_shard_evicted_while_its_copy_is_looked_at_is_fetched_again(
    call: str, server: Server, folder: Path, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids(Shards(server.url(), cache=cache)[0])
    shards = Shards(server.url(), cache=cache)
    copy, evictions = shards.folder / "shard-00000.tar", [True]
    real_utime = os.utime

    def evict(path: Any) -> None:
        if Path(path) == copy and evictions:
            evictions.pop()
            copy.unlink()

    def utime(path: Any, *arguments: Any, **settings: Any) -> None:
        if call == "utime":
            evict(path)
        real_utime(path, *arguments, **settings)
        if call == "stat":
            evict(path)

    monkeypatch.setattr(os, "utime", utime)
    assert ids(shards[0]) == expected
    assert not evictions


def test_shards_fetched_at_the_same_time_keep_to_the_limit_together(server: Server, cache: CacheConfig) -> None:
    shards = Shards(server.url(), cache=shard_limit(cache, 1))
    first, second = shards.manifest.shards[:2]

    def fetch_another(name: str) -> None:
        if name == first["name"]:
            remote_folder(shards).fetch(second)

    server.before_get = fetch_another
    remote_folder(shards).fetch(first)
    assert server.fetched() == {first["name"]: 1, second["name"]: 1}
    assert len(cached(cache)) == 1


def test_only_what_the_cache_has_put_there_makes_room(server: Server, tmp_path: Path, cache: CacheConfig) -> None:
    mine = tmp_path / "cache" / "mine" / "shard-00000.tar"  # such as data prepared beside the cache
    mine.parent.mkdir(parents=True)
    mine.write_bytes(bytes(SHARD_BYTES))
    os.utime(mine, (1000, 1000))
    all_ids(Shards(server.url(), cache=shard_limit(cache, 2)))
    assert mine.exists()


def test_a_limit_smaller_than_a_shard_is_refused(server: Server, cache: CacheConfig) -> None:
    message = r"cache\.max_gigabytes=.*: smaller than http://.*/data/shard-00000\.tar \(0\.00 GB\); raise it"
    with pytest.raises(UserError, match=message):
        Shards(server.url(), cache=shard_limit(cache, 0.9))
    assert server.fetched() == {}


def test_a_limit_smaller_than_the_data_set_is_noted(
    server: Server, cache: CacheConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Shards(server.url(), cache=shard_limit(cache, 4))
    assert capsys.readouterr().out == ""
    Shards(server.url(), cache=shard_limit(cache, 3.9))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("cache.max_gigabytes=")
    assert f"the shards of {server.url()} have" in line
    assert "fetched again and again" in line


def test_two_processes_that_want_the_same_shard_fetch_it_once(server: Server, folder: Path, cache: CacheConfig) -> None:
    context = multiprocessing.get_context("fork")
    about_to_read = context.Semaphore(0)
    arrived = threading.Lock()

    def wait_for_both(name: str) -> None:
        if name.endswith(".tar") and arrived.acquire(blocking=False):  # the first request waits for both readers
            assert about_to_read.acquire(timeout=30)
            assert about_to_read.acquire(timeout=30)

    def read() -> None:
        shards = Shards(server.url(), cache=cache)
        about_to_read.release()
        found = all_ids(shards)
        os._exit(0 if found == expected else 1)

    expected = all_ids(Shards(folder))
    server.before_get = wait_for_both
    gc.collect()  # each session of fsspec that a fork inherits as garbage costs the child a second
    processes = [context.Process(target=read) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert server.fetched() == {f"shard-{number:05d}.tar": 1 for number in range(4)}
    assert cached(cache, "*.partial") == cached(cache, ".*.partial") == []


def test_what_a_killed_process_left_is_written_over(server: Server, folder: Path, cache: CacheConfig) -> None:
    shards = Shards(server.url(), cache=cache)
    (shards.folder / ".shard-00000.tar.partial").write_bytes(b"x" * 10 * SHARD_BYTES)
    assert ids(shards[0]) == ids(Shards(folder)[0])
    assert cached(cache, ".*.partial") == []


# Failures


FAILURES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda folder: (folder / "shard-00001.tar").unlink(), "cannot fetch it: "),
    "flipped byte": (flip_byte(19, 4), "damaged or changed (its checksum is not that of the manifest)"),
    "cut": (rewrite("shard-00001.tar", lambda data: data[:-512]), "damaged or changed"),
    "longer": (rewrite("shard-00001.tar", lambda data: data + b"x"), "damaged or changed"),
    "empty": (rewrite("shard-00001.tar", lambda data: b""), "damaged or changed"),
    "error page": (rewrite("shard-00001.tar", lambda data: b"<html>".ljust(len(data))), "damaged or changed"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_shard_that_cannot_be_had_is_named_and_leaves_nothing(
    name: str, server: Server, folder: Path, cache: CacheConfig
) -> None:
    expected = all_ids(Shards(folder))
    whole = (folder / "shard-00001.tar").read_bytes()
    shards = Shards(server.url(), cache=cache)
    damage, message = FAILURES[name]
    damage(folder)
    for _ in range(2):  # the second time it must not be taken from the cache
        with pytest.raises(UserError) as caught:
            shards[19]
        assert one_line(caught).startswith(f"{server.url()}/shard-00001.tar: {message}")
    assert cached(cache) == cached(cache, ".*.partial") == []
    assert ids(shards[3]) == expected[3]  # other shards still come
    (folder / "shard-00001.tar").write_bytes(whole)
    assert ids(shards[19]) == expected[19]  # and so does this one once it is mended


def test_a_connection_that_breaks_off_is_named_and_leaves_nothing(server: Server, cache: CacheConfig) -> None:
    shards = Shards(server.url(), cache=cache)
    server.breaks_off = True
    with pytest.raises(UserError) as caught:
        shards[0]
    assert one_line(caught).startswith(f"{server.url()}/shard-00000.tar: ")
    assert cached(cache) == cached(cache, ".*.partial") == []


@pytest.mark.parametrize("name", ["index.npy", "keys.npy", "tokenizer/tokenizer.json"])
def test_a_small_file_that_is_missing_or_damaged_is_named_on_opening(
    name: str, server: Server, folder: Path, cache: CacheConfig
) -> None:
    content = (folder / name).read_bytes()
    rewrite(name, lambda data: data[:-1] + bytes([data[-1] ^ 1]))(folder)
    with pytest.raises(UserError) as caught:
        Shards(server.url(), cache=cache)
    assert one_line(caught).startswith(f"{server.url()}/{name}: damaged or changed")
    (folder / name).unlink()
    with pytest.raises(UserError) as caught:
        Shards(server.url(), cache=cache)
    assert one_line(caught).startswith(f"{server.url()}/{name}: cannot fetch it: ")
    (folder / name).write_bytes(content)
    assert len(Shards(server.url(), cache=cache)) == 60


def test_a_copy_damaged_in_the_cache_is_fetched_again(server: Server, folder: Path, cache: CacheConfig) -> None:
    shards = Shards(server.url(), cache=cache)
    shards[19]
    flip_byte(19, 4)(shards.folder)
    for found in (shards, Shards(server.url(), cache=cache)):
        assert ids(found[19]) == ids(Shards(folder)[19])
    assert server.fetched()["shard-00001.tar"] == 2


def test_a_failure_that_passes_is_outlived(
    server: Server, folder: Path, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0)
    shards, failures = Shards(server.url(), cache=cache), [True, True]
    real = module._opened

    def fail_twice(url: str) -> Any:
        if failures:
            failures.pop()
            raise aiohttp.ServerDisconnectedError
        return real(url)

    monkeypatch.setattr(module, "_opened", fail_twice)
    assert ids(shards[0]) == ids(Shards(folder)[0])
    assert not failures


def test_a_folder_that_is_not_there_is_named(server: Server, folder: Path, cache: CacheConfig) -> None:
    for url in (server.url("nowhere"), f"file://{folder.parent}/nowhere", "memory://nowhere"):
        with pytest.raises(UserError) as caught:
            Shards(url, cache=cache)
        assert one_line(caught).startswith(f"{url}/manifest.json: cannot fetch it: ")


def test_a_page_in_place_of_the_manifest_is_a_user_error(server: Server, folder: Path, cache: CacheConfig) -> None:
    rewrite("manifest.json", lambda data: b"<html>Please log in</html>")(folder)
    with pytest.raises(UserError, match=r"manifest\.json: not a manifest") as caught:
        Shards(server.url(), cache=cache)
    one_line(caught)


def test_a_server_that_is_down_is_named(server: Server, folder: Path, cache: CacheConfig) -> None:
    late = Server(folder.parent)
    url = late.url()
    shards = Shards(url, cache=cache)
    late.stop()
    with pytest.raises(UserError) as caught:
        shards[0]
    assert one_line(caught).startswith(f"{url}/shard-00000.tar: cannot fetch it: ")
    with pytest.raises(UserError) as caught:
        Shards(url, cache=cache)
    assert one_line(caught).startswith(f"{url}/manifest.json: cannot fetch it: ")


def test_messages_tell_a_missing_file_from_a_server_that_is_down(
    server: Server, folder: Path, cache: CacheConfig
) -> None:
    late = Server(folder.parent)
    late.stop()
    reasons = []
    for url in (server.url("nowhere"), late.url("nowhere")):
        with pytest.raises(UserError) as caught:
            Shards(url, cache=cache)
        reasons.append(one_line(caught).removeprefix(f"{url}/manifest.json: cannot fetch it: ").replace(url, ""))
    assert reasons[0] != reasons[1]
    assert "/manifest.json" not in reasons


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nope://host/data", r"^nope://host/data/manifest\.json: cannot fetch it: Protocol not known: nope$"),
        ("http://", r"^http:/manifest\.json: cannot fetch it: "),
    ],
)
def test_urls_that_make_no_sense_are_named(url: str, message: str, cache: CacheConfig) -> None:
    with pytest.raises(UserError, match=message):
        Shards(url, cache=cache)


def test_a_file_system_that_is_not_installed_names_the_extra(
    cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any, **settings: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=r"^s3://bucket/data/manifest\.json: Install s3fs .*lit-refusion\[remote\]"):
        Shards("s3://bucket/data", cache=cache)


@pytest.mark.parametrize("name", ["index.npy", "shard-00000.tar"])
def test_a_full_disk_names_the_cache_folder(
    name: str, server: Server, folder: Path, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files fail when they are closed, large ones at a write."""
    real = Path.open

    def open_full(self: Path, mode: str = "r", *arguments: Any, **settings: Any) -> Any:
        if name in self.name and mode == "wb":
            real(self, mode).close()
            return open("/dev/full", mode)
        return real(self, mode, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        with pytest.raises(UserError) as caught:
            Shards(server.url(), cache=cache)[0]
    message = f"cache.folder={cache.folder}: cannot store the data there: No space left on device; choose another"
    assert one_line(caught).startswith(message)
    assert cached(cache, f"*{name}") == cached(cache, ".*.partial") == []
    assert ids(Shards(server.url(), cache=cache)[0]) == ids(Shards(folder)[0])


def test_a_cache_folder_that_cannot_be_made_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CacheConfig(folder=str(tmp_path / "file"), max_gigabytes=1.0)
    with pytest.raises(
        UserError, match=r"^cache\.folder=.*/file: cannot store the data there: Not a directory; choose"
    ):
        Shards(server.url(), cache=cache)


@pytest.mark.parametrize("name", ["../../outside.txt", "/{tmp_path}/outside.txt"])
def test_a_manifest_cannot_write_outside_the_cache(
    name: str, server: Server, folder: Path, tmp_path: Path, cache: CacheConfig
) -> None:
    """Whoever prepared the data chooses the names, and the content too."""
    name = name.format(tmp_path=str(tmp_path).lstrip("/"))
    served = folder.parent / "outside.txt" if ".." in name else folder / name.lstrip("/")
    served.parent.mkdir(parents=True, exist_ok=True)
    served.write_text("x")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    outside = {"name": name, "num_bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    change_manifest(files=[*files, outside])(folder)
    with pytest.raises(UserError, match=r"outside\.txt"):
        Shards(server.url(), cache=cache)
    assert not (tmp_path / "outside.txt").exists()


# Settings


def test_a_url_needs_a_cache() -> None:
    with pytest.raises(
        UserError, match=r"^data\.folder=memory://x: a remote folder needs a cache; give cache\.folder$"
    ):
        Shards("memory://x")


@pytest.mark.parametrize("size", [0, -1.0])
def test_a_cache_without_room_is_refused(size: float) -> None:
    with pytest.raises(UserError, match=rf"^cache\.max_gigabytes={size}: must be positive$"):
        CacheConfig(folder="cache", max_gigabytes=size)
