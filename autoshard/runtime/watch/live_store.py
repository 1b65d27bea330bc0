"""Read and write the store of the process group from several threads, quietly once it is gone."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence

from passes._torch import store_address, watch_store


class LiveStore:
    """Keys of the process group's store under one prefix, over connections of their own.

    A store ends with the process that holds it, and torch prints a stack trace for each use after that. So an idle
    connection to the store is looked at before each use: it closes when the store ends.
    """

    def __init__(self, prefix: str) -> None:
        self._store = watch_store(prefix)
        self._lock = threading.Lock()
        address = store_address()
        self._idle = None if address is None else socket.create_connection(address)
        self._is_gone = False

    @property
    def is_alive(self) -> bool:
        """Return whether the store can still be reached."""
        if not self._is_gone and self._idle is not None:
            poll = select.poll()
            poll.register(self._idle, select.POLLIN)
            self._is_gone = bool(poll.poll(0))
        return not self._is_gone

    def write(self, key: str, text: str) -> None:
        """Set a key, if the store is still there."""
        with self._lock:
            if self.is_alive:
                try:
                    self._store.set(key, text)
                except RuntimeError:
                    self._is_gone = True

    def read(self, keys: Sequence[str]) -> list[str | None] | None:
        """Return what was written to each key; None of one that was not, and None for all if the store is gone."""
        with self._lock:
            if not self.is_alive:
                return None
            try:
                present = list(keys) if self._store.check(list(keys)) else [k for k in keys if self._store.check([k])]
                found = dict(zip(present, self._store.multi_get(present), strict=True)) if present else {}
            except RuntimeError:
                self._is_gone = True
                return None
        return [found[key].decode() if key in found else None for key in keys]
