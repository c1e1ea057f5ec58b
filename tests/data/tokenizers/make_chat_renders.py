"""Renders chat_templates/*.jinja with transformers (5.24.0 was used), as chat_renders.json. Needs no model.

python make_chat_renders.py [FOLDER_WITH_TEMPLATES OUTPUT.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a place, in °C; "now" <only>',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
USER = {"role": "user", "content": 'What is 2 < 3 & "why"?\nTell me 👍'}
ASSISTANT = {"role": "assistant", "content": "It is true.  "}
THINKING = {"role": "assistant", "content": "<think>\nhmm, 2 < 3\n</think>\n\nIt is true."}

CASES = [
    {"messages": [USER], "add_generation_prompt": True},
    {"messages": [USER], "add_generation_prompt": False},
    {
        "messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, {"role": "user", "content": "Sure?"}],
        "add_generation_prompt": True,
    },
    {"messages": [USER, THINKING, {"role": "user", "content": " Go on. "}], "add_generation_prompt": True},
    {"messages": [USER], "add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER], "tools": [WEATHER], "add_generation_prompt": True},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"t": 21}'},
        ],
        "tools": [WEATHER],
        "add_generation_prompt": True,
    },
    {"messages": [USER, ASSISTANT], "add_generation_prompt": False, "continue_final_message": True},
    {
        "messages": [USER],
        "documents": [{"title": "Order", "text": "2 < 3", "doc_id": 1}],
        "add_generation_prompt": True,
    },
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "chat_templates"
    output = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "chat_renders.json"
    renders: dict[str, list[str | None]] = {}
    for path in sorted(folder.glob("*.jinja")):
        renders[path.stem] = []
        for case in CASES:
            arguments = {key: value for key, value in case.items() if key not in ("messages", "chat_template_kwargs")}
            arguments |= case.get("chat_template_kwargs", {})
            try:
                texts, _ = render_jinja_template(
                    [case["messages"]], chat_template=path.read_text(encoding="utf-8"), **SPECIAL, **arguments
                )
                renders[path.stem].append(texts[0])
            except Exception as error:  # the template refuses the case
                print(f"{path.stem}: {error!r}", file=sys.stderr)
                renders[path.stem].append(None)
    output.write_text(
        json.dumps({"special_tokens": SPECIAL, "cases": CASES, "renders": renders}, ensure_ascii=False, indent=1)
        + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
