"""CRC-32 as zlib has it, six times as fast where ISA-L is there; a rank may run under an interpreter that lacks it."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
