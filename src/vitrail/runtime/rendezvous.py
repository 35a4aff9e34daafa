"""A fresh key-value store for the processes of each start by torchrun, in which they exchange their addresses.

torchrun keeps one store over all restarts. In it gloo finds the addresses of dead processes and tries to connect to
them: about every second restart fails. So the processes of one start agree on a key prefix that no earlier start has
used. TORCHELASTIC_RESTART_COUNT cannot serve as the prefix: it differs between machines if only one had a failure.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

POLL_INTERVAL_S = 0.01
"""Seconds between two checks for processes that have not joined yet."""


def new_store(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """A store with a prefix of its own; None if torch creates a new store for every start anyway."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    shared, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    return PrefixStore(agree_on_prefix(shared, rank, world_size, timeout), shared)


def agree_on_prefix(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A random name chosen by rank 0 and shared with all processes of this start.

    Every other rank requests it under a random key of its own, so that a reply cannot be left over from an earlier
    start. A request can be; rank 0 therefore keeps replying until every rank has acknowledged the new name.
    """
    name = uuid4().hex
    if rank:
        store.set(f"request/{rank}", name)
        name = store.get(f"reply/{name}").decode()
        store.set(f"{name}/acknowledged/{rank}", "")
        return name
    missing, until = set(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in filter(lambda other: store.check([f"request/{other}"]), missing):
            store.set(f"reply/{store.get(f'request/{other}').decode()}", name)
        missing = {other for other in missing if not store.check([f"{name}/acknowledged/{other}"])}
        if missing and time.monotonic() > until:
            raise RuntimeError(f"of {world_size} processes these did not join: {', '.join(map(str, sorted(missing)))}")
        time.sleep(POLL_INTERVAL_S)
    return name
