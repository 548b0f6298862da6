"""Checkpoint files in `torch.distributed.checkpoint`'s format: written with a checksum on the way, read without trust.

torch keeps no checksums, reads `.metadata` and everything that is no tensor as pickles that may call anything, and says
"unexpected pos 704 vs 598" where a disk is full. Here what is written can be read by `torch.load(weights_only=True)`,
nothing else is read, and the disk's own words are kept.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from workbench.training.crc import crc32
from workbench.training.manifest import FileRecord
from workbench.training.states import Path as TreePath
from workbench.training.states import Tree, UnfitError, set_leaf

BUFFER: Final = 1048576
LARGE: Final = 262144  # bytes from which on it pays to have another thread sum them
# What a `.metadata` may name; a dtype besides.
NAMED: Final = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip


# --- writing ----------------------------------------------------------------------------------------------------------


def write(tree: Tree, folder: Path, *, group: Any) -> dict[str, FileRecord]:
    """Write this rank's part into a folder that is there; all ranks of `group` at once (None: this process alone).

    Returns what this rank has written, durable. Raises `OSError` with the disk's own words when it was this rank's
    disk; `CheckpointException` of torch's when it was another's.
    """
    writer = _Writer(folder)
    silence_torch()
    with _summed_once(), writer.files:
        save(tree, storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=group is None)
    return writer.files.records


def _summed_once() -> contextlib.AbstractContextManager[object]:
    """In this thread torch leaves out its own CRC of each tensor: it takes as long as ours, and nobody looks at it.

    Where it would do so in all threads it is left alone: what the program saves is as ever.
    """
    try:
        from torch.utils.serialization import config

        known: Any = config._config["save.compute_crc32"]  # type: ignore[attr-defined]
        if isinstance(known.user_override, ContextVar):
            patch: contextlib.AbstractContextManager[object] = config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
            return patch
    except (ImportError, AttributeError, KeyError):  # an older torch
        pass
    return contextlib.nullcontext()


def silence_torch() -> None:
    """It warns where it is used in a single process, which we do on purpose."""
    message = "torch.distributed is disabled, unavailable or uninitialized"
    if not any(known[1] is not None and known[1].pattern.startswith(message) for known in warnings.filters):
        warnings.filterwarnings("ignore", message=message)


class _Files(FileSystem):
    """Counts and sums what is written, by the file's last name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: OSError | None = None
        self._summer = ThreadPoolExecutor(1, "dtrain-sums")

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._summer.shutdown()

    def sum(self, data: Any, before: int) -> Future[int]:
        """Begin to sum this, while it is written; its memory is to stay until that is done."""
        if len(data) >= LARGE:
            return self._summer.submit(crc32, data, before)
        done: Future[int] = Future()
        done.set_result(crc32(data, before))
        return done

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with Path(path).open("wb", buffering=BUFFER) as file:
                summed = _Summed(file, self)
                yield summed
                summed.flush()
        except OSError as error:
            self.error = self.error or error
            raise
        self.records[Path(path).name] = FileRecord(summed.size, summed.crc)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _Summed(io.RawIOBase):
    """A file whose content is summed while it is written. What is written is never gone back to."""

    def __init__(self, file: Any, files: _Files) -> None:
        self._file, self._files = file, files
        self.size = self.crc = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        summed = self._files.sum(data, self.crc)
        try:
            count: int = self._file.write(data)
        except OSError as error:  # torch's writer, in C++, makes something else of it
            self._files.error = self._files.error or error
            raise
        finally:
            self.crc = summed.result()
        self.size += count
        return count

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self._file.flush()
        number: int = self._file.fileno()
        return number

    def close(self) -> None:
        """The file is closed by who has opened it."""


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = self.files = _Files()

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception:
            if self.files.error is not None:
                raise self.files.error from None
            raise


class _SavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            check_readable(made.getbuffer(), write_item.index.fqn)
        return made


def pack(value: Any, name: str) -> torch.Tensor:
    """A value as bytes in a tensor. Raises `UnfitError` when it could not be read again."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except OSError:  # of no value's making
        raise
    except Exception as error:
        raise UnfitError(f"{name} cannot be kept: {type(error).__name__}: {error}") from None
    check_readable(stream.getbuffer(), name)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def unpack(tensor: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), map_location="cpu", weights_only=True)


def check_readable(data: Any, name: str) -> None:
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).strip().splitlines()
        what = next((line.strip() for line in first if "GLOBAL" in line), first[0] if first else "")
        raise UnfitError(f"{name} holds what could not be read again safely: {what[:300]}") from None


# --- reading ----------------------------------------------------------------------------------------------------------


class Reader(FileSystemReader):
    """Of a folder whose files have been checked. `known` is what its metadata say is in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.known = self.read_metadata()
        self.paths: Mapping[str, TreePath] = self.known.planner_data or {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        return metadata  # type: ignore[no-any-return]

    def tensors(self) -> Iterator[tuple[TreePath, torch.Size, torch.dtype]]:
        for name, what in self.known.state_dict_metadata.items():
            if isinstance(what, TensorStorageMetadata):
                yield tuple(self.paths.get(name, (name,))), what.size, what.properties.dtype

    def values(self) -> Iterator[TreePath]:
        """Paths of what is no tensor."""
        for name, what in self.known.state_dict_metadata.items():
            if not isinstance(what, TensorStorageMetadata):
                yield tuple(self.paths.get(name, (name,)))

    def read(self, targets: Mapping[TreePath, Any]) -> Tree:
        """Fill these tensors (and, where None stands, values) and give them as a tree. Needs no other rank."""
        tree: Tree = {}
        for path, target in targets.items():
            set_leaf(tree, path, target)
        silence_torch()
        try:
            load(tree, storage_reader=self, planner=_LoadPlanner(), no_dist=True)
        except CheckpointException as error:  # a BaseException, around the one that tells
            raise next((cause for cause, _ in error.failures.values()), RuntimeError(str(error))) from None
        return tree


class _LoadPlanner(DefaultLoadPlanner):
    """Reads values with weights_only."""

    def create_local_plan(self) -> LoadPlan:
        if missing := self.state_dict.keys() - self.metadata.state_dict_metadata.keys():  # type: ignore[union-attr]
            raise UnfitError(f"the checkpoint has no {min(missing)}")
        return super().create_local_plan()

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_leaf(self.original_state_dict, tuple(self.mappings[read_item.dest_index.fqn]), loaded)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if (module, name) in NAMED or module == "torch" else None
        if (module, name) in NAMED or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which a checkpoint has no use for")


def free_bytes(folder: Path) -> int:
    """What this user may still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
