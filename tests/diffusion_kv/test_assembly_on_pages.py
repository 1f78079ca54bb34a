# SPDX-License-Identifier: Apache-2.0
"""A paged stage is opened with its pages, or not at all: whatever fails on the way closes what was open."""

import pytest

import omni_core.integrations.diffusion.assembly as assembly_module
from omni_core.diffusion_kv.deploy import parse_deploy
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.integrations.diffusion.assembly import open_engine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def paged(**settings):
    entry = {
        "stage_id": 0,
        "model_options": {"layout": "debug"},
        "diffusion_kv_mode": "paged_scheduler",
        "kv_cache_memory_bytes": 2**22,
        **settings,
    }
    return parse_deploy({"pipeline": "tiny_hunyuan_dit", "stages": [entry]}).stage()


@pytest.fixture
def backends(monkeypatch):
    """What happened to the device's backends, in order."""
    happened = []
    backend_for_tensor = assembly_module.backend_for_tensor

    def watched(*args, **kwargs):
        backend = backend_for_tensor(*args, **kwargs)
        close = backend.close
        monkeypatch.setattr(backend, "close", lambda: (happened.append("closed"), close()))
        happened.append("opened")
        return backend

    monkeypatch.setattr(assembly_module, "backend_for_tensor", watched)
    return happened


def test_an_engine_closes_its_backend_once(backends):
    engine = open_engine(paged())
    assert backends == ["opened"]
    engine.close()
    engine.close()
    assert backends == ["opened", "closed"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_model_len": 64}, "max_model_len=64, and a row of the largest request has 110 tokens"),
        ({"diffusion_kv_max_rows_per_request": 1}, "the largest request has 2 rows"),
        ({"kv_cache_layout": "LBNHC"}, "two layouts of pages are asked for"),
    ],
)
def test_what_the_gate_refuses_opens_no_device(backends, settings, says):
    with pytest.raises(DiffusionKVConfigError, match=says):
        open_engine(paged(**settings))
    assert backends == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"kv_cache_memory_bytes": 1_000}, "raise kv_cache_memory_bytes"), ({"block_size": 24}, "no multiple of 16")],
)
def test_what_does_not_fit_leaves_nothing_open(backends, settings, says):
    with pytest.raises(DiffusionKVConfigError, match=says):
        open_engine(paged(**settings))
    assert backends == ["opened", "closed"]


def test_a_failure_after_the_pages_were_made_frees_them(backends, monkeypatch):
    import omni_core.integrations.diffusion.paging as paging_module

    def fail(*_):
        raise RuntimeError("no manager today")

    monkeypatch.setattr(paging_module, "open_reservations", fail)
    with pytest.raises(RuntimeError, match="no manager today"):
        open_engine(paged())
    assert backends == ["opened", "closed"]
