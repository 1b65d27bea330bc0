"""Keep the statuses of the ranks of a mesh in the store of the process group."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict

from autoshard.runtime.watch.live_store import LiveStore
from autoshard.runtime.watch.rank_status import Status

HOLDER = 0  # the rank whose process holds the store of the process group, if no launcher does


class StatusBoard:
    """The statuses of the ranks of a mesh, in the store of the process group."""

    def __init__(self, ranks: tuple[int, ...], rank: int, generation: int) -> None:
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
        self.rank, self.others = rank, [other for other in ranks if other != rank]
        self.is_held_here = rank == HOLDER and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = LiveStore(f"autoshard/{name}/{generation}")
        self.last_seen: Mapping[int, Status | None] = {}

    @property
    def is_alive(self) -> bool:
        """Return whether the store can be reached."""
        return self._store.is_alive

    def write(self, status: Status) -> None:
        """Tell the status of this rank."""
        self._store.write(str(self.rank), json.dumps(asdict(status)))

    def read(self) -> Mapping[int, Status | None]:
        """Return the last status of each other rank, or what was last seen of them if the store is gone."""
        texts = self._store.read([str(rank) for rank in self.others])
        if texts is not None:
            found = zip(self.others, texts, strict=True)
            self.last_seen = {rank: None if text is None else Status(**json.loads(text)) for rank, text in found}
        return self.last_seen
