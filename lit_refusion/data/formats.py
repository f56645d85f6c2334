"""Streaming raw records out of files of every kind; nothing is held but the record at hand.

A raw record is what a worker can parse by itself: the bytes of one JSON line, an object, the members of a WebDataset
sample, or the error that stands in its place.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from lit_refusion.errors import UserError, first_line

JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".zst")
SUFFIXES = (
    ".json",
    *JSON_LINES,
    *(kind + packed for kind in (".json", *JSON_LINES) for packed in COMPRESSED),
    ".parquet",
    ".tar",
    ".tar.gz",
)
MAX_LINE = 2**26
"""Bytes of the longest JSON line (64 MB); a longer one is a bad record, so that no line can fill the memory."""


class BadRecordError(UserError):
    """A record that cannot be used; `prepare` raises it or counts it, as `on_error` says."""


def read_raw(path: Path, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """Yield (record number from 1, raw record) of one file, in order.

    Args:
        path: the file's name, which tells its kind.
        file: the file, opened by the caller, who may ask it how far the reading has come.

    Raises:
        UserError: the file as a whole cannot be read.
    """
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    read = _tar if name.endswith(".tar") else _json_list if name.endswith(".json") else _json_lines
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path, file)
            return
        yield from read(path, _decompressed(path, file))
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{path}: cannot read it: {first_line(error)}; is it whole?") from error


def _decompressed(path: Path, file: IO[bytes]) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if not path.name.endswith(".zst"):
        return file
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: reading .zst needs an extra: pip install 'lit-refusion[zstd]'") from error
    return io.BufferedReader(_Zstd(file, zstandard), 2**20)


class _Zstd(io.RawIOBase):
    """Decompressed frames; unlike zstandard's own reader it notices a frame that is cut off."""

    def __init__(self, file: IO[bytes], library: Any) -> None:
        self._file, self._library = file, library
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._file.read(128)  # little, since 128 bytes can become megabytes
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame is cut off")
                return 0
            self._ready = b"".join(self._decompress(data))
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _decompress(self, data: bytes) -> Iterator[bytes]:
        while data:
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                yield self._frame.decompress(data)
            except self._library.ZstdError as error:
                raise OSError(str(error)) from error
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None


def _json_lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        if number == 1:
            line = _without_mark(path, line)
        if len(line) > MAX_LINE:
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE)
            problem = f"{path}: record {number}: a line of more than {MAX_LINE >> 20} MB; split or remove it"
            yield number, BadRecordError(problem)
        elif line.strip():
            yield number, line


def _json_list(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    import ijson

    head = _without_mark(path, stream.read(2**16))
    if not head.lstrip().startswith(b"["):
        raise UserError(f"{path}: expected a JSON list of records; if it holds one object a line, name it .jsonl")
    number = 0
    try:
        for number, record in enumerate(ijson.items(_Rest(head, stream.read), "item", use_float=True), start=1):
            yield number, record
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not valid JSON behind record {number} ({first_line(error)}); repair it there, or save it as "
            "UTF-8 .jsonl, where on_error=skip passes over bad records"
        ) from error


class _Rest:
    """A stream again, after its head was read."""

    def __init__(self, head: bytes, read: Callable[[int], bytes]) -> None:
        self._head, self._read = head, read

    def read(self, size: int) -> bytes:
        if size == 0 or not self._head:  # ijson asks for 0 bytes to see whether it gets bytes or text
            return self._read(size)
        head, self._head = self._head[:size], self._head[size:]
        return head


def _without_mark(path: Path, head: bytes) -> bytes:
    """The first bytes of a text file without the UTF-8 byte order mark."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path}: it is UTF-16 text; save it again as UTF-8")
    return head.removeprefix(b"\xef\xbb\xbf")


def _parquet(path: Path, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{path}: reading Parquet needs an extra: pip install 'lit-refusion[parquet]'") from error
    try:
        batches = parquet.ParquetFile(file).iter_batches(batch_size=1024)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {first_line(error)}") from error


def num_rows(path: Path) -> int | None:
    """Rows of a Parquet file, for progress: it is not read from front to back; None for other kinds."""
    if not path.name.endswith(".parquet"):
        return None
    try:
        from pyarrow import ArrowException, parquet

        return parquet.ParquetFile(path).metadata.num_rows
    except (ImportError, OSError, ArrowException):
        return None  # reading it will say why


@dataclass(frozen=True)
class Sample:
    """A WebDataset sample: the members of one key, by what follows the key in their names."""

    key: str
    members: dict[str, bytes]


class _Header(tarfile.TarInfo):
    """A member's header; unlike tarfile's own reading, one that is damaged or missing is not taken for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the blocks of zeros at the end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"damaged or cut off at byte {archive.offset} ({error})") from error


def _tar(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """WebDataset samples: members of one key, in a row."""
    from webdataset.tariterators import group_by_keys

    number = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
            for number, sample in enumerate(group_by_keys(_members(path, archive)), start=1):
                members = {name: value for name, value in sample.items() if not name.startswith("__")}
                yield number, Sample(sample["__key__"], members)
    except ValueError as error:
        raise UserError(f"{path}: behind sample {number}: {first_line(error)}; keys must be unique") from error


def _members(path: Path, archive: tarfile.TarFile) -> Iterator[dict[str, Any]]:
    for info in archive:
        file = archive.extractfile(info) if info.isfile() else None
        if file is not None:
            if info.size > MAX_LINE:
                raise tarfile.ReadError(f"{info.name} has more than {MAX_LINE >> 20} MB")
            yield {"fname": info.name, "data": file.read(), "__url__": str(path)}
        archive.members = []  # type: ignore[attr-defined]  # it would keep every header


def read_hub(hub: str, subset: str | None, split: str) -> tuple[Iterator[tuple[int, Any]], int]:
    """The records of a Hugging Face data set, numbered from 1, and how many there are.

    Args:
        hub: id on the hub, a folder of data files, or a folder written by `save_to_disk`.
        subset: name of a configuration; None for the default one.
        split: name of the split.

    Raises:
        UserError: the extra is missing, or the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"data.sources.hub={hub}: needs an extra: pip install 'lit-refusion[hub]'") from error
    try:
        if any((Path(hub) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            if subset is not None:
                raise ValueError("a folder written by save_to_disk has no subsets; leave them out")
            saved = datasets.load_from_disk(hub)
            data = saved[split] if isinstance(saved, dict) else saved
        else:
            data = datasets.load_dataset(hub, subset, split=split)
    except Exception as error:  # the library raises errors of a dozen kinds, bare ones among them
        what = f"{hub}, subset {subset or 'default'}, split {split}"
        raise UserError(f"data.sources.hub={what}: cannot load it: {first_line(error)}") from error
    return enumerate(data, start=1), len(data)
