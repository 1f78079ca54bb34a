# SPDX-License-Identifier: Apache-2.0
"""Finds requests by the engine's id, by the client's, and by the client's id that several samples share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from omni_core.sinks.base import PossibleSample

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", str, int)


@dataclass(frozen=True, slots=True)
class RequestNames:
    """What one request is called."""

    req_id: str
    client_req_id: str | None
    sample: PossibleSample | None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RequestNames:
        """The names in a JSON object that has the fields of this class. Pure; any thread.

        Raises:
            KeyError: a field is not there.
            TypeError: a value is of another type.
        """
        sample = fields["sample"]
        return cls(
            _checked(str, fields["req_id"]),
            None if fields["client_req_id"] is None else _checked(str, fields["client_req_id"]),
            None
            if sample is None
            else PossibleSample(
                _checked(str, sample["client_req_id"]), _checked(str, sample["group"]), _checked(int, sample["index"])
            ),
        )


@dataclass(slots=True)
class _Samples(Generic[K]):
    keys: dict[K, None] = field(default_factory=dict)
    indices_seen: set[int] = field(default_factory=set)


class RequestIndex(Generic[K]):
    """Keys of requests under their names. Not locked; every call costs as much as what it finds.

    A request whose id only looks like a sample's is found under its own names. Once a second sample of the same group
    came, all of the group are found under their client's id too.
    """

    def __init__(self) -> None:
        self._names: dict[K, RequestNames] = {}
        self._by_req_id: dict[str, dict[K, None]] = {}
        self._by_client: dict[str, dict[K, None]] = {}
        self._groups: dict[str, _Samples[K]] = {}
        self._groups_of_client: dict[str, dict[str, None]] = {}

    def add(self, key: K, names: RequestNames) -> None:
        """Make a request findable; a key that is there keeps its names."""
        if key in self._names:
            return
        self._names[key] = names
        self._by_req_id.setdefault(names.req_id, {})[key] = None
        if names.client_req_id is not None:
            self._by_client.setdefault(names.client_req_id, {})[key] = None
        if names.sample is not None:
            group = self._groups.setdefault(names.sample.group, _Samples())
            group.keys[key] = None
            group.indices_seen.add(names.sample.index)
            self._groups_of_client.setdefault(names.sample.client_req_id, {})[names.sample.group] = None

    def discard(self, key: K) -> None:
        """Forget a request. That another sample of its group was seen stays known while one of the group is here."""
        names = self._names.pop(key, None)
        if names is None:
            return
        _remove(self._by_req_id, names.req_id, key)
        if names.client_req_id is not None:
            _remove(self._by_client, names.client_req_id, key)
        if names.sample is not None:
            group = self._groups[names.sample.group]
            del group.keys[key]
            if not group.keys:
                del self._groups[names.sample.group]
                _remove(self._groups_of_client, names.sample.client_req_id, names.sample.group)

    def by_internal_id(self, req_id: str) -> tuple[K, ...]:
        """Requests with this internal id, in the order they were added: several only if the id was used again."""
        return tuple(self._by_req_id.get(req_id, ()))

    def by_client_id(self, client_req_id: str) -> tuple[K, ...]:
        """Requests a client calls so, and the samples of such a request; each once."""
        return tuple(self._of_client(client_req_id))

    def find(self, asked: str) -> tuple[K, ...]:
        """Requests under an id of either kind; each once."""
        return tuple(dict.fromkeys((*self.by_internal_id(asked), *self._of_client(asked))))

    def find_possible(self, asked: str) -> tuple[K, ...]:
        """As `find`, and requests that are found only once another sample of their group is: it may lie elsewhere."""
        possible = dict.fromkeys((*self.by_internal_id(asked), *self._by_client.get(asked, ())))
        for name in self._groups_of_client.get(asked, ()):
            possible.update(self._groups[name].keys)
        return tuple(possible)

    def names(self, key: K) -> RequestNames:
        """What a request is called."""
        return self._names[key]

    def has_sibling(self, key: K) -> bool:
        """Whether another sample of a request's group was seen here."""
        sample = self._names[key].sample
        return sample is not None and len(self._groups[sample.group].indices_seen) > 1

    def _of_client(self, client_req_id: str) -> Iterable[K]:
        found = dict(self._by_client.get(client_req_id, {}))
        for name in self._groups_of_client.get(client_req_id, ()):
            group = self._groups[name]
            if len(group.indices_seen) > 1:
                found.update(group.keys)
        return found


def _checked(wanted: type[V], value: object) -> V:
    if type(value) is not wanted:
        raise TypeError(f"{value!r:.100}: must be of type {wanted.__name__}")
    return value


def _remove(index: dict[str, dict[K, None]], name: str, key: K) -> None:
    keys = index[name]
    del keys[key]
    if not keys:
        del index[name]
