"""A saved session as a file: written whole or not at all, read as if an enemy had written it.

What is read is bounded before it is unpacked, has a name that `document.NAME` knows, and has the size and digest that
`session.json` says. Nothing is ever unpacked to a place that a name in the file chooses.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import msgspec

from workbench.errors import SavedFileError
from workbench.store.home import sync_dir
from workbench.store.saved.document import (
    DOCUMENT,
    FORMAT,
    JOB,
    NAME,
    SCHEMA,
    SEAL,
    VERSION,
    Document,
    FileEntry,
    schema,
)
from workbench.store.saved.seal import Seal, is_ours, seal_of

MAX_FILES: Final = 200_000
MAX_DOCUMENT: Final = 64 * 2**20  # bytes, unpacked
MAX_FILE: Final = 512 * 2**20
MAX_TOTAL: Final = 2**30  # of all but checkpoints
BLOCK: Final = 2**20
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the same content is the same file
_Content = bytes | Path


def write(path: Path, document: Document, files: Mapping[str, _Content], seal: Seal | None = None) -> Document:
    """Put a session into `path`, in place of what was there; the document as it was written, with its `files`.

    A `Path` in `files` is copied without being read whole. `seal` None makes this home's. `SavedFileError` when the
    disk does not take it: what was there stays.
    """
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w+b") as file:
                written = _write_zip(file, document, files, seal)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_dir(path.parent)
    except OSError as error:
        raise SavedFileError(f"cannot write {path}: {error.strerror or error}", hint="is the disk full?") from error
    return written


def _write_zip(file: IO[bytes], document: Document, files: Mapping[str, _Content], seal: Seal | None) -> Document:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        entries = {name: _put(archive, name, content) for name, content in sorted(files.items())}
        document = msgspec.structs.replace(document, files=entries)
        data = msgspec.json.format(msgspec.json.encode(document), indent=1)
        _put(archive, DOCUMENT, data)
        _put(archive, SEAL, msgspec.json.encode(seal or seal_of(data)))
        _put(archive, SCHEMA, schema())
    return document


def _put(archive: zipfile.ZipFile, name: str, content: _Content) -> FileEntry:
    info = zipfile.ZipInfo(name, _DATE)
    info.external_attr = 0o600 << 16
    info.compress_type = zipfile.ZIP_STORED if isinstance(content, Path) else zipfile.ZIP_DEFLATED
    digest, size = hashlib.sha256(), 0
    with archive.open(info, "w", force_zip64=isinstance(content, Path)) as out:
        for block in _blocks(content):
            out.write(block)
            digest.update(block)
            size += len(block)
    return FileEntry(size=size, sha256=digest.hexdigest())


def _blocks(content: _Content) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


class Archive:
    """An open saved session; a context manager. `document` is checked, other files are when they are read.

    Raises `SavedFileError` for anything that is no whole session of a version that this one reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            hint = "was it moved?" if isinstance(error, FileNotFoundError) else "check its permissions"
            raise SavedFileError(f"cannot open {path}: {error.strerror}", hint=hint) from error
        weakref.finalize(self, self._file.close)  # in a notebook nobody closes what he looks at
        try:
            self._zip = self._open_zip()
            self._check_names()
            self.raw = self._unpack(DOCUMENT, MAX_DOCUMENT)
            self.document = _decode(path, self.raw)
            self._check_files()
            self.seal = self._seal()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._zip.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def is_ours(self) -> bool:
        """Whether it was saved with this home's key."""
        return is_ours(self.raw, self.seal)

    def read(self, name: str) -> bytes:
        """One file, whole and as it was saved; empty when the document has none of that name."""
        entry = self.document.files.get(name)
        if entry is None:
            return b""
        data = self._unpack(name, entry.size)
        if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise self._wrong(f"{name} is not what was saved: it was edited or damaged")
        return data

    def copy(self, name: str, target: Path) -> None:
        """One file, of any size, to `target`, which is there only if all of it is as it was saved."""
        entry = self.document.files[name]
        digest, size = hashlib.sha256(), 0
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as out:
                for block in self._stream(name, entry.size):
                    out.write(block)
                    digest.update(block)
                    size += len(block)
            if size != entry.size or digest.hexdigest() != entry.sha256:
                raise self._wrong(f"{name} is not what was saved: it was edited or damaged")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def verify(self) -> None:
        """Read all of it; raises where something is not as it was saved."""
        for name, entry in self.document.files.items():
            digest = hashlib.sha256()
            for block in self._stream(name, entry.size):
                digest.update(block)
            if digest.hexdigest() != entry.sha256:
                raise self._wrong(f"{name} is not what was saved: it was edited or damaged")

    # --- what is inside ---

    def _open_zip(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
            self._file.seek(0)
            is_zip = self._file.read(4) == b"PK\x03\x04"
            what = "is torn: its end is missing" if is_zip else "is no saved session"
            raise self._wrong(what, "save it again, or copy it again" if is_zip else "") from error

    def _check_names(self) -> None:
        infos = self._zip.infolist()
        if len(infos) > MAX_FILES:
            raise self._wrong(f"holds {len(infos)} files; a session has at most {MAX_FILES}")
        total = 0
        for info in infos:
            match = NAME.match(info.filename)
            if match is None or info.is_dir():
                raise self._wrong(f"holds a file that no session has: {info.filename[:100]!r}")
            if info.flag_bits & 1:
                raise self._wrong("is encrypted")
            if match["checkpoint"] is None:
                total += info.file_size
                if info.file_size > MAX_FILE or total > MAX_TOTAL:
                    raise self._wrong(f"would unpack to more than {MAX_TOTAL // 2**20} MiB", "do not trust it")
        if len({info.filename for info in infos}) != len(infos):
            raise self._wrong("holds a file twice")
        if DOCUMENT not in self._zip.NameToInfo:
            raise self._wrong(f"is no saved session: it has no {DOCUMENT}")

    def _check_files(self) -> None:
        """The document names what is there, and nothing else is."""
        there = {info.filename for info in self._zip.infolist()} - {DOCUMENT, SEAL, SCHEMA}
        if missing := sorted(self.document.files.keys() - there):
            raise self._wrong(f"is not whole: {missing[0]} is missing")
        if extra := sorted(there - self.document.files.keys()):
            raise self._wrong(f"holds {extra[0]}, which was not saved with it")
        for job_id in (job.job_id for job in self.document.jobs):
            if not JOB.match(job_id):
                raise self._wrong(f"holds a job with a name that no job has: {job_id[:100]!r}")
        for name, entry in self.document.files.items():
            if self._zip.getinfo(name).file_size != entry.size:
                raise self._wrong(f"{name} is not what was saved: it was edited or damaged")

    def _seal(self) -> Seal | None:
        if SEAL not in self._zip.NameToInfo:
            return None
        try:
            return msgspec.json.decode(self._unpack(SEAL, 4096), type=Seal)
        except msgspec.DecodeError:
            return None  # an unreadable seal is nobody's

    def _unpack(self, name: str, most: int) -> bytes:
        return b"".join(self._stream(name, most))

    def _stream(self, name: str, most: int) -> Iterator[bytes]:
        """Blocks; never more than `most` bytes, whatever the zip says of itself."""
        held = 0
        try:
            with self._zip.open(name) as file:
                while block := file.read(BLOCK):
                    held += len(block)
                    if held > most:
                        raise self._wrong(f"{name} is larger than it says")
                    yield block
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            OSError,
            NotImplementedError,
            RuntimeError,
            KeyError,
        ) as error:
            raise self._wrong(f"{name} is damaged: {error}", "save it again, or copy it again") from error

    def _wrong(self, what: str, hint: str = "") -> SavedFileError:
        return SavedFileError(f"{self.path.name}: {what}" if not what.startswith(_VERBS) else f"{self.path} {what}",
                              hint=hint)  # fmt: skip


_VERBS: Final = ("is ", "holds ", "would ")


def _decode(path: Path, data: bytes) -> Document:
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.DecodeError as error:
        raise SavedFileError(f"{path} is no saved session: {error}") from error
    if head.format != FORMAT:
        raise SavedFileError(f"{path} is no saved session, but {head.format[:60]!r}")
    reader = READERS.get(head.version)
    if reader is None:
        known = ", ".join(map(str, READERS))
        raise SavedFileError(
            f"{path} is of format version {head.version}; this dtrain workbench reads {known}",
            hint="pip install --upgrade dtrain-workbench" if head.version > VERSION else "",
        )
    try:
        return reader(data)
    except msgspec.DecodeError as error:
        raise SavedFileError(f"{path} has a {DOCUMENT} that cannot be read: {error}") from error


class _Head(msgspec.Struct):
    format: str
    version: int


def _read_2(data: bytes) -> Document:
    """Of version 1 too: what is new since are files."""
    return msgspec.json.decode(data, type=Document)


READERS: Final[Mapping[int, Callable[[bytes], Document]]] = {1: _read_2, 2: _read_2}
