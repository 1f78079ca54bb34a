# SPDX-License-Identifier: Apache-2.0
"""What `DictionaryModel` keeps: blocks, lives of requests, and what steps carry."""

from dataclasses import dataclass, field


@dataclass
class Block:
    """The present tenancy of one KV block."""

    digest: int = 0
    adapter: int = 0
    """Whose rows it holds: those of the request that fills it."""
    private_to: object = None
    """Whose rows of content that the block's hash may not stand for it holds: a token of one life of a request id."""
    rows: dict = field(default_factory=dict)
    """Offset → key → row number."""


@dataclass
class Place:
    """One entry of a request's block table: the tenancy its rows belong to, unless the digest says they are others'."""

    block_id: int
    tenancy: Block
    withheld: bool = False


@dataclass(eq=False)
class Life:
    """One life of a request id, or one version of its content."""

    req_id: str
    table: list
    next: int
    promised: int
    draft_floor: int
    written: int
    """Below it, rows may lie in the request's blocks that are not of its content; a run there replaces them whole."""
    adapter: int = 0
    missing: set = field(default_factory=set)
    error: type | None = None
    backs_off: bool = False
    live: bool = True
    replaced: bool = False


@dataclass
class Run:
    """One request's rows in a step, as the layout names them."""

    req_id: str
    first: int
    rows: list
    """Row numbers."""
    slots: list
    """(block, offset) per row; `None` is not stored."""
    drafts: int = 0

    @property
    def last(self):
        return self.first + len(self.rows)


@dataclass
class Read:
    """Stored rows a step carries for one request: position → key → row number."""

    life: Life
    places: dict
    """Position → (block, offset), `None` where nothing can lie."""
    rows: dict = field(default_factory=dict)
    owed: bool = False


@dataclass
class SavedRun:
    run: Run
    life: Life | None
    again: int
    read: Read | None = None


@dataclass
class SavedStep:
    keys: tuple
    known_keys: tuple
    runs: dict
    failed: dict


@dataclass
class Expected:
    """What is delivered for one request."""

    positions: list
    keys: dict
    """Key → position → row number, 0 for zeros."""
    num_from_hits: int
    life: Life
    carried_owed: bool
