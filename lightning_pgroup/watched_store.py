"""The store of one generation, in which a wait for another rank ends as soon as that rank has failed.

A group is made by telling one's address in the store and waiting there for those of the others: there is no socket yet that a
failing rank could cut. Lightning makes a group with a timeout of 10,000 days around ``prepare_data`` (F29 of the design), so
that a rank which waits there for one that has failed would wait for ever. Here a wait looks at the record of failures too.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from lightning_pgroup import payload
from lightning_pgroup.bounded import run_bounded
from lightning_pgroup.errors import GarbledStoreError, RendezvousAbandonedError, RendezvousTimeoutError
from lightning_pgroup.exceptions import describe
from lightning_pgroup.gloo_wire import RankAddress, call_and_hang_up, parse
from lightning_pgroup.key_waiter import KeyWaiter

_SHORTEST = 8
_LONGEST_WHY = 2_000
_ADDRESS_KEY = re.compile(r"//[a-z]+//\d+/\d+$")
_OBITUARY = b"lightning_pgroup abandoned: "


class WatchedStore(Store):
    """A store for ``init_process_group`` and all groups that follow from it. Gloo asks it only while it makes a group.

    Gloo collects the addresses of all ranks, and then connects in C++ code, deaf to everything. So an address is set once for
    all, or else an obituary is, and a rank looks for failures once more when it has an address: whoever goes on to connect does
    so before a failing rank has told its failure and takes leave (:meth:`take_leave`).

    Torch's C++ code calls the methods of this class. It does not keep this object alive: whoever has the group must.

    Args:
        inner: The part of the store that belongs to one generation.
        waiter: Waits for its keys.
        timeout: Bound of a wait that is given none.
        who: This rank, for messages.
        check: Raises when waiting has become pointless. Called ten times a second by a rank that waits.
    """

    def __init__(self, inner: Store, waiter: KeyWaiter, timeout: timedelta, who: str, check: Callable[[], None]) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._inner: Any = inner  # torch's stubs know only half of what a store can do
        self._timeout = timeout
        self._who = who
        self._check = check
        self._waiter = waiter
        self._addresses: dict[str, bytes] = {}
        self._own: list[str] = []

    @property
    def addresses(self) -> tuple[bytes, ...]:
        """What all groups of this generation on this rank, sub-groups of other code too, told and heard of addresses (F30)."""
        return tuple(self._addresses.values())

    def addresses_of(self, groups: Collection[str]) -> tuple[bytes, ...]:
        """The addresses of some groups, by their names in torch."""
        return tuple(value for key, value in self._addresses.items() if _group_of(key) in groups)

    def take_leave(self, finished: Collection[str], timeout: timedelta) -> None:
        """Free the ranks that wait for this one in a creation that it will not finish. Never raises.

        To be called once its failure has been told.

        Args:
            finished: The names of the groups that this rank has.
            timeout: How long to wait at most.
        """

        def leave() -> None:
            with contextlib.suppress(Exception):  # the store may be what has failed
                call_and_hang_up(self._calls(finished), timeout)

        run_bounded(leave, timeout, "leave")

    def _calls(self, finished: Collection[str]) -> Iterator[tuple[RankAddress, int]]:
        """Whom to call, for each group that is not finished; whose address is missing there hears of it by an obituary."""
        for key in self._own:
            path, _, rank = key.rpartition("/")
            own = parse(self._addresses[key])
            if own is None or _group_of(key) in finished:
                continue
            for other in range(len(own.pairs)):
                peer = parse(self._inner.compare_set(f"{path}/{other}", b"", self._obituary("it has failed")))
                if peer is not None and other != int(rank) and len(peer.pairs) == len(own.pairs):
                    yield peer, int(rank)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key.

        Raises:
            RendezvousAbandonedError: Another rank has given up waiting for this address.
            GarbledStoreError: Something else than a rank has set it.
        """
        if not _is_address(key):
            self._inner.set(key, value)
            return
        own = value.encode() if isinstance(value, str) else bytes(value)
        self._own.append(key)
        self._addresses[key] = own
        found = self._living(self._inner.compare_set(key, b"", value))
        if found != own:
            raise self._garbled(key, found)

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it, at most the timeout of this store."""
        if key in self._addresses:
            return self._addresses[key]
        self.wait([key])
        value: bytes = self._addresses[key] if _is_address(key) else self._inner.get(key)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Args:
            keys: The keys.
            timeout: How long to wait at most; by default the timeout of this store.

        Raises:
            RendezvousTimeoutError: They did not come in time.
            RendezvousAbandonedError: A rank that should have set them has failed.
            GarbledStoreError: Something else than a rank has set one.
        """
        missing = [key for key in keys if key not in self._addresses]
        if missing and not self._inner.check(missing):
            limit = timeout or self._timeout
            self._waiter.watch(
                missing,
                limit,
                check=self._check,
                late=lambda waited: self._late(missing, waited, limit),
                last_words=(lambda error: self._obituary(describe(error))) if all(map(_is_address, missing)) else None,
            )
        for key in filter(_is_address, missing):
            self._addresses[key] = self._like_own(key, self._living(self._inner.get(key)))
            self._check()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._inner.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return int(self._inner.add(key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; returns the value that it has then."""
        found: bytes = self._inner.compare_set(key, expected, desired)
        return found

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._inner.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys; waits for them."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether the store can append and serve several keys at once."""
        return bool(self._inner.has_extended_api())

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        self._addresses.pop(key, None)
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        """The number of keys of the whole store."""
        return int(self._inner.num_keys())

    def clone(self) -> Store:
        """A plain client for another thread; waits on it are not watched."""
        client: Store = self._inner.clone()
        return client

    # Torch's C++ code asks for these two by their names there.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _late(self, keys: list[str], waited: float, timeout: timedelta) -> RendezvousTimeoutError:
        missing = [key for key in keys if not self._inner.check([key])]
        ranks = ", ".join(key.rpartition("/")[2] for key in missing if _is_address(key))
        what = f"rank {ranks} of that group" if ranks else f"the keys {missing}"
        names = sorted({_group_of(key) for key in missing if _is_address(key)})
        return RendezvousTimeoutError(
            f"{self._who} waited {waited:.1f} s of {timeout.total_seconds():.1f} s for {what} in the creation of a process"
            f" group ({', '.join(names) or 'unknown'} in torch), in vain. Let all ranks create the same"
            " groups in the same order; if a rank only needs longer, raise the `timeout` of the group."
        )

    def _obituary(self, why: str) -> bytes:
        return _OBITUARY + f"{self._who} gave up, {why}".encode(errors="replace")

    def _living(self, value: bytes) -> bytes:
        """An address, unless it is an obituary."""
        if value.startswith(_OBITUARY):
            why = payload.clean(value.removeprefix(_OBITUARY)[:_LONGEST_WHY].decode(errors="replace"))
            raise RendezvousAbandonedError(f"{self._who} can not go on creating a process group: {why}")
        return value

    def _like_own(self, key: str, value: bytes) -> bytes:
        """An address of the form of this rank's own: gloo reads any other beyond its end, which can end the process.

        Of another torch, whose form is not known here, all is taken that has room for an address.
        """
        path = key.rpartition("/")[0]
        own = next((parse(self._addresses[one]) for one in self._own if one.rpartition("/")[0] == path), None)
        if own is None:
            fits = len(value) >= _SHORTEST
        else:
            other = parse(value)
            fits = other is not None and len(other.pairs) == len(own.pairs)
        if not fits:
            raise self._garbled(key, value)
        return value

    def _garbled(self, key: str, found: bytes) -> GarbledStoreError:
        error = payload.garbled(key, "the address of a rank", found)
        return GarbledStoreError(f"{self._who} can not go on creating a process group: {error}")


def _is_address(key: str) -> bool:
    """Whether a key is one under which gloo tells an address; these are set once and never change."""
    return _ADDRESS_KEY.search(key) is not None


def _group_of(key: str) -> str:
    """The name in torch of the group whose address stands under a key."""
    return key.split("//")[-3]
