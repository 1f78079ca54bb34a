# SPDX-License-Identifier: Apache-2.0
"""One stage of a worker, while it lives: its gate's answer, its parts, flush, reset and report, and its end."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, cast

from omni_core.backend.base import DeviceBackend
from omni_core.integrations.vllm.errors import RowsNotKeptError, StageNotFoundError
from omni_core.integrations.vllm.stage_parts import StageParts
from omni_core.integrations.vllm.tap import ForwardTap
from omni_core.integrations.vllm.versions import in_process_worker
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.errors import CacheClosedError
from omni_core.prefix_cache.gate import GateDecision
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.settings.stage_settings import StageSettings
from omni_core.sinks.base import StageSink
from omni_core.sinks.memory import MemorySink

DEFAULT_FLUSH_TIMEOUT_S = 60.0
RESET_FLUSH_WAIT_S = 0.5
"""How long a reset lets the engine wait for rows that were computed before."""


class StageSession:
    """The live state of one stage's worker: the gate's answer, the parts of its cache, and a tap if there is one."""

    def __init__(
        self,
        settings: StageSettings,
        decision: GateDecision,
        *,
        parts: StageParts | None,
        tap: ForwardTap | None,
        told_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`told_settings` is what `report` says of every setting: its value and where it came from."""
        self.settings = settings
        self._told_settings = dict(told_settings or {})
        self.decision = decision
        self.tap = tap
        self._parts = parts
        self._closed = False
        self._finalizer: weakref.finalize[[], StageSession] | None = None
        if parts is not None:
            # A session whose worker was dropped is closed on a thread of its own: garbage is collected anywhere, also
            # on a thread that holds a lock which closing needs.
            self._finalizer = weakref.finalize(self, parts.close_elsewhere)
            self._finalizer.atexit = False
            # Registered after the cache's own hook, so it runs first: what was computed is delivered at exit.
            atexit.register(parts.close)

    @property
    def cache(self) -> OmniPrefixCacheManager | None:
        """The cache, on a stage that has one."""
        return None if self._parts is None else self._parts.cache

    @property
    def sink(self) -> StageSink | None:
        """The sink, on a stage with a cache: the rows of a `MemorySink` are read here."""
        return None if self._parts is None else self._parts.sink

    @property
    def backend(self) -> DeviceBackend | None:
        """The device backend, on a stage with a cache."""
        return None if self._parts is None else self._parts.backend

    def flush(self, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S, still_running: Collection[str] | None = None) -> None:
        """Hand every computed row to the sink, and end the requests that are not `still_running`. Between steps.

        With asynchronous scheduling, every row of a step whose output has been taken: of a later one it is not known
        yet which rows count.

        Args:
            timeout_s: the longest to wait.
            still_running: internal ids of every request that goes on: one that is not named gets no more rows. `None`
                ends no request.

        Raises:
            FlushTimeoutError: not done in time; may be repeated.
            TypeError: `still_running` is no collection of ids, such as one id alone; nothing was ended.
        """
        if self._parts is not None and not self._closed:
            self._parts.builder.flush(timeout_s, still_running)

    def begin_flush(self, still_running: Collection[str] | None = None) -> int:
        """As `flush`, but returns at once: a ticket for `wait_flushed`. Rows that come later do not move it."""
        return 0 if self._parts is None or self._closed else self._parts.builder.begin_flush(still_running)

    def wait_flushed(self, ticket: int, timeout_s: float) -> bool:
        """Whether the sink has everything from before the ticket, after waiting up to `timeout_s`. Any thread."""
        return self._parts is None or self._closed or self._parts.builder.wait_flushed(ticket, timeout_s)

    def flush_waits_for(self, ticket: int) -> str:
        """What a flush waits for, in words. Any thread."""
        return "nothing" if self._parts is None else self._parts.builder.flush_waits_for(ticket)

    def memory_sink(self) -> MemorySink | None:
        """Where the stage's rows are kept, to be read from any thread; `None` on a stage without a cache.

        Raises:
            RowsNotKeptError: the stage's sink keeps no rows.
        """
        if self._parts is None:
            return None
        if not isinstance(self._parts.sink, MemorySink):
            raise RowsNotKeptError(
                f"the sink {self.settings.sink!r} keeps no rows in the worker; read them where it puts them, or set "
                '"sink": "memory"'
            )
        return self._parts.sink

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """While this is entered the engine runs requests of its own making: neither the cache nor the tap sees them."""
        with ExitStack() as entered:
            if self._parts is not None:
                entered.enter_context(self._parts.hooks.warming_up())
            if self.tap is not None:
                entered.enter_context(self.tap.paused())
            yield

    def reset(self) -> dict[str, Any] | None:
        """Forget every row and request, and any failure; the fields of `ResetReport`. Engine thread, between steps.

        What was computed goes to the sink first, if that is done within `RESET_FLUSH_WAIT_S`. Requests that are open
        then fail there, and get no more rows. `None` on a stage without a cache.

        Raises:
            JoinTimeoutError: a write under way did not end; nothing was reset.
        """
        if self._parts is None or self._closed:
            return None
        self.wait_flushed(self.begin_flush(), RESET_FLUSH_WAIT_S)
        report = self._parts.cache.reset()
        self._parts.hooks.start_over()
        return cast("dict[str, Any]", _plain(asdict(report)))

    def bump_version(self, adapter_id: int | None) -> dict[str, Any] | None:
        """The weights (`None`) or an adapter have changed; the fields of `VersionReport`. Between steps.

        `None` on a stage without a cache, or whose cache is closed: it serves no row any more.

        Raises:
            ValueError: `adapter_id` stands for no adapter.
        """
        if self._parts is None or self._closed:
            return None
        cache = self._parts.cache
        try:
            report = cache.bump_weight_version() if adapter_id is None else cache.bump_adapter_version(adapter_id)
        except CacheClosedError:
            # Parts are closed without the session at the interpreter's end, and when its worker was dropped.
            return None
        return cast("dict[str, Any]", _plain(asdict(report)))

    def report(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; any thread. More of a stage with a cache."""
        decision = self.decision
        told: dict[str, Any] = {
            "gate": {
                "status": decision.status.value,
                "rule": decision.rule,
                "reason": decision.reason,
                "remedy": decision.remedy,
            },
            "closed": self._closed,
            "settings": self._told_settings,
        }
        if self._parts is not None:
            told["off_reason"] = self._parts.hooks.off_reason
            told["steps_failed"] = self._parts.hooks.steps_failed
            told["sink"] = self.settings.sink
            told["backend"] = self._parts.backend.name
            told["delivery"] = self._parts.builder.report()
            told["cache"] = _plain(asdict(self._parts.cache.stats()))
            told["geometry"] = _geometry(self._parts.cache.config)
        return told

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver what was computed, end every request in the sink, close everything. Idempotent; bounded.

        Args:
            timeout_s: the longest to wait for the sink; `None` is the setting `shutdown_timeout_s`.
        """
        if not self._closed:
            self._closed = True
            if self._parts is not None and self._finalizer is not None and self._finalizer.detach() is not None:
                self._parts.close(timeout_s)


def stage_session(llm: Any) -> StageSession:
    """The session of an `LLM` whose engine runs in this process, with or without a cache.

    Raises:
        StageNotFoundError: the worker is in another process, or is not one of Omni Core's.
    """
    worker = in_process_worker(llm)
    found = vars(worker).get("omni_core_session")
    if not isinstance(found, StageSession):
        raise StageNotFoundError(
            f"the engine's worker is a {type(worker).__qualname__}; give the engine one of Omni Core's, such as "
            'worker_cls="omni_core.integrations.vllm.cpu_worker.OmniCpuWorker"'
        )
    return found


def _geometry(config: PrefixCacheConfig) -> dict[str, Any]:
    """What the cache's sizes follow from, beside the settings."""
    return {
        "num_blocks": config.num_blocks,
        "block_size": config.block_size,
        "hidden_size": config.hidden_size,
        "hidden_dtype": str(config.hidden_dtype).removeprefix("torch."),
        "max_num_tokens": config.max_num_tokens,
        "caches_per_host": config.caches_per_host,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
