"""The one error that a damaged, hostile or unsuitable checkpoint raises."""

from __future__ import annotations

import reprlib

_repr = reprlib.Repr(maxlevel=3, maxdict=4, maxlist=8, maxtuple=8, maxstring=120, maxlong=40, maxother=120)


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message is one line: file, tensor or field, value found, limit broken."""


def shown(value: object) -> str:
    """`value` for an error message: one line of ASCII, shortened. Names in files may be long, or hold newlines."""
    return _repr.repr(value).encode("ascii", "backslashreplace").decode()
