"""Who saved a session: a keyed digest that only this user's home can make, so that one's own code runs unasked."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

from workbench.errors import StoreError
from workbench.store.home import home_dir

KEY_BYTES: Final = 32


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """`key` names the key and does not tell it."""

    key: str
    digest: str


def key_path() -> Path:
    return home_dir() / "session.key"


def seal_of(document: bytes) -> Seal:
    """The seal of this home; its key is made if there is none. `StoreError` when it cannot be."""
    key = _key(make=True)
    assert key is not None
    return _seal(key, document)


def is_ours(document: bytes, seal: Seal | None) -> bool:
    """Whether the document is, bit for bit, one that was saved with this home's key."""
    key = _key(make=False) if seal is not None else None
    if key is None or seal is None:
        return False
    return hmac.compare_digest(_seal(key, document).digest.encode(), seal.digest.encode())


def _seal(key: bytes, document: bytes) -> Seal:
    name = hashlib.sha256(b"name of " + key).hexdigest()[:16]
    return Seal(key=name, digest=hmac.new(key, document, hashlib.sha256).hexdigest())


def _key(*, make: bool) -> bytes | None:
    path = key_path()
    try:
        if make and not path.exists():
            _make(path)
        key = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}", hint="is DTRAIN_HOME yours?") from error
    return key if len(key) == KEY_BYTES else None


def _make(path: Path) -> None:
    """Whole or not at all, also when two processes do it at once: the first one's stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
