# SPDX-License-Identifier: Apache-2.0
"""The conversations of the demo: sixteen that share a long system prompt, or the operator's own from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_core.integrations.vllm.demo.job import DemoPrompt, Message

SYSTEM_PROMPT = """\
You are the assistant of the Harbour Museum, a small museum of ships on an island. Answer visitors in at most \
three short sentences, and stay with what is written here; if the answer is not here, give the telephone number \
of the front desk, 555 0142.

Opening hours. The museum opens at ten in the morning and closes at five, Tuesday to Sunday. On Mondays it is \
closed, except in July and August, when it opens from noon to four. It is closed on the twenty-fifth of \
December.

Tickets. An adult pays nine, a student six, a child between six and sixteen three. Younger children enter free \
of charge. A family ticket costs twenty. School classes pay two for each pupil and must be announced a week \
ahead.

The collection. The main hall holds the lifeboat Aurora, which saved one hundred and twelve people. Visitors may \
step on board in groups of eight. The lower gallery shows charts and a model of the old lighthouse. The upper \
gallery has a film of nineteen minutes about the herring fishery, shown every half hour. The workshop is open on \
Wednesdays and Saturdays.

Getting about. The ferry lands three hundred metres from the door. There is a lift to both galleries, but not to \
the Aurora. Dogs are welcome in the yard. Large bags go into the lockers. Photographs are allowed. The cafe \
serves soup and cake until four.
"""

QUESTIONS = (
    "When do you open on Sundays?",
    "How much is it for two adults and two children of seven and nine?",
    "Can I bring my dog?",
    "Who was the Aurora and what did she do?",
    "We are a class of twenty-four pupils. What do we pay, and what do we have to do before we come?",
    "I use a wheelchair. Which parts of the museum can I see?",
    "Is the boat workshop open on Friday?",
    "How long is the film about the herring fishery, and when is it shown?",
    "Are you open on Christmas Day?",
    "My son is five years old. Does he need a ticket?",
    "How far is it from the ferry to the museum? I have a heavy suitcase and would like to leave it somewhere.",
    "May I take pictures of the lighthouse model?",
    "Do you have a restaurant, and until when can I eat there?",
    "It is a Monday in August. At what time can I visit?",
    "How many people can go on board of the lifeboat at once?",
    "I would like to become a volunteer. Whom should I ask?",
)


class PromptFileError(ValueError):
    """A line of the prompts file is not a prompt."""


def built_in_prompts() -> tuple[DemoPrompt, ...]:
    """Sixteen conversations that differ only after the same system prompt."""
    system = Message("system", SYSTEM_PROMPT)
    return tuple(
        DemoPrompt(name=f"chat-{number:02}", messages=(system, Message("user", question)))
        for number, question in enumerate(QUESTIONS, start=1)
    )


def read_prompts(path: Path) -> tuple[DemoPrompt, ...]:
    """Read JSON lines: `{"messages": [{"role": …, "content": …}, …]}`, `{"prompt": "…"}`, or plain strings.

    Empty lines are skipped. Requests are named after their line.

    Raises:
        PromptFileError: names the file, the line and what is wrong with it.
        OSError: the file cannot be read.
    """
    prompts: list[DemoPrompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path}: not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_prompt(f"line-{number:02}", json.loads(line)))
            except ValueError as error:
                raise PromptFileError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise PromptFileError(f"{path}: holds no prompt; write one JSON value per line")
    return tuple(prompts)


def _prompt(name: str, value: Any) -> DemoPrompt:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"a {type(value).__name__} is no prompt; write an object or a string")
    if set(value) == {"prompt"} and isinstance(value["prompt"], str) and value["prompt"]:
        return DemoPrompt(name=name, text=value["prompt"])
    if set(value) == {"messages"} and isinstance(value["messages"], list) and value["messages"]:
        return DemoPrompt(name=name, messages=tuple(_message(message) for message in value["messages"]))
    raise ValueError('an object needs exactly one of "messages" (a list) and "prompt" (a text), not empty')


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping) or set(value) != {"role", "content"}:
        raise ValueError('every message needs "role" and "content", and nothing else')
    if not isinstance(value["role"], str) or not isinstance(value["content"], str):
        raise ValueError('"role" and "content" of a message must be texts')
    return Message(value["role"], value["content"])
