"""Processes that torchrun starts again find each other, not those that have died."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from vitrail.train.rendezvous import agree_on_prefix, new_store

SOON = timedelta(seconds=20)


def start(store: dist.Store, *ranks: int) -> list[str]:
    """Processes of one start, three in all, as they come."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: agree_on_prefix(store, rank, 3, SOON), ranks))


def test_each_start_agrees_on_a_prefix_of_its_own():
    store = dist.HashStore()
    found = [start(store, *ranks) for ranks in ((0, 1, 2), (2, 1, 0), (1, 0, 2))]
    assert [len(set(names)) for names in found] == [1, 1, 1]
    assert len({names[0] for names in found}) == 3


def test_a_start_that_failed_half_way_does_not_mislead_the_next():
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="of 3 processes these did not join: 1, 2"):
        agree_on_prefix(store, 0, 3, timedelta(seconds=0.01))
    for rank in (1, 2):  # which asked, and died
        store.set(f"asks/{rank}", f"dead-{rank}")
    assert len(set(start(store, 0, 2, 1))) == 1


def test_without_torchrun_the_store_is_torchs_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert new_store(0, 2, SOON) is None
