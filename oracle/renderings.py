"""Renders published chat templates with transformers, for the test `published_templates` of consort-checkpoint.

    python renderings.py DIRECTORY > renderings.json

DIRECTORY holds templates as files named *.jinja; llama.cpp's sources carry some seventy in models/templates. Needs transformers
and jinja2. Templates that refuse a conversation are left out of it.
"""

import json
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place, \"now\" or later.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city's name"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}
QUESTION = {"role": "user", "content": "What's the weather in Zürich? <b>&\n"}
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": " Hello, world "}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 < 2 & 'a'?"}]},
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "Why?\n\nTell me."},
        ]
    },
    {"messages": [QUESTION], "tools": [WEATHER]},
    {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "rain, 7 °C"},
        ],
        "tools": [WEATHER],
    },
]
# The control tokens of the test's vocabulary.
TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def main():
    renderings = []
    for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
        template = path.read_text()
        for conversation in CONVERSATIONS:
            try:
                (expected,), _ = render_jinja_template(
                    [conversation["messages"]],
                    tools=conversation.get("tools"),
                    chat_template=template,
                    add_generation_prompt=True,
                    **TOKENS,
                )
            except Exception as error:
                print(f"{path.name}: {error}", file=sys.stderr)
                continue
            renderings.append(
                {"name": path.name, "template": template, "conversation": conversation, "expected": expected}
            )
    json.dump(renderings, sys.stdout)


main()
