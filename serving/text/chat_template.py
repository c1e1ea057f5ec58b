"""Chat messages to the model's prompt, by the chat template that comes with the model."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from serving.request import RequestError
from serving.text.chat_messages import (
    check_messages,
    check_objects,
    has_string_arguments,
    plain_json,
    shown_value,
    with_parsed_arguments,
)
from serving.text.control_text import ControlTextHider, StandIns
from serving.text.template_renderer import RenderError, RenderLimits, TemplateRenderer
from serving.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 2**18
_DEFAULT = "default"
_TOOL_USE = "tool_use"  # the name under which some models keep a second template for requests with tools
_RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)


class ChatTemplate:
    """Renders messages with a model's template. Safe to use from several threads; `close` ends its processes.

    The template's text holds its markers, BOS included where the model wants one, and is encoded with nothing added.
    The text of control tokens inside messages, tools, documents and arguments is ordinary text (`control_text`).
    A role `developer` is given to templates that do not know it as `system`.

    Everything wrong is a RequestError: with the messages, with a model that has no template, and with a template
    that is broken, refuses the messages, goes beyond `limits`, or does not name the tools or documents it is given.
    """

    def __init__(self, tokenizer: Tokenizer, *, template: str | None = None, limits: RenderLimits | None = None):
        """`template` takes the place of the tokenizer's own ones."""
        self._tokenizer = tokenizer
        self._templates = {} if template is not None else dict(tokenizer.named_chat_templates)
        default = template if template is not None else tokenizer.chat_template
        if default is not None:
            self._templates[_DEFAULT] = default
        usable = {name: source for name, source in self._templates.items() if len(source) <= MAX_TEMPLATE_CHARS}
        self._renderer = TemplateRenderer(usable, limits or RenderLimits())
        self._hiders: dict[str, ControlTextHider] = {}
        self._lock = threading.Lock()  # of _hiders

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text.

        add_generation_prompt ends it with the opening of the assistant's turn. continue_final_message leaves the
        last message, which must be the assistant's, open instead, so that the model writes on.
        """
        text, stand_ins = self._render(
            messages, tools, documents, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        return stand_ins.restore(text)

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt as token ids; arguments as of `render`."""
        text, stand_ins = self._render(
            messages, tools, documents, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        pieces = self._tokenizer.split_special_text(text)
        return self._tokenizer.encode_pieces(
            [piece if isinstance(piece, int) else stand_ins.restore(piece) for piece in pieces]
        )

    def close(self) -> None:
        self._renderer.close()

    def _render(
        self,
        messages: object,
        tools: object,
        documents: object,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: object,
    ) -> tuple[str, StandIns]:
        checked = check_messages(messages)
        checked_tools = check_objects("tools", tools)
        checked_documents = check_objects("documents", documents)
        extra = self._check_kwargs(chat_template_kwargs)
        for flag, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(value, bool):
                raise RequestError(flag, f"must be true or false, got {shown_value(value)}")
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("continue_final_message", "cannot go with add_generation_prompt")
            if checked[-1]["role"] != "assistant" or "content" not in checked[-1]:
                raise RequestError("continue_final_message", "needs an assistant's message with content at the end")
        name = self._choose_template(has_tools=checked_tools is not None)
        source = self._templates[name]
        for field, is_given in (("tools", checked_tools is not None), ("documents", checked_documents is not None)):
            is_used = re.search(rf"\b{field}\b", source) or (field, name) == ("tools", _TOOL_USE)
            if is_given and not is_used:
                raise RequestError(field, "are given, and the model's chat template does not use them")
        if "developer" not in source:
            checked = [{**m, "role": "system"} if m["role"] == "developer" else m for m in checked]

        forms = [with_parsed_arguments(checked), checked] if has_string_arguments(checked) else [checked]
        for index, form in enumerate(forms):
            try:
                return self._render_form(
                    name,
                    {"messages": form, "tools": checked_tools, "documents": checked_documents, "extra": extra},
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                )
            except RenderError as error:
                if index + 1 < len(forms) and str(error).startswith("TypeError"):
                    continue  # a few templates want the arguments of tool calls as a string
                if error.is_refusal:
                    raise RequestError("messages", f"the model's chat template refuses them: {error}") from error
                raise RequestError("chat_template", f"the model's chat template failed: {error}") from error
        raise AssertionError("there is at least one form")

    def _render_form(
        self, name: str, given: dict[str, Any], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> tuple[str, StandIns]:
        hider = self._hider(name)
        try:
            stand_ins = StandIns(hider.originals, given, self._templates[name])
        except ValueError as error:
            raise RequestError("messages", str(error)) from error

        def rendered(values: dict[str, Any]) -> str:
            # Roles are from a fixed list, and templates build markers from them.
            chat = [{**m, "role": n["role"]} for m, n in zip(values["messages"], given["messages"], strict=True)]
            if continue_final_message:
                # The space shows whether the template strips white space at the end of messages.
                chat[-1]["content"] += stand_ins.end_mark + " "
            variables = {"messages": chat, "tools": values["tools"], "documents": values["documents"]}
            return self._renderer.render(
                name,
                {
                    **self._tokenizer.special_tokens,
                    **values["extra"],
                    **variables,
                    "add_generation_prompt": add_generation_prompt,
                },
            )

        text = rendered(hider.hide(given, stand_ins, everywhere=True))
        if hider.is_needed(given) and stand_ins.restore(text) != rendered(given):
            text = rendered(hider.hide(given, stand_ins, everywhere=False))
        if continue_final_message:
            at = text.rfind(stand_ins.end_mark)
            if at < 0:
                raise RequestError(
                    "continue_final_message", "the model's chat template leaves out the end of the last message"
                )
            text = text[:at] if text.startswith(" ", at + 1) else text[:at].rstrip()
        return text, stand_ins

    def _hider(self, name: str) -> ControlTextHider:
        with self._lock:
            hider = self._hiders.get(name)
        if hider is None:
            hider = ControlTextHider(self._tokenizer.special_token_texts, self._renderer.constants(name))
            with self._lock:
                self._hiders[name] = hider
        return hider

    def _choose_template(self, *, has_tools: bool) -> str:
        name = _TOOL_USE if has_tools and _TOOL_USE in self._templates else _DEFAULT
        source = self._templates.get(name)
        if source is None:
            raise RequestError("messages", "this model has no chat template; send a prompt, or start with a template")
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                "chat_template", f"the model's has more than {MAX_TEMPLATE_CHARS} characters, which is not accepted"
            )
        return name

    def _check_kwargs(self, value: object) -> dict[str, Any]:
        name = "chat_template_kwargs"
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise RequestError(name, f"must be an object, got {type(value).__name__}")
        for key in value:
            if key in _RESERVED or key in self._tokenizer.special_tokens:
                raise RequestError(name, f"cannot set {key}")
        checked: dict[str, Any] = plain_json(name, value)
        return checked
