"""Tokenizers of the `tokenizers` library (tokenizer.json, and byte-level BPE built from GGUF)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from serving.text import byte_level
from serving.text.base import BaseTokenizer, SpacePrefix, TokenizerError, TokenizerInfo
from serving.text.sentencepiece_tokenizer import piece_bytes
from serving.text.special_text import SpecialToken

# How the vocabulary spells bytes: in GPT-2's alphabet, or as UTF-8 with "▁" for a space and <0x..> for single bytes.
Spelling = Literal["byte_level", "sentencepiece"]


@contextlib.contextmanager
def library_errors(reason: str) -> Iterator[None]:
    """Turns what the library raises (bare Exception, PanicException on some broken files) into TokenizerError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{reason}: {error}") from error


class LibraryTokenizer(BaseTokenizer):
    """Encodes with a `tokenizers.Tokenizer`; ids become bytes here, so that every token has exact bytes of its own."""

    def __init__(
        self,
        library: Any,
        info: TokenizerInfo,
        *,
        vocab_size: int,
        spelling: Spelling,
        special: Iterable[SpecialToken],
        added: Iterable[SpecialToken] = (),
        space_prefix: SpacePrefix = "never",
        strips_space: bool = False,
    ):
        """`added`: tokens beside the model's vocabulary that are not special; the library finds them in text."""
        library.encode_special_tokens = True  # special tokens are found by this package, ordinary text by the library
        super().__init__(
            info, vocab_size=vocab_size, special=special, space_prefix=space_prefix, strips_space=strips_space
        )
        self._library = library
        self._spelling = spelling
        self._added_text = {token.token_id: token.text for token in added}

    def _encode_text(self, text: str) -> list[int]:
        with library_errors("text that this vocabulary cannot encode"):
            # encode holds the GIL, a batch does not: other threads go on while a long text is encoded
            token_ids: list[int] = self._library.encode_batch([text], add_special_tokens=False)[0].ids
        return token_ids

    def _text_bytes(self, token_id: int) -> bytes:
        added_text = self._added_text.get(token_id)
        if added_text is not None:
            return (added_text if self._spelling == "byte_level" else added_text.replace("▁", " ")).encode()
        piece = self._library.id_to_token(token_id)
        if piece is None:
            return b""
        return byte_level.to_bytes(piece) if self._spelling == "byte_level" else piece_bytes(piece)
