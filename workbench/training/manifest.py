"""What makes a folder a checkpoint: a manifest, written when all its files are durable.

The format lives here alone, for ranks (which write and check) and agents (which list): JSON with each file's size and
CRC-32, what saved it, and a digest of all that. Standard library only. A folder without a whole manifest is no
checkpoint; one whose files are not what the manifest says is refused before any value is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from workbench.training.crc import crc32

NAME: Final = "manifest.json"
MARK: Final = "problem.txt"  # what a thorough check has found wrong, beside the manifest
FORMAT: Final = 1
BLOCK: Final = 2**20
ADDED: Final = ("proof", "agreed")  # fields that older manifests of the same format do not have


class ManifestError(ValueError):
    """The manifest is not there, or not what was written; the text says which."""


class FileRecord(NamedTuple):
    """Size in bytes, and `zlib.crc32` of all of them."""

    size: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`step`: optimizer steps finished; `saved_at`: epoch s; `torch` and `dtrain`: versions that wrote it."""

    step: int
    world_size: int
    saved_at: float
    files: Mapping[str, FileRecord]
    job_id: str = ""
    restart_count: int = 0
    torch: str = ""
    dtrain: str = ""
    format: int = FORMAT
    proof: str = ""  # `proof.Proof.whole` of the program's tensors as rank 0 had them
    agreed: bool | None = None  # whether all ranks had the same of what they share; None: they share nothing

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over all that it says."""
        return hashlib.sha256(_canonical(self)).hexdigest()[:32]


def _document(manifest: Manifest) -> dict[str, Any]:
    """Without what is newer than the format and not there."""
    return {name: value for name, value in asdict(manifest).items() if name not in ADDED or value not in ("", None)}


def content_digest(manifest: Manifest) -> str:
    """Equal for equal training states of two runs: `tensors:` and the proof of the tensors where the manifest has it.

    Else over the files, which hold random states as well; torch's own `.metadata` has what differs from save to save.
    """
    if manifest.proof:
        return f"tensors:{manifest.proof}"
    tensors = sorted((name, *record) for name, record in manifest.files.items() if not name.startswith("."))
    return hashlib.sha256(json.dumps([manifest.world_size, tensors]).encode()).hexdigest()[:32]


def _canonical(manifest: Manifest) -> bytes:
    return json.dumps(_document(manifest), sort_keys=True, separators=(",", ":")).encode()


def encode(manifest: Manifest) -> bytes:
    """As it lies on disk."""
    return json.dumps({**_document(manifest), "digest": manifest.digest}, indent=1).encode()


def decode(data: bytes) -> Manifest:
    """The inverse of `encode`; `ManifestError` for anything else, a single changed bit included."""
    try:
        document = json.loads(data)
        digest = document.pop("digest")
        manifest = _from_document(document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestError(f"{NAME} is damaged: it cannot be read") from error
    if manifest.format != FORMAT:
        raise ManifestError(f"{NAME} is of format {manifest.format}; this version reads format {FORMAT}")
    # Encoded again rather than looked at field by field: a number that has changed its type has changed.
    if digest != manifest.digest or encode(manifest) != data:
        raise ManifestError(f"{NAME} is damaged: its digest does not fit")
    return manifest


def _from_document(document: dict[str, Any]) -> Manifest:
    known = {field.name for field in fields(Manifest)}
    files = {name: FileRecord(*record) for name, record in document["files"].items()}
    if any(name != Path(name).name or name in ("", ".", "..") for name in files):
        raise ValueError("a file outside the folder")
    return Manifest(**{**{name: value for name, value in document.items() if name in known}, "files": files})


def read(folder: Path) -> Manifest:
    """The folder's manifest; `ManifestError` in words when there is none that can be used."""
    try:
        data = (folder / NAME).read_bytes()
    except FileNotFoundError:
        raise ManifestError(f"{NAME} is missing") from None
    except OSError as error:
        raise ManifestError(f"{NAME} cannot be read: {error.strerror}") from error
    if not data:
        raise ManifestError(f"{NAME} is empty")
    return decode(data)


def checksum(path: Path) -> FileRecord:
    """Read the whole file. Raises `OSError`."""
    size = crc = 0
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            crc = crc32(block[:count], crc)
            size += count
    return FileRecord(size, crc)


def quick_problem(folder: Path, manifest: Manifest) -> str:
    """What names and sizes tell against the checkpoint, in words; empty: nothing."""
    for name, record in manifest.files.items():
        if problem := _size_problem(folder / name, record):
            return problem
    with suppress(OSError):
        return (folder / MARK).read_text(encoding="utf-8").strip()
    return ""


def _size_problem(path: Path, record: FileRecord) -> str:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    if size == record.size:
        return ""
    if size == 0:
        return f"{path.name} is empty; it had {record.size} bytes"
    if size < record.size:
        return f"{path.name} is truncated: {size} of {record.size} bytes"
    return f"{path.name} has {size} bytes; it had {record.size}"


def find_problem(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> str:
    """What is wrong with the checkpoint, its content included; empty: it is what was saved.

    `names`: only these files, where several ranks share the work. Reads all of them.
    """
    for name, record in manifest.files.items():
        if names is not None and name not in names:
            continue
        if problem := _size_problem(folder / name, record):
            return problem
        try:
            found = checksum(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != record:
            return f"{name} is damaged: its checksum is {found.crc:08x}, it was {record.crc:08x}"
    return ""


def mark(folder: Path, problem: str) -> None:
    """Have every later quick check know what a thorough one found; "" takes that back. A full disk is no matter."""
    with suppress(OSError):
        if problem:
            write_durably(folder / MARK, problem.encode())
        else:
            (folder / MARK).unlink(missing_ok=True)


def write_durably(path: Path, data: bytes) -> None:
    """Replace the file as a whole: temporary name, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
