"""Checks chat messages and brings them into the form that chat templates expect."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from serving.request import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_DEPTH = 64  # of values inside each other
MAX_INT_BITS = 1024
MAX_SHOWN_CHARS = 80


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Plain copies of `messages`, each with a known role and text as content.

    Content may be a string or a list of text parts, which are joined by line feeds; it may be absent only beside
    tool calls. Reasoning is given under both of its names. Keys whose value is None are left out, as in a client's copy of an answer. Arguments of tool calls
    stay as they are (see `with_parsed_arguments`). Raises RequestError naming the message and key.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError("messages", f"must be a list of messages, got {shown_value(messages)}")
    if not messages:
        raise RequestError("messages", "is an empty list; at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise RequestError("messages", f"has {len(messages)} entries; at most {MAX_MESSAGES} are accepted")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(name, f"must be an object with role and content, got {shown_value(message)}")
    checked = {key: value for key, value in plain_json(name, message).items() if value is not None}
    role = checked.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{name}.role", f"must be one of {', '.join(ROLES)}; got {shown_value(role)}")
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if not isinstance(checked.get(key, ""), str):
            raise RequestError(f"{name}.{key}", f"must be a string, got {shown_value(checked[key])}")
    reasoning = checked.get("reasoning_content", checked.get("reasoning"))
    if reasoning is not None:  # one thing under two names, of which a template reads either
        checked |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if "tool_calls" in checked:
        _check_tool_calls(f"{name}.tool_calls", role, checked["tool_calls"])
        if not checked["tool_calls"]:
            del checked["tool_calls"]
    content = checked.get("content")
    if content is None:
        if not checked.get("tool_calls"):
            raise RequestError(f"{name}.content", "is missing")
    else:
        checked["content"] = _content_text(f"{name}.content", content)
    return checked


def _content_text(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(name, f"must be a string or a list of text parts, got {shown_value(content)}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise RequestError(f"{name}[{index}]", f"must be an object with a type, got {shown_value(part)}")
        if part["type"] != "text":
            raise RequestError(f"{name}[{index}].type", f"{shown_value(part['type'])} is not supported; only text is")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{name}[{index}].text", f"must be a string, got {shown_value(part.get('text'))}")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_tool_calls(name: str, role: str, tool_calls: object) -> None:
    if not isinstance(tool_calls, list):
        raise RequestError(name, f"must be a list, got {shown_value(tool_calls)}")
    if tool_calls and role != "assistant":
        raise RequestError(name, f"belong to an assistant's message, not to one of role {role}")
    for index, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{name}[{index}].function", f"must be an object with a name, got {shown_value(function)}"
            )
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str | dict):
            raise RequestError(f"{name}[{index}].function.arguments", f"must be JSON, got {shown_value(arguments)}")


def has_string_arguments(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tool call gives its arguments as a string of JSON, as the OpenAI form does."""
    return any(isinstance(call["function"].get("arguments"), str) for call in _tool_calls(messages))


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy in which arguments given as a string of JSON are objects, which most templates expect.

    Raises RequestError where such a string is not a JSON object.
    """
    parsed: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for call in _tool_calls(parsed):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                value = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise RequestError(
                    "messages", f"hold tool call arguments that are no JSON object: {shown_value(arguments)}"
                )
            call["function"]["arguments"] = plain_json("messages", value)
    return parsed


def _tool_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [call for message in messages for call in message.get("tool_calls", ())]


def check_objects(name: str, values: object) -> list[dict[str, Any]] | None:
    """A plain copy of a list of objects (tools, documents), or None for none. Raises RequestError."""
    if values is None:
        return None
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RequestError(name, f"must be a list of objects, got {shown_value(values)}")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(f"{name}[{index}]", f"must be an object, got {shown_value(value)}")
    return [plain_json(f"{name}[{index}]", value) for index, value in enumerate(values)] or None


def plain_json(name: str, value: object, depth: int = 0) -> Any:
    """A copy of `value` made of dict, list, str, int, float, bool and None. Raises RequestError naming `name`."""
    if depth > MAX_DEPTH:
        raise RequestError(name, f"holds values more than {MAX_DEPTH} deep inside each other")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and value.bit_length() <= MAX_INT_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(name, f"has a key that is no string: {shown_value(key)}")
        return {key: plain_json(name, item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(name, item, depth + 1) for item in value]
    raise RequestError(name, f"must be JSON, got {shown_value(value)}")


def shown_value(value: object) -> str:
    """`value` for a message to the client, shortened."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python shows; values too deep in each other
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
