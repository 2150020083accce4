"""End of vLLM's processes when the process that started them is gone.

vLLM does not detect that its owner was killed. An engine that is starting would wait for five
minutes, and a served engine forever. vLLM pickles its configuration for each process that it
starts. `EndsWithOwner` is a part of this configuration, so a process watches its owner before it
first waits for a message of the owner.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from crl.child_processes import OWNER_VARIABLE, Owner, kill_owned, start_time
from crl.scratch import SHARED_MEMORY, remove_stale_folders

OWNER_CHECK_S = 2.0
"""Seconds between two checks of the owner process."""

END_S = 20
"""Seconds after which the kernel ends a process that has noticed the end of its owner."""

_watching = threading.Event()


class EndsWithOwner:
    """Value of vLLM's `additional_config`. A process that unpickles it ends with its owner."""

    def compute_hash(self) -> str:
        """Return a constant, because vLLM's compiled code does not depend on the owner."""
        return ""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, ()


def _unpickle() -> EndsWithOwner:
    variable = os.environ.get(OWNER_VARIABLE)
    owner = Owner.parse(variable) if variable else None
    # A copy in the owner itself starts no thread.
    if owner and owner.process != os.getpid() and not _watching.is_set():
        _watching.set()
        threading.Thread(target=_watch, args=[owner], name="owner watch", daemon=True).start()
    return EndsWithOwner()


def _watch(owner: Owner) -> None:
    """Wait until the owner is gone. Then remove its files and kill all its processes.

    The owner is gone if it is a zombie or if another process now has its id. Other processes may be
    suspended, or hang in code that does not release the interpreter lock, so that they cannot end
    by themselves. vLLM hangs like this if a file that it waits for is removed.
    """
    while start_time(owner.process) == owner.started:
        time.sleep(OWNER_CHECK_S)
    signal.alarm(END_S)  # needs no lock; nothing else handles this signal
    _remove_files(owner)
    time.sleep(2 * OWNER_CHECK_S)  # the other processes remove their shared memory
    kill_owned(owner)
    _remove_files(owner)  # those that the killed processes have added
    os.kill(os.getpid(), signal.SIGKILL)


def _remove_files(owner: Owner) -> None:
    unlink_shared_memory()
    for parent in (owner.temporary, SHARED_MEMORY):
        remove_stale_folders(parent)


def unlink_shared_memory() -> None:
    """Remove the names of the shared memory of vLLM's CPU workers, which never do it themselves.

    Call this after vLLM has connected the workers, so that all have mapped the memory. The memory
    is freed when they end.
    """
    name = os.environ.get("VLLM_DIST_IDENT")  # set by vLLM in each worker of the CPU build
    for path in list(SHARED_MEMORY.iterdir()) if name else []:
        if path.name.startswith(f"{name}-"):
            path.unlink(missing_ok=True)
