# SPDX-License-Identifier: Apache-2.0
"""Parts of an engine that write down what they are asked, in one list, and fail when they are told to."""

from dataclasses import dataclass, field, replace

from diffusion_kv.plain_owner import PlainOwner

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.pipeline import DiffusionRequest
from omni_core.diffusion_kv.reservations import KVReservationStats
from omni_core.diffusion_kv.rows import RowIdentity
from omni_core.diffusion_kv.snapshot import KVSnapshot, RowSnapshot
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline
from omni_core.integrations.diffusion.admission import AdmissionEnvelope
from omni_core.integrations.diffusion.engine import DiffusionEngine

BLOCK_SIZE = 16
OPTIONS = TinyHunyuanOptions(layout="debug", num_layers=1)


def request(request_id="a", **changes):
    fields = {"prompt": "a fox", "seed": 7, "num_inference_steps": 3}
    return replace(DiffusionRequest(request_id, **fields), **changes)


@dataclass
class Recorder:
    """What happened, in order; and what is to fail."""

    calls: list = field(default_factory=list)
    failures: dict = field(default_factory=dict)
    """A call as it is written down -> what it raises."""

    def told(self, *call):
        self.calls.append(call)
        if call in self.failures:
            raise self.failures[call]

    def of(self, *names):
        return [call for call in self.calls if call[0] in names]


class RecordedPipeline:
    """The debug model, every call written down."""

    def __init__(self, recorder):
        self._recorder = recorder
        self._model = TinyHunyuanPipeline(OPTIONS)
        self.architecture = self._model.architecture
        self.kv_shape = self._model.kv_shape
        self.profile_request = self._model.profile_request

    def preprocess(self, asked):
        self._recorder.told("preprocess", asked.request_id)
        return self._model.preprocess(asked)

    def start(self, prepared):
        self._recorder.told("start", prepared.request.request_id)
        return self._model.start(prepared)

    def denoise(self, states, step_index, attention):
        ids = "+".join(state.prepared.request.request_id for state in states)
        self._recorder.told("denoise", ids, step_index)
        self._model.denoise(states, step_index, attention)

    def decode(self, state):
        self._recorder.told("decode", state.prepared.request.request_id)
        return self._model.decode(state)


class RecordedWorker:
    """Whole rows, no pages: what a snapshot says is written down and not used."""

    def __init__(self, recorder):
        self._recorder = recorder
        self.owner = PlainOwner()

    def install(self, snapshot):
        self._recorder.told("install", snapshot.request_id)

    def remove(self, request_id, generation):
        self._recorder.told("remove", request_id)

    def close(self):
        self._recorder.told("close")


class RecordedReservations:
    """Counts pages and never finds a hit."""

    def __init__(self, recorder, total_pages=1_000):
        self._recorder = recorder
        self._total = total_pages
        self._held = {}
        self._generation = 0

    def reserve(self, request_id, rows, *, only_at_hit_tokens=None):
        needed = sum(-(-row.geometry.total_tokens // BLOCK_SIZE) for row in rows)
        if needed > self._total:
            raise RequestRefusedError(request_id, f"{needed} pages are needed and there are {self._total}")
        if needed > self._total - sum(pages for _, pages in self._held.values()):
            return None
        self._recorder.told("reserve", request_id)
        self._generation += 1
        self._held[request_id] = (self._generation, needed)
        return KVSnapshot(
            request_id,
            self._generation,
            tuple(RowSnapshot(index, row.geometry, 0, ((index + 1,),)) for index, row in enumerate(rows)),
        )

    def publish(self, request_id, generation):
        if generation == self._held[request_id][0]:
            self._recorder.told("publish", request_id)

    def free(self, request_id, generation):
        if self._held.get(request_id, (None,))[0] == generation:
            self._recorder.told("free", request_id)
            del self._held[request_id]

    def reset(self):
        self._recorder.told("reset")
        return not self._held

    def stats(self):
        free = self._total - sum(pages for _, pages in self._held.values())
        return KVReservationStats(self._generation, 0, 0, 0, 0, free, self._total)


class RecordedIdentifier:
    """Says with which weights each request was identified."""

    def __init__(self, recorder):
        self._recorder = recorder

    def identify(self, prepared, weight_epoch):
        self._recorder.told("identify", prepared.request.request_id, weight_epoch)
        namespace = f"weights {weight_epoch}".encode()
        return [RowIdentity(row.token_ids, (), namespace) for row in prepared.rows]


def recorded_engine(recorder, *, paged=True, caching=False, total_pages=1_000, **settings):
    """An engine of recorded parts; 4 requests at once, up to 2 in a wave."""
    pipeline = RecordedPipeline(recorder)
    envelope = AdmissionEnvelope.of(pipeline.preprocess(pipeline.profile_request()))
    engine = DiffusionEngine(
        pipeline,
        RecordedWorker(recorder),
        envelope,
        reservations=RecordedReservations(recorder, total_pages) if paged else None,
        identifier=RecordedIdentifier(recorder) if caching else None,
        **{"max_wave_requests": 2, "max_running_requests": 4, **settings},
    )
    recorder.calls.clear()
    return engine
