# SPDX-License-Identifier: Apache-2.0
"""Small scenarios with words for tokens, run through the real cache and recorded step by step, to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from omni_core.prefix_cache.errors import OmniPrefixCacheError
from omni_core.testing.engine_schedule import ScheduledRun
from omni_core.testing.fake_model import FakeKey, FakeModel, hidden_key
from omni_core.testing.oracle import OracleViolationError
from omni_core.testing.output_builder import BuiltStep
from omni_core.testing.scheduler_config import SchedulerConfig
from omni_core.testing.sim_request import ImageSpan, SimRequest
from omni_core.testing.sim_scheduler import SimScheduler
from omni_core.testing.sim_stage import CacheFactory, SimStage
from omni_core.testing.sim_step import SavedStep
from omni_core.testing.stage_config import StageConfig

IMAGE_WORD = "Im"
"""Words `Im0`, `Im1`, … stand for the positions of one image; they share one placeholder token."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of a scenario, as words."""

    req_id: str
    words: tuple[str, ...]
    image: str = ""
    """Which image its `Im…` words show."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario: geometry, and the prompts that arrive before each step."""

    name: str
    title: str
    about: tuple[str, ...]
    num_blocks: int
    block_size: int
    hidden_size: int
    keys: tuple[FakeKey, ...]
    waves: tuple[tuple[Prompt, ...], ...]


class RowSource(Enum):
    """Where a delivered row came from."""

    FORWARD = "forward"
    """The forward computed it for this request, in this step."""
    CACHE = "cache"
    """An earlier step computed it."""
    SAME_STEP = "same step"
    """Another request of this very step computed it."""


@dataclass(frozen=True, slots=True)
class StoryRow:
    """One delivered row."""

    position: int
    word: str
    source: RowSource
    block_id: int
    values: Mapping[str, tuple[float, ...]]
    """By key, flattened."""


@dataclass(frozen=True, slots=True)
class StoryDelivery:
    """What one request got of one step."""

    req_id: str
    prompt_tokens: int
    hit_tokens: int
    rows: tuple[StoryRow, ...]

    @property
    def computed_rows(self) -> int:
        """Rows the engine alone would have given."""
        return len(self.rows) - self.hit_tokens


@dataclass(frozen=True, slots=True)
class StoryBlock:
    """One block after a step."""

    block_id: int
    words: tuple[str, ...]
    """One per slot; "" where nothing was stored."""
    can_be_hit: bool
    written_by: tuple[str, ...]
    """Requests that stored rows there in this step."""
    hit_by: tuple[str, ...]
    """Requests whose prefix hit covers it in this step."""


@dataclass(frozen=True, slots=True)
class StoryStep:
    """One step."""

    number: int
    blocks: tuple[StoryBlock, ...]
    deliveries: tuple[StoryDelivery, ...]


@dataclass(slots=True)
class Story:
    """A scenario as it went."""

    scenario: Scenario
    steps: list[StoryStep] = field(default_factory=list)
    rows_checked: int = 0
    """Rows that equal, bit for bit, what the model computes and what a forward of this run was seen to compute."""
    failure: str | None = None
    """What was wrong, if anything was."""


def record_story(scenario: Scenario, *, make_cache: CacheFactory | None = None) -> Story:
    """Run a scenario to its end, or to its first wrong row. Blocks for well under a second."""
    story = Story(scenario)
    recorder = _Recorder(story, make_cache)
    try:
        recorder.run()
    except (OracleViolationError, OmniPrefixCacheError) as error:
        story.failure = str(error)
    return story


class _Recorder:
    def __init__(self, story: Story, make_cache: CacheFactory | None) -> None:
        scenario = story.scenario
        longest = sum(len(prompt.words) for wave in scenario.waves for prompt in wave)
        scheduler = SchedulerConfig(scenario.num_blocks, scenario.block_size, max_num_tokens=longest)
        model = FakeModel(hidden_key(scenario.hidden_size), scenario.keys)
        self._scheduler = SimScheduler(scheduler)
        self._stage = SimStage(
            StageConfig(scheduler), model, make_cache=make_cache, make_scheduler=lambda _: self._scheduler
        )
        self._story = story
        self._token_ids: dict[str, int] = {}
        self._words: dict[str, tuple[str, ...]] = {}
        self._slots: dict[int, list[str]] = {}

    def run(self) -> None:
        with self._stage as stage:
            for wave in self._story.scenario.waves:
                for prompt in wave:
                    self._words[prompt.req_id] = prompt.words
                    stage.submit(self._request(prompt))
                step = stage.step()
                if step is None:
                    continue
                blocks = self._blocks_after(step)
                deliveries: list[StoryDelivery] = []
                stage.build(step)
                stage.collect(self._visitor(deliveries))
                self._story.steps.append(StoryStep(step.number, blocks, tuple(deliveries)))
                self._story.rows_checked = stage.oracle.rows_delivered
            stage.run_to_end()

    def _request(self, prompt: Prompt) -> SimRequest:
        positions = [i for i, word in enumerate(prompt.words) if word.startswith(IMAGE_WORD)]
        images = (ImageSpan(positions[0], len(positions), prompt.image),) if positions else ()
        names = [IMAGE_WORD if word.startswith(IMAGE_WORD) else word for word in prompt.words]
        token_ids = tuple(self._token_ids.setdefault(name, 100 + len(self._token_ids)) for name in names)
        return SimRequest(prompt.req_id, token_ids, images=images)

    def _blocks_after(self, step: SavedStep) -> tuple[StoryBlock, ...]:
        size = self._story.scenario.block_size
        written: dict[int, list[str]] = {}
        hit: dict[int, list[str]] = {}
        for run in step.runs:
            for index, block_id in enumerate(run.block_ids):
                first, last = max(run.start, index * size), min(run.stop, (index + 1) * size)
                if (index + 1) * size <= run.start:
                    hit.setdefault(block_id, []).append(run.req_id)
                    continue
                words = self._words[run.req_id]
                # A block outside the hit belongs to this request alone; what lay there before is gone.
                self._slots[block_id] = [words[p] if first <= p < last else "" for p in _span(index, size)]
                written.setdefault(block_id, []).append(run.req_id)
        return tuple(
            StoryBlock(
                state.block_id,
                tuple(self._slots.get(state.block_id, [""] * size)),
                state.cached,
                tuple(written.get(state.block_id, ())),
                tuple(hit.get(state.block_id, ())),
            )
            for state in self._scheduler.allocator.states()
        )

    def _visitor(self, found: list[StoryDelivery]) -> Callable[[BuiltStep], None]:
        return lambda built: found.extend(self._deliveries_of(built))

    def _deliveries_of(self, built: BuiltStep) -> list[StoryDelivery]:
        writers = {
            run.block_ids[position // self._story.scenario.block_size]
            for run in built.order.step.runs
            for position in range(run.start, run.stop)
        }
        outputs = built.outputs
        if outputs is None:
            return []
        found = []
        for run in sorted(built.order.step.runs, key=lambda run: run.req_id):
            delivered = outputs[run.req_id]
            positions = [position for start, stop in delivered.ranges for position in range(start, stop)]
            values = {key: rows.flatten(1).tolist() for key, rows in delivered.rows.items()}
            rows = tuple(
                self._row(run, position, writers, {key: tuple(table[i]) for key, table in values.items()})
                for i, position in enumerate(positions)
            )
            found.append(StoryDelivery(run.req_id, len(self._words[run.req_id]), run.start, rows))
        return found

    def _row(
        self, run: ScheduledRun, position: int, writers: set[int], values: Mapping[str, tuple[float, ...]]
    ) -> StoryRow:
        block_id = run.block_ids[position // self._story.scenario.block_size]
        if position >= run.start:
            source = RowSource.FORWARD
        else:
            source = RowSource.SAME_STEP if block_id in writers else RowSource.CACHE
        return StoryRow(position, self._words[run.req_id][position], source, block_id, values)


def _span(index: int, size: int) -> range:
    return range(index * size, (index + 1) * size)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(count))


MM_FEATURE = FakeKey("mm_feature", (16,))

FOX = Scenario(
    "fox",
    "two prompts that begin alike",
    (
        "The model gives two rows per token: a hidden row, 2 wide, and an mm_feature row, 16 wide.",
        "B starts with the same four words as A. The engine finds that block by its hash, skips those four",
        "tokens, and its forward gives four rows for a prompt of eight. The cache joins the other four.",
    ),
    num_blocks=8,
    block_size=4,
    hidden_size=2,
    keys=(MM_FEATURE,),
    waves=(
        (Prompt("A", _words("The quick brown fox was tired and slept beneath the shady tree")),),
        (Prompt("B", _words("The quick brown fox jumped over the dog")),),
    ),
)

IMAGE = Scenario(
    "image",
    "an image that does not end on a block boundary",
    (
        "Im0 to Im5 are the six positions of one image, so the image ends in the middle of a block.",
        "Only whole blocks are found again: B gets Im0 to Im3 from the cache, and its own forward computes",
        "Im4 and Im5 once more. C has the same words but another picture: it shares nothing.",
    ),
    num_blocks=8,
    block_size=4,
    hidden_size=2,
    keys=(MM_FEATURE,),
    waves=(
        (Prompt("A", (*_numbered(IMAGE_WORD, 6), "foo"), image="picture 1"),),
        (Prompt("B", (*_numbered(IMAGE_WORD, 6), "bar", "baz"), image="picture 1"),),
        (Prompt("C", (*_numbered(IMAGE_WORD, 6), "bar", "baz"), image="picture 2"),),
    ),
)

_SYSTEM = _numbered("sys", 128)

CHAT = Scenario(
    "chat",
    "a long system prompt, cold and warm",
    (
        "Three chat prompts share a system prompt of 128 tokens, which is 8 blocks of 16.",
        "A and B arrive together: B hits blocks that A computes in the very same forward. C arrives later",
        "with 165 tokens: the engine skips 128 and its forward gives 37 rows. C still gets all 165.",
    ),
    num_blocks=24,
    block_size=16,
    hidden_size=2,
    keys=(),
    waves=(
        (Prompt("A", (*_SYSTEM, *_numbered("a", 20))), Prompt("B", (*_SYSTEM, *_numbered("b", 30)))),
        (Prompt("C", (*_SYSTEM, *_numbered("c", 37))),),
    ),
)

SCENARIOS: Sequence[Scenario] = (FOX, IMAGE, CHAT)
"""Every scenario, in the order they are shown."""
