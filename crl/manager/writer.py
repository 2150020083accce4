"""Who writes to a bank: one process at a time, found out at once and not by a timeout. Readers need no claim."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from pathlib import Path
from typing import TextIO

from crl.errors import StoreError


def beside(bank: Path, suffix: str) -> Path:
    """The file beside the bank's own, as SQLite names it: symbolic links are followed."""
    real = Path(os.path.realpath(bank))
    return real.with_name(f"{real.name}-{suffix}")


def several_names(bank: Path) -> str:
    """Why it cannot be used: what is beside a hard link is not beside the file's other names. Empty where it has one name, or none."""
    names = bank.stat().st_nlink if bank.exists() else 1
    return (
        f"it has {names} names (hard links), and its log lies beside one of them. Copy the file, and use the copy"
        if names > 1
        else ""
    )


class WriterClaim:
    """A lock on a file beside the bank that names its holder. The kernel takes it back when the process ends, however it ends.

    Made by whoever opens the bank for writing. Raises `StoreError` when another one holds it (in this process too), when the file cannot
    be made, or when the bank has several names. The bank's own file will not do: SQLite loses its locks when the process closes another
    handle of that file.
    """

    def __init__(self, bank: Path) -> None:
        if reason := several_names(bank):
            raise StoreError(f"{bank}: {reason}.")
        self._path = beside(bank, "writer")
        try:
            self._file = self._locked(bank)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "Free some disk space" if full else "Its directory must exist and be writable"
            raise StoreError(f"{bank}: {error.strerror}. {remedy}.") from error

    def release(self) -> None:
        self._path.unlink(
            missing_ok=True
        )  # before the lock ends: else it could be the next holder's file
        self._file.close()

    def _locked(self, bank: Path) -> TextIO:
        while True:
            file = self._path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(file):
                    self._sign(file)
                    return file
            except BlockingIOError:
                file.seek(0)
                holder = file.read() or "another process"
                raise StoreError(
                    f"{bank}: {holder} is writing to it. End that one first, or work on a copy."
                ) from None
            except BaseException:
                file.close()
                raise
            file.close()

    def _sign(self, file: TextIO) -> None:
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
        except OSError:  # a full disk
            self._path.unlink(missing_ok=True)
            raise

    def _is_there(self, file: TextIO) -> bool:
        """Not so when the holder before gave it up, and removed it, between the opening and the lock."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False
