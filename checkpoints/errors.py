"""The one error that a damaged, hostile or unsuitable checkpoint raises."""

from __future__ import annotations

MAX_SHOWN_CHARS = 120


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message is one line: file, tensor or field, value found, limit broken."""


def shown(value: object) -> str:
    """`value` for an error message: one line of ASCII, shortened. Names in files may be long, or hold newlines."""
    if isinstance(value, str | bytes):
        text = ascii(value[: MAX_SHOWN_CHARS + 1])
    else:
        text = ascii(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
