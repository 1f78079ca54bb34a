# SPDX-License-Identifier: Apache-2.0
"""What a model says of its rows' identity: found by entry point, and only when prefix caching is on.

    [project.entry-points."omni_core.diffusion_models"]
    tiny-hunyuan = "omni_core.diffusion_kv.tiny_hunyuan.hook:TinyHunyuanHook"

The name is the architecture; the object takes the pipeline and gives a `ModelHook`. A model may have one if no query in
its prefix attends to a key in its target or trailer, and nothing in its prefix depends on the timestep or the noise.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from omni_core.diffusion_kv.config import DiffusionKVConfig
from omni_core.diffusion_kv.errors import DiffusionKVConfigError, RowError
from omni_core.diffusion_kv.identity.namespace import ModelIdentity, namespace
from omni_core.diffusion_kv.pipeline import AnyPipeline, LoRARequest, PreparedRequest
from omni_core.diffusion_kv.rows import RowIdentity
from omni_core.plugins import InstalledPlugin, PluginGroup
from omni_core.runtime import Runtime

HOOK_GROUP = PluginGroup(
    group="omni_core.diffusion_models",
    kind="model hook",
    unknown_error=DiffusionKVConfigError,
    duplicate_error=DiffusionKVConfigError,
    broken_error=DiffusionKVConfigError,
)


def _unique_value() -> bytes:
    return secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class IdentityContext:
    """What a request's rows depend on beside the request's own content."""

    weight_epoch: int
    """Grows with each change of the model's weights."""
    lora: LoRARequest | None
    unique_value: Callable[[], bytes] = _unique_value
    """A value no other request gets, for what must never be shared."""

    def namespace(self, model: ModelIdentity) -> bytes:
        """The root of every row's chain: `model`, with this context's adapter and weights."""
        return namespace(model, self.lora, self.weight_epoch)


class ModelHook(Protocol):
    """Identifies the rows of one model's requests. Any thread calls, several at once."""

    @property
    def architecture(self) -> str:
        """The name it is registered under."""
        ...

    def identify(self, prepared: PreparedRequest, context: IdentityContext) -> Sequence[RowIdentity]:
        """One identity per row, in order. May take milliseconds.

        Raises:
            RowError: something of the request has no identity.
        """
        ...


ModelHookFactory = Callable[[AnyPipeline], ModelHook]
"""What an entry point names: usually the hook's class."""


@dataclass(frozen=True, slots=True)
class HashingStats:
    """What identifying requests has cost since the start."""

    requests: int = 0
    rows: int = 0
    hash_s: float = 0.0


def installed_hooks() -> tuple[InstalledPlugin, ...]:
    """Every registered hook, sorted by name. Imports none."""
    return HOOK_GROUP.installed()


@dataclass(frozen=True, slots=True)
class _Identified:
    """A request that has been identified and still lives."""

    prepared: weakref.ref[PreparedRequest]
    weight_epoch: int


class RowIdentifier:
    """Gives each request's rows their identity. Any thread may call; hashing happens under no lock."""

    def __init__(self, hook: ModelHook, runtime: Runtime) -> None:
        """Ask `hook`.

        Args:
            hook: the architecture's.
            runtime: makes the lock of the statistics.
        """
        self._hook = hook
        self._lock = runtime.lock("diffusion row identifier")
        self._identified: dict[int, _Identified] = {}
        self._stats = HashingStats()

    @property
    def stats(self) -> HashingStats:
        """What it has cost so far."""
        with self._lock:
            return self._stats

    def identify(self, prepared: PreparedRequest, weight_epoch: int) -> tuple[RowIdentity, ...]:
        """One identity per row, in order. Hashes the request's pictures.

        Args:
            prepared: after preprocessing; its class allows weak references.
            weight_epoch: grows with each change of the model's weights.

        Raises:
            RowError: the hook gave another number of rows, or an identity that does not fit its row; or the request
                was identified before, with these weights or newer ones; or something of it has no canonical hash.
        """
        self._claim(prepared, weight_epoch)
        began_s = perf_counter()
        identities = tuple(self._hook.identify(prepared, IdentityContext(weight_epoch, prepared.request.lora)))
        spent_s = perf_counter() - began_s
        self._check(prepared, identities)
        with self._lock:
            before = self._stats
            self._stats = HashingStats(before.requests + 1, before.rows + len(identities), before.hash_s + spent_s)
        return identities

    def _claim(self, prepared: PreparedRequest, weight_epoch: int) -> None:
        key = id(prepared)
        try:
            reference = weakref.ref(prepared, lambda gone: self._forget(key, gone))
        except TypeError as error:
            raise RowError(
                f"{self._hook_name}: {type(prepared).__name__} allows no weak reference, and without one nobody sees a "
                "request identified twice; declare it with `dataclass(slots=True, weakref_slot=True)`"
            ) from error
        with self._lock:
            held = self._identified.get(key)
            if held is not None and held.prepared() is prepared and held.weight_epoch >= weight_epoch:
                raise RowError(
                    f"{self._hook_name}: request {prepared.request.request_id!r} was identified before, with weights "
                    f"of epoch {held.weight_epoch}; a request is identified once per epoch, before it is queued"
                )
            self._identified[key] = _Identified(reference, weight_epoch)

    def _forget(self, key: int, gone: weakref.ref[PreparedRequest]) -> None:
        # Runs wherever the last reference dies, inside `_claim` too: it takes no lock, and each of its calls is atomic.
        held = self._identified.get(key)
        if held is not None and held.prepared is gone:
            self._identified.pop(key, None)

    def _check(self, prepared: PreparedRequest, identities: tuple[RowIdentity, ...]) -> None:
        rows = prepared.rows
        if len(identities) != len(rows):
            raise RowError(f"{self._hook_name} gave {len(identities)} identities for {len(rows)} rows; one per row")
        for index, (identity, row) in enumerate(zip(identities, rows, strict=True)):
            if not isinstance(identity, RowIdentity):
                raise RowError(f"{self._hook_name}, row {index}: a {type(identity).__name__}, not a RowIdentity")
            try:
                identity.check_against(row.layout.geometry)
            except RowError as error:
                raise RowError(f"{self._hook_name}, row {index}: {error}") from error

    @property
    def _hook_name(self) -> str:
        return f"the model hook {self._hook.architecture!r}"


def open_row_identifier(config: DiffusionKVConfig, pipeline: AnyPipeline, runtime: Runtime) -> RowIdentifier | None:
    """The identifier of a stage; `None` with prefix caching off, and then no hook is looked up or imported.

    Args:
        config: the stage's.
        pipeline: its model.
        runtime: makes the identifier's lock.

    Raises:
        DiffusionKVConfigError: prefix caching is on, and the architecture has no hook, has two, or has one that
            cannot be imported or made, or that is another architecture's.
    """
    if not config.enable_prefix_caching:
        return None
    architecture = pipeline.architecture
    if all(plugin.name != architecture for plugin in HOOK_GROUP.installed()):
        raise DiffusionKVConfigError(
            f"enable_prefix_caching=True, and the architecture {architecture!r} has no model hook to say what its "
            f"prefixes depend on. Set enable_prefix_caching=False, or install a distribution that registers one under "
            f"{HOOK_GROUP.group!r}; installed: {HOOK_GROUP.describe_installed()}"
        )
    factory = HOOK_GROUP.load(architecture)
    if not callable(factory):
        raise DiffusionKVConfigError(
            f"the model hook {architecture!r} is {factory!r}; a callable that takes the pipeline is wanted"
        )
    try:
        hook: ModelHook = factory(pipeline)
        own_name = hook.architecture
    except Exception as error:
        raise DiffusionKVConfigError(
            f"the model hook {architecture!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if own_name != architecture:
        raise DiffusionKVConfigError(
            f"the model hook registered as {architecture!r} calls itself {own_name!r}; the two must be the same"
        )
    return RowIdentifier(hook, runtime)
