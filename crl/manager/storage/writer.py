"""Exclusive lock of the process that writes to a bank.

A second writer fails immediately, not after a timeout. Readers need no lock.
"""

from __future__ import annotations

import fcntl
import os
import platform
from pathlib import Path
from typing import TextIO

from crl.errors import StoreError, is_disk_full


def sibling_path(bank: Path, suffix: str) -> Path:
    """Return the path of a file beside the bank's file, named as SQLite names it.

    Symbolic links are followed.
    """
    real = Path(os.path.realpath(bank))
    return real.with_name(f"{real.name}-{suffix}")


def hard_link_problem(bank: Path) -> str:
    """Return why the bank cannot be used because of hard links, or "" if it can.

    A bank with several hard links cannot be used: a file beside one of the links is not beside the
    others.
    """
    links = bank.stat().st_nlink if bank.exists() else 1
    return (
        f"the file has {links} hard links, but its write-ahead log lies beside only one of them. "
        "Copy the file and use the copy"
        if links > 1
        else ""
    )


class WriterLock:
    """Lock on a file beside the bank. The file names the process that holds the lock.

    The kernel releases the lock when the process ends, even after a crash. Raise `StoreError` if
    the lock is already held (in this process too), if the file cannot be created, or if the bank
    has several hard links. The bank's own file cannot hold the lock: SQLite loses its locks when
    the process closes another handle of that file.
    """

    def __init__(self, bank: Path) -> None:
        if reason := hard_link_problem(bank):
            raise StoreError(f"{bank}: {reason}.")
        self._path = sibling_path(bank, "writer")
        try:
            self._file = self._acquire(bank)
        except OSError as error:
            remedy = "Its directory must exist and be writable"
            if is_disk_full(error):
                remedy = "Free some disk space"
            raise StoreError(f"{bank}: {error.strerror}. {remedy}.") from error

    def release(self) -> None:
        # Remove the file before the lock ends. Afterwards it could belong to the next holder.
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _acquire(self, bank: Path) -> TextIO:
        """Return the open lock file. Raise `StoreError` if the lock is already held."""
        while True:
            file = self._path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._still_linked(file):
                    self._write_holder(file)
                    return file
            except BlockingIOError:
                file.seek(0)
                holder = file.read() or "another process"
                raise StoreError(
                    f"{bank}: {holder} is writing to the bank. "
                    "End that process first, or use a copy of the bank."
                ) from None
            except BaseException:
                file.close()
                raise
            file.close()

    def _write_holder(self, file: TextIO) -> None:
        """Write the name of this process into the lock file."""
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
        except OSError:  # for example a full disk
            self._path.unlink(missing_ok=True)
            raise

    def _still_linked(self, file: TextIO) -> bool:
        """Return whether the locked file is still the file at the path.

        The previous holder may have removed the file between the opening and the lock.
        """
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False
