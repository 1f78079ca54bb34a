# SPDX-License-Identifier: Apache-2.0
"""The demo's prompts: sixteen that share a long start, or those of a file, with errors that name the line."""

import json

import pytest

from omni_core.cli.demo.prompts import PromptFileError, built_in_prompts, read_prompts
from omni_core.integrations.vllm.demo.job import Message


def test_sixteen_chats_share_a_system_prompt_of_several_hundred_words_and_differ_after_it():
    prompts = built_in_prompts()
    assert len(prompts) == 16
    assert len({prompt.name for prompt in prompts}) == 16
    assert len({prompt.messages[0] for prompt in prompts}) == 1
    assert prompts[0].messages[0].role == "system"
    assert len(prompts[0].messages[0].content.split()) > 200
    assert len({prompt.messages[1] for prompt in prompts}) == 16


def test_a_file_may_mix_messages_prompts_and_strings(tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo"}]
    file.write_text(
        json.dumps({"messages": chat}) + "\n\n" + json.dumps({"prompt": "Once upon"}) + "\n" + json.dumps("a time\n")
    )
    first, second, third = read_prompts(file)
    assert (first.name, first.text) == ("line-01", None)
    assert first.messages == (Message("system", "Be brief."), Message("user", "Héllo"))
    assert (second.name, second.text, second.messages) == ("line-03", "Once upon", ())
    assert (third.name, third.text) == ("line-04", "a time\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting property name"),
        ("7", "a int is no prompt"),
        ("[]", "a list is no prompt"),
        ("{}", "exactly one of"),
        ('""', "exactly one of"),
        ('{"prompt": ""}', "exactly one of"),
        ('{"prompt": 3}', "exactly one of"),
        ('{"prompt": "a", "messages": []}', "exactly one of"),
        ('{"messages": []}', "exactly one of"),
        ('{"messages": "hello"}', "exactly one of"),
        ('{"messages": ["hello"]}', "every message needs"),
        ('{"messages": [{"role": "user"}]}', "every message needs"),
        ('{"messages": [{"role": "user", "content": null}]}', "must be texts"),
        ('{"mesages": [{"role": "user", "content": "x"}]}', "exactly one of"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, why):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n' + line + "\n")
    with pytest.raises(PromptFileError) as raised:
        read_prompts(file)
    assert str(raised.value).startswith(f"{file}, line 2: ")
    assert why in str(raised.value)


def test_files_without_prompts_are_refused(tmp_path):
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n \n")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptFileError, match="holds no prompt"):
        read_prompts(empty)
    with pytest.raises(PromptFileError, match="not UTF-8"):
        read_prompts(binary)
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "none")
