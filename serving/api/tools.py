"""`tools` and `tool_choice`: what functions a model may call, read from a request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from configs.server import ServerConfig
from serving.api.fields import Boolean, Text, check_keys
from serving.api.output_constraint import read_json_schema
from serving.request import RequestError, shown

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Whether the model calls a tool; `name` is that of the one it must call, for "named"."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None


def read_tools(name: str, value: object, config: ServerConfig) -> tuple[ToolSpec, ...]:
    """Tools in OpenAI's form, of unlike names."""
    if not isinstance(value, list):
        raise RequestError(name, f"must be a list of tools, got {shown(value)}")
    if len(value) > config.max_tools:
        raise RequestError(name, f"has {len(value)} entries; at most {config.max_tools} are accepted")
    tools = tuple(_read_tool(f"{name}[{index}]", item, config) for index, item in enumerate(value))
    names = [tool.name for tool in tools]
    for index, tool_name in enumerate(names):
        if tool_name in names[:index]:
            raise RequestError(f"{name}[{index}].function.name", f"{tool_name!r} is taken by an earlier tool")
    return tools


def _read_tool(name: str, value: object, config: ServerConfig) -> ToolSpec:
    tool = check_keys(name, value, ("type", "function"), ("type", "function"))
    if tool["type"] != "function":
        raise RequestError(f"{name}.type", f"must be function, got {shown(tool['type'])}")
    inner = f"{name}.function"
    function = check_keys(inner, tool["function"], ("name", "description", "parameters", "strict"), ("name",))
    if not isinstance(function["name"], str) or not _NAME.fullmatch(function["name"]):
        raise RequestError(
            f"{inner}.name", f"must have 1 to 64 letters, digits and _ . : -; got {shown(function['name'])}"
        )
    description = function.get("description")
    if description is not None:
        Text(config.max_grammar_chars, 0).read(f"{inner}.description", description)
    parameters = read_json_schema(f"{inner}.parameters", function.get("parameters", {}), config)
    if not isinstance(parameters, dict):
        raise RequestError(f"{inner}.parameters", f"must be an object, got {shown(parameters)}")
    return ToolSpec(
        name=function["name"],
        description=description,
        parameters=parameters,
        strict=Boolean().read(f"{inner}.strict", function.get("strict", False)),
    )


def read_tool_choice(name: str, value: object) -> ToolChoice:
    if value in ("none", "auto", "required"):
        return ToolChoice(mode=value)
    if not isinstance(value, dict):
        raise RequestError(name, f"must be none, auto, required or an object that names a function; got {shown(value)}")
    given = check_keys(name, value, ("type", "function"), ("type", "function"))
    if given["type"] != "function":
        raise RequestError(f"{name}.type", f"must be function, got {shown(given['type'])}")
    function = check_keys(f"{name}.function", given["function"], ("name",), ("name",))
    return ToolChoice(mode="named", name=Text(64).read(f"{name}.function.name", function["name"]))


def check_tool_choice(choice: ToolChoice | None, tools: Sequence[ToolSpec]) -> ToolChoice:
    """The choice in force: without one, "auto" where there are tools. Raises RequestError where no tool fits it."""
    if choice is None:
        return ToolChoice(mode="auto" if tools else "none")
    if choice.mode == "required" and not tools:
        raise RequestError("tool_choice", "is required, and there are no tools")
    if choice.mode == "named" and choice.name not in [tool.name for tool in tools]:
        raise RequestError("tool_choice", f"names {shown(choice.name)}, which is none of the tools")
    return choice
