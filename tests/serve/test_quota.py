"""Quota and Lease: limits in total and per client."""

from __future__ import annotations

import pytest
from serving import need_extra  # noqa: F401  # skips where the service cannot run

from vitrail.serve.http_errors import RequestError
from vitrail.serve.quota import Lease, Quota, client_key


def acquire_error(quota: Quota, client: str, amount: int) -> tuple[int, str, str]:
    with pytest.raises(RequestError) as refused:
        quota.acquire(client, amount, lambda used: used / 10)
    return refused.value.status, refused.value.message, refused.value.headers["Retry-After"]


def test_one_client_may_hold_at_most_seven_eighths() -> None:
    quota = Quota("images are waiting already", 100)
    quota.acquire("a", 84)
    status, message, retry_after = acquire_error(quota, "a", 6)
    assert (status, retry_after) == (429, "9")
    assert message == "84 images are waiting already for your address, at most 88 are allowed; try again in 9 s."
    quota.acquire("b", 11)
    assert acquire_error(quota, "b", 6) == (503, "95 images are waiting already; try again in 10 s.", "10")
    quota.release("a", 84)
    quota.acquire("b", 64)
    assert quota.used == 75


def test_a_client_with_a_token_is_told_so() -> None:
    quota = Quota("images are waiting already", 8)
    quota.acquire("token app", 7)
    message = "7 images are waiting already for this token, at most 7 are allowed; try again in 1 s."
    assert acquire_error(quota, "token app", 1) == (429, message, "1")


def test_a_rejected_request_acquires_nothing_and_small_totals_are_not_split() -> None:
    quota = Quota("explanations are being made already", 2)
    quota.acquire("a", 2)
    assert acquire_error(quota, "b", 1)[0] == 503
    quota.release("a", 2)
    quota.acquire("b", 2)
    assert quota.used == 2


def test_a_lease_is_released_completely_and_once() -> None:
    quota = Quota("bytes", 100)
    lease = Lease(quota, "a")
    lease.acquire(10)
    lease.acquire(20)
    quota.acquire("a", 5)
    lease.release()
    lease.release()
    assert quota.used == 5
    quota.release("a", 5)
    assert not quota._clients  # clients without holdings are removed


@pytest.mark.parametrize(
    ("client", "key"),
    [
        (("10.0.0.1", 1), "10.0.0.1"),
        (("::ffff:10.0.0.1", 1), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 1), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
        (None, ""),
        (("", 0), ""),
    ],
)
def test_a_client_is_an_ipv4_address_or_an_ipv6_64_network(client: tuple[str, int] | None, key: str) -> None:
    assert client_key({"client": client}) == key
