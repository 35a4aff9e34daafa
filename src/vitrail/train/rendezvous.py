"""Where processes started by torchrun find each other's addresses, each time anew.

torchrun keeps one store over all its restarts. In it gloo finds the addresses of processes that have died and tries
to connect to them: about every second restart fails. So the processes of one start agree on a prefix that no other
start has had. TORCHELASTIC_RESTART_COUNT would not do: it differs between machines of which one alone had a failure.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

PAUSE = 0.01
"""Seconds between two looks for processes that have not come yet."""


def new_store(rank: int, world: int, patience: timedelta) -> Store | None:
    """A store without a past; None where torch makes one for every start anyway."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    shared, _, _ = next(rendezvous("env://", rank, world, timeout=patience))
    return PrefixStore(agreed_prefix(shared, rank, world, patience), shared)


def agreed_prefix(store: Store, rank: int, world: int, patience: timedelta) -> str:
    """A name that the first process draws, and that all processes of this start have in the end.

    Each of the others asks under a name of its own, so that an answer cannot be that of an earlier start. What is
    asked may be: the first process answers until everyone has thanked it by the name that it has drawn.
    """
    name = uuid4().hex
    if rank:
        store.set(f"asks/{rank}", name)
        name = store.get(f"told/{name}").decode()
        store.set(f"{name}/knows/{rank}", "")
        return name
    missing, until = set(range(1, world)), time.monotonic() + patience.total_seconds()
    while missing:
        for other in filter(lambda other: store.check([f"asks/{other}"]), missing):
            store.set(f"told/{store.get(f'asks/{other}').decode()}", name)
        missing = {other for other in missing if not store.check([f"{name}/knows/{other}"])}
        if missing and time.monotonic() > until:
            raise RuntimeError(f"of {world} processes these did not come: {', '.join(map(str, sorted(missing)))}")
        time.sleep(PAUSE)
    return name
