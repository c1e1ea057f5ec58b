"""The tokenizer interface, and opening the tokenizer of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from serving.text.base import TokenizerError
from serving.text.folder import tokenizer_from_folder
from serving.text.gguf_vocabulary import tokenizer_from_gguf

__all__ = ["Tokenizer", "TokenizerError", "load_tokenizer"]


class Tokenizer(Protocol):
    """Text to token ids and back. All of it may be called from several threads at once.

    Decoding has one rule: the bytes of the tokens, one after the other, are the text in UTF-8, with U+FFFD for what
    is no UTF-8. No clean-up of spaces follows.
    """

    vocab_size: int  # ids are below it; an embedding may have more rows
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]  # control tokens: not text, unless asked for
    special_token_texts: dict[str, int]
    special_tokens: dict[str, str]  # bos_token, eos_token, ...: their text, for chat templates
    chat_template: str | None
    named_chat_templates: dict[str, str]  # beside the default one, e.g. tool_use

    def encode(self, text: str, *, add_special_tokens: bool, allow_special_text: bool = False) -> list[int]:
        """Ids of `text`; see `BaseTokenizer.encode`."""

    def split_special_text(self, text: str) -> list[str | int]:
        """`text` as ordinary pieces and the ids of the special tokens between them."""

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """Ids of pieces from `split_special_text`; strings are ordinary text whatever they hold."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Text of `token_ids`; with `continuation`, of ids that follow others (a leading space is kept)."""

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        """Exact bytes that a token stands for; of a special token its text, or none where those are skipped."""

    def token_text(self, token_id: int) -> str:
        """A token alone, for showing: its bytes with U+FFFD for parts of characters."""


def load_tokenizer(source: Path | str | Mapping[str, Any] | None) -> Tokenizer | None:
    """The tokenizer of a model folder or of GGUF metadata; None where there is none (prompts then come as ids).

    Raises TokenizerError, naming the file or key, for one that cannot be used exactly.
    """
    if source is None:
        return None
    return tokenizer_from_gguf(source) if isinstance(source, Mapping) else tokenizer_from_folder(Path(source))
