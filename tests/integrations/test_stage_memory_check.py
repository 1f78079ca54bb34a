# SPDX-License-Identifier: Apache-2.0
"""A stage that starts is judged by the same figures as `omni-core plan` judges it before: its sink is part of them."""

import logging

import fake_runner as fake
import pytest
from fake_stage import FakeStage

from omni_core.cli.main import main

MORE_THAN_ANY_MACHINE_BYTES = 1 << 46
STAGE = {"num-blocks": 16, "block-size": fake.BLOCK_SIZE, "hidden-size": fake.HIDDEN_SIZE, "max-num-tokens": 64}


@pytest.mark.parametrize(
    ("settings", "arguments", "fits"),
    [
        (
            {"sink_options": {"max_bytes": MORE_THAN_ANY_MACHINE_BYTES}},
            ["--set", f'sink_options={{"max_bytes": {MORE_THAN_ANY_MACHINE_BYTES}}}'],
            False,
        ),
        (
            {"sink_queue_bytes": MORE_THAN_ANY_MACHINE_BYTES, "sink_options": {"max_bytes": 1 << 20}},
            ["--sink-queue-bytes", str(MORE_THAN_ANY_MACHINE_BYTES), "--sink-bytes", "1 MiB"],
            False,
        ),
        (
            {"sink_queue_bytes": 1 << 20, "sink_options": {"max_bytes": 1 << 20}},
            ["--sink-queue-bytes", "1 MiB", "--sink-bytes", "1 MiB"],
            True,
        ),
    ],
    ids=["sink", "queue", "neither"],
)
def test_the_start_warns_where_plan_says_that_it_does_not_fit(caplog, capsys, settings, arguments, fits):
    flags = [f"--{name}={value}" for name, value in STAGE.items()]
    status = main(["plan", *flags, "--dtype", "float32", "--on-cpu", *arguments])
    printed = capsys.readouterr().out
    with caplog.at_level(logging.WARNING, logger="omni_core"):
        FakeStage(**settings).session.close()
    warnings = [record.getMessage() for record in caplog.records if "can come to" in record.getMessage()]
    assert (status, len(warnings)) == ((0, 0) if fits else (1, 1))
    for warning in warnings:
        total = warning.split("can come to ")[1].split()[0]
        assert f"can come to {total} bytes" in printed


def test_a_stages_report_has_what_its_sizes_follow_from():
    session = FakeStage().session
    report = session.report()
    session.close()
    assert report["geometry"] == {
        "num_blocks": 16,
        "block_size": fake.BLOCK_SIZE,
        "hidden_size": fake.HIDDEN_SIZE,
        "hidden_dtype": "float32",
        "max_num_tokens": 64,
        "caches_per_host": 1,
    }
