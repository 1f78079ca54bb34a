# SPDX-License-Identifier: Apache-2.0
"""A number that a command cannot take is told in words, with the option it was given for."""

import pytest

from omni_core.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fuzz", "--jobs", "0"), "argument --jobs: 0 is below 1"),
        (("fuzz", "--seed", "-1"), "argument --seed: -1 is below 0"),
        (("fuzz", "--steps", "many"), "argument --steps: 'many' is no whole number"),
        (("demo", "--max-tokens", "0"), "argument --max-tokens: 0 is below 1"),
        (("fuzz", "--minutes", "nan"), "argument --minutes: nan is not a positive number"),
        (("bench", "vllm", "--limit-minutes", "inf"), "argument --limit-minutes: inf is not a positive number"),
        (("bench", "vllm", "--limit-minutes", "ten"), "argument --limit-minutes: 'ten' is no number"),
    ],
)
def test_a_wrong_number(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
