"""What every reader gives: named matrices whose rows can be read one range at a time."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class SourceTensor(Protocol):
    """One tensor of a foreign checkpoint, seen as a matrix: a vector of n values has n rows of one column."""

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str:
        """File and tensor, for messages."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost dimension first."""
        ...

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of one row in the file."""
        ...

    def read_rows(self, start: int, stop: int, col_start: int, col_stop: int) -> np.ndarray:
        """Values [start:stop, col_start:col_stop] in a float dtype that holds them exactly.

        Raises CheckpointError if the file has become shorter than its header says.
        """
        ...
