# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan`: every cost with its size, whether it fits, what to change, and what is wrong with the question."""

import json

import pytest

from omni_core.cli.main import main

GIB = 1 << 30
THINKER = ["--num-blocks", "15092", "--hidden-size", "2048", "--dtype", "bfloat16"]
ROOMY = ["--host-bytes", "64 GiB"]


def plan(capsys, *arguments):
    """Exit status and the JSON document."""
    status = main(["plan", *arguments, "--format", "json"])
    return status, json.loads(capsys.readouterr().out)


def shown(capsys, *arguments):
    """Exit status and the text."""
    status = main(["plan", *arguments])
    return status, capsys.readouterr().out


def refused(capsys, *arguments):
    """Exit status and what stands on stderr; argparse leaves by SystemExit."""
    try:
        status = main(["plan", *arguments])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert said.out == ""
    return status, said.err


def test_the_figures_of_the_design_text_come_out(capsys):
    status, thinker = plan(capsys, *THINKER, *ROOMY)
    assert status == 0
    assert thinker["cache"]["pool_bytes"] == {"__hidden_states__": 989_069_312}
    talker = [*THINKER, "--num-blocks", "16,180", "--no-hidden", "--key", "codes.audio:16:int64"]
    _, document = plan(capsys, *talker, *ROOMY)
    assert document["cache"]["pool_bytes"] == {"codes.audio": 33_136_640}
    status, text = shown(capsys, *THINKER, *ROOMY)
    assert status == 0
    assert any(line.split()[-2:] == ["989,069,312", "0.92"] for line in text.splitlines())
    assert text.endswith("It fits.\n")


def test_totals_are_the_sums_of_what_is_listed(capsys):
    _, document = plan(
        capsys,
        *THINKER,
        *ROOMY,
        *("--deferred-key", "mel:64:float32", "--layers", "7,12", "--caches-per-host", "4", "--sink-bytes", "3 GiB"),
    )
    cache = document["cache"]
    assert set(cache["pool_bytes"]) == {"__hidden_states__", "mel", "hidden_states.layer_7", "hidden_states.layer_12"}
    start = cache["staging_bytes"] + cache["bounce_bytes"]
    later = [*cache["pool_bytes"].values(), *cache["key_table_bytes"].values(), cache["shared_table_bytes"]]
    outputs = cache["max_recycled_bytes"] + document["sink_queue_bytes"] + document["sink_bytes"]
    assert document["start_bytes"] == start
    assert document["most_bytes"] == start + sum(later) + outputs
    assert document["most_on_host_bytes"] == 4 * document["most_bytes"]
    assert document["device_bytes"] == cache["snapshot_ring_bytes"] + cache["deferred_ring_bytes"]
    assert cache["staging_bytes"] == 4 * (8192 * (4096 + 256 + 2 * 4096) + (1 << 20))


def test_on_a_cpu_device_memory_is_host_memory(capsys):
    _, on_device = plan(capsys, *THINKER, *ROOMY)
    _, on_cpu = plan(capsys, *THINKER, *ROOMY, "--on-cpu")
    assert on_cpu["start_bytes"] == on_device["start_bytes"] + on_device["device_bytes"]


def test_what_does_not_fit_is_status_1_with_settings_that_each_make_it_fit(capsys):
    million = ["--num-blocks", "1000000", "--hidden-size", "2048", "--dtype", "bfloat16", "--host-bytes", "16 GiB"]
    status, document = plan(capsys, *million)
    assert (status, document["fits"]) == (1, False)
    assert [remedy["setting"] for remedy in document["remedies"]] == ["num_blocks"]
    [remedy] = document["remedies"]
    assert plan(capsys, *million, "--num-blocks", str(remedy["value"]))[0] == 0
    assert plan(capsys, *million, "--num-blocks", str(remedy["value"] + 1))[0] == 1
    _, text = shown(capsys, *million)
    assert "It does not fit: caches on this host can come to " in text
    assert f"  num_blocks: {remedy['value']:,} instead of 1,000,000 (vLLM: --num-gpu-blocks-override" in text


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--staging-depth", "400"], "--staging-depth"),
        (["--sink-bytes", "30 GiB"], "--sink-bytes"),
        (["--max-recycled-bytes", "20 GiB"], "--max-recycled-bytes"),
        (["--layers", ",".join(map(str, range(1, 25)))], "--layers"),
        (["--caches-per-host", "9"], "--caches-per-host"),
    ],
)
def test_the_setting_that_is_too_large_is_among_the_remedies(capsys, arguments, flag):
    setting = flag.removeprefix("--").replace("-", "_")
    status, document = plan(capsys, *THINKER, "--host-bytes", "16 GiB", *arguments)
    assert status == 1
    found = {remedy["setting"]: remedy["value"] for remedy in document["remedies"]}
    value = ",".join(map(str, range(1, 1 + found[setting]))) if setting == "layers" else str(found[setting])
    assert plan(capsys, *THINKER, "--host-bytes", "16 GiB", flag, value)[0] == 0


def test_where_no_setting_alone_is_enough_it_says_so_and_names_two_that_are(capsys):
    tight = [*THINKER, "--key", "codes:16:int64", "--host-bytes", "100 MiB"]
    status, text = shown(capsys, *tight)
    assert status == 1
    assert "No single setting makes it fit: give the container more memory, and the engine fewer blocks.\n" in text
    assert "These two together" not in text
    two = [*THINKER, "--num-blocks", "400000", "--sink-bytes", "30 GiB", "--host-bytes", "16 GiB"]
    status, document = plan(capsys, *two)
    assert (status, document["remedies"]) == (1, [])
    assert document["advice"].startswith("No single setting makes it fit")
    assert [remedy["setting"] for remedy in document["remedy_pair"]] == ["num_blocks", "sink_bytes"]
    flags = [f"--{remedy['setting'].replace('_', '-')}={remedy['value']}" for remedy in document["remedy_pair"]]
    assert plan(capsys, *two, *flags)[0] == 0
    assert plan(capsys, *two, flags[0])[0] == plan(capsys, *two, flags[1])[0] == 1
    assert "These two together make it fit:\n  num_blocks: " in shown(capsys, *two)[1]


def test_a_stage_that_cannot_start_is_told_what_lets_it_start(capsys):
    early = [*THINKER, "--num-blocks", "100000", "--pretouch", "--sink-bytes", "1 GiB", "--host-bytes", "4 GiB"]
    status, document = plan(capsys, *early)
    assert status == 1
    assert {"pretouch": 0}.items() <= {way["setting"]: way["value"] for way in document["start_remedies"]}.items()
    heading = "Each of these alone lets it start, with a warning:\n"
    assert "  pretouch: 0 instead of 1" in shown(capsys, *early)[1].split(heading)[1]
    assert plan(capsys, *[argument for argument in early if argument != "--pretouch"])[1]["start_remedies"] == []


def test_what_other_stages_take_is_added_up(capsys):
    alone = [*THINKER, "--sink-bytes", "1 GiB", "--host-bytes", "8 GiB"]
    status, first = plan(capsys, *alone)
    assert (status, first["beside_bytes"]) == (0, 0)
    status, second = plan(capsys, *alone, "--beside", str(first["most_on_host_bytes"]))
    assert (status, second["most_on_host_bytes"]) == (0, 2 * first["most_on_host_bytes"])
    assert second["most_bytes"] == first["most_bytes"]
    status, text = shown(capsys, *alone, "--beside", "7 GiB")
    assert status == 1
    assert any(line.startswith("other stages of this host") and line.endswith("--beside") for line in text.splitlines())
    assert "and 7516192768 of other stages), but --host-bytes allows" in text


def test_a_key_that_staging_has_no_room_for_is_told_with_the_setting_that_makes_room(capsys):
    wide = [*THINKER, *ROOMY, "--key", "features:1024:float32"]
    status, document = plan(capsys, *wide)
    assert status == 1
    assert document["problems"] == [
        "a largest step with a row of every key has no room in a staging page: raise extra_row_bytes from 256 to 3968"
    ]
    assert plan(capsys, *wide, "--extra-row-bytes", "3968")[0] == 0
    assert plan(capsys, *wide, "--extra-row-bytes", "3967")[0] == 1
    found = {remedy["setting"]: remedy["value"] for remedy in document["remedies"]}
    assert found["extra_row_bytes"] == 3968
    assert plan(capsys, *wide, "--max-num-tokens", str(found["max_num_tokens"]))[0] == 0
    assert found.keys() == {"extra_row_bytes", "max_num_tokens"}


def test_what_is_advised_also_leaves_room_in_staging(capsys):
    wide = [*THINKER, "--key", "features:1024:float32", "--host-bytes", "4 GiB"]
    status, document = plan(capsys, *wide)
    assert (status, len(document["problems"]), document["remedies"]) == (1, 2, [])
    assert document["advice"].startswith("No single setting makes it fit")
    assert [remedy["setting"] for remedy in document["remedy_pair"]] == ["extra_row_bytes", "sink_bytes"]
    room, sink = (f"--{one['setting'].replace('_', '-')}={one['value']}" for one in document["remedy_pair"])
    assert plan(capsys, *wide, room, sink)[0] == 0
    assert plan(capsys, *wide, room)[0] == plan(capsys, *wide, sink)[0] == 1


def test_memory_that_room_in_staging_would_need_is_counted(capsys):
    wide = [*THINKER, "--key", "features:1024:float32"]
    _, without_room = plan(capsys, *wide, *ROOMY)
    status, document = plan(capsys, *wide, "--host-bytes", str(without_room["most_on_host_bytes"]))
    assert (status, len(document["problems"])) == (1, 1)
    assert [remedy["setting"] for remedy in document["remedies"]] == ["max_num_tokens"], "not extra_row_bytes alone"


def test_settings_come_from_the_environment_too_and_arguments_win(capsys, monkeypatch):
    monkeypatch.setenv("OMNI_CORE_STAGING_DEPTH", "8")
    _, from_environment = plan(capsys, *THINKER, *ROOMY)
    assert from_environment["stage"]["staging_depth"] == 8
    _, from_argument = plan(capsys, *THINKER, *ROOMY, "--staging-depth", "2")
    assert from_argument["stage"]["staging_depth"] == 2
    _, set_too = plan(capsys, *THINKER, *ROOMY, "--set", 'sink_options={"max_bytes": 1024}')
    assert set_too["sink_bytes"] == 1024


def test_a_sink_of_another_package_is_a_note(capsys):
    _, document = plan(capsys, *THINKER, *ROOMY, "--set", "sink=theirs")
    assert document["sink_bytes"] == 0
    assert document["notes"] == ["what the sink 'theirs' holds in memory is not known: give --sink-bytes"]


def test_the_rate_of_the_first_save_is_measured_here_and_times_follow_from_it(capsys):
    _, document = plan(capsys, *THINKER, *ROOMY)
    first = document["first_save"]
    assert first["measured"] is True
    assert first["commit_bytes_per_s"] > 0
    assert first["start_s"] == pytest.approx(document["start_bytes"] / first["commit_bytes_per_s"])
    assert first["pretouch_s"] == pytest.approx(989_069_312 / first["commit_bytes_per_s"])
    assert first["step_s"] == pytest.approx(8192 * 4096 / first["commit_bytes_per_s"])


def test_this_machine_is_asked_if_no_other_is_named(capsys):
    _, document = plan(capsys, "--num-blocks", "10", "--hidden-size", "8", "--dtype", "float32", "--sink-bytes", "0")
    assert document["host"]["limit"]["nbytes"] > document["host"]["available"]["nbytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --hidden-size or --model"),
        (["--hidden-size", "8"], "give --dtype or --model"),
        (["--hidden-size", "8", "--dtype", "float32"], "give --num-blocks, --server, or --kv-cache-bytes with --model"),
        (["--hidden-size", "0"], "must be a whole number of at least 1"),
        ([*THINKER, "--dtype", "float23"], "'float23': must be a dtype of torch"),
        ([*THINKER, "--key", "codes:int64"], "must be NAME:WIDTH:DTYPE"),
        ([*THINKER, "--key", "a:1:int64", "--deferred-key", "a:1:int64"], "each name once"),
        ([*THINKER, "--host-bytes", "many"], "must be a number of bytes"),
        ([*THINKER, "--staging-depth", "1"], "--staging-depth='1': must be an integer of at least 2"),
        ([*THINKER, "--set", "staging_dept=3"], "staging_depth"),
        (["--model", "/nowhere/at/all"], "--model /nowhere/at/all"),
    ],
)
def test_wrong_usage_is_status_2_and_says_what_to_give(capsys, arguments, said):
    status, error = refused(capsys, *arguments)
    assert status == 2
    assert said in error
