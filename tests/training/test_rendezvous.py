"""Processes restarted by torchrun find each other and ignore those that have died."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from vitrail.runtime.rendezvous import agree_on_prefix, new_store

TIMEOUT = timedelta(seconds=20)


def start_processes(store: dist.Store, *ranks: int) -> list[str]:
    """Start three processes in this order; returns the prefix each of them gets."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: agree_on_prefix(store, rank, 3, TIMEOUT), ranks))


def test_each_start_agrees_on_its_own_prefix():
    store = dist.HashStore()
    starts = [start_processes(store, *ranks) for ranks in ((0, 1, 2), (2, 1, 0), (1, 0, 2))]
    assert [len(set(prefixes)) for prefixes in starts] == [1, 1, 1]
    assert len({prefixes[0] for prefixes in starts}) == 3


def test_failed_start_does_not_affect_the_next():
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="of 3 processes these did not join: 1, 2"):
        agree_on_prefix(store, 0, 3, timedelta(seconds=0.01))
    for rank in (1, 2):  # they asked, then died
        store.set(f"asks/{rank}", f"dead-{rank}")
    assert len(set(start_processes(store, 0, 2, 1))) == 1


def test_new_store_is_none_without_torchrun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert new_store(0, 2, TIMEOUT) is None
