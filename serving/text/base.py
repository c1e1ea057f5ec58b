"""What every tokenizer shares: special text, beginning and end tokens, and the one rule for turning ids into text.

Text of token ids: the bytes of the tokens, one after the other, read as UTF-8 with U+FFFD for what is no UTF-8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from serving.text.special_text import SpecialTextSplitter, SpecialToken

# Where SentencePiece puts the space that it adds before text, so that a word reads the same at the start as inside:
# nowhere; before each piece between special tokens; or before the whole text unless it starts with a space.
SpacePrefix = Literal["never", "every_piece", "text_start"]


class TokenizerError(ValueError):
    """Tokenizer files that cannot be used; the message names the file or key and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """What a model's files say beside the vocabulary."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()  # before the text when special tokens are added
    suffix_ids: tuple[int, ...] = ()  # after it
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...: their text
    chat_template: str | None = None
    named_chat_templates: Mapping[str, str] = field(default_factory=dict)  # beside the default one, e.g. tool_use


class BaseTokenizer(ABC):
    """A `serving.text.tokenizer.Tokenizer` but for the vocabulary, which a subclass brings."""

    def __init__(
        self,
        info: TokenizerInfo,
        *,
        vocab_size: int,
        special: Iterable[SpecialToken],
        always_special: Iterable[SpecialToken] = (),
        space_prefix: SpacePrefix = "never",
        strips_space: bool = False,
    ):
        """`special`: control tokens, read from text only where allowed. `always_special`: read from any text.

        `strips_space`: encoding puts a space before a whole text, here or in the library, and decoding removes it.
        """
        special = tuple(special)
        always_special = tuple(always_special)
        self.vocab_size = vocab_size
        self.bos_token_id = info.bos_token_id
        self.eos_token_ids = info.eos_token_ids
        self.special_tokens = dict(info.special_tokens)
        self.chat_template = info.chat_template
        self.named_chat_templates = dict(info.named_chat_templates)
        self.special_token_texts = {token.text: token.token_id for token in special}
        self.special_token_ids = frozenset(token.token_id for token in special if not token.visible)
        self._info = info
        self._special_text = {token.token_id: token.text for token in special}
        self._always_text = {token.token_id: token.text for token in always_special}
        self._special_splitter = SpecialTextSplitter((*special, *always_special))
        self._always_splitter = SpecialTextSplitter(always_special)
        self._space_prefix = space_prefix
        self._strips_space = strips_space
        for token_id in (*info.prefix_ids, *info.suffix_ids, *info.eos_token_ids, *self._special_text):
            if not 0 <= token_id < vocab_size:
                raise TokenizerError(f"special token id {token_id} is outside the vocabulary of {vocab_size}")

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text: no space added, no control token found in it."""

    @abstractmethod
    def _text_bytes(self, token_id: int) -> bytes:
        """Bytes of a token that is not special; none for an id the vocabulary does not have."""

    def encode(self, text: str, *, add_special_tokens: bool, allow_special_text: bool = False) -> list[int]:
        """Ids of `text`.

        add_special_tokens puts the tokens before and after that the model was trained with (usually BOS), unless
        the text already begins (ends) with them. allow_special_text reads the text of control tokens as those
        tokens; otherwise it is ordinary text. Halves of surrogate pairs, which are no text, become U+FFFD. Raises
        TokenizerError for a character that a broken vocabulary has no token for.
        """
        text = _well_formed(text)
        splitter = self._special_splitter if allow_special_text else self._always_splitter
        token_ids = self.encode_pieces(splitter.split(text))
        if add_special_tokens:
            prefix, suffix = list(self._info.prefix_ids), list(self._info.suffix_ids)
            if token_ids[: len(prefix)] != prefix:
                token_ids = prefix + token_ids
            if suffix and token_ids[-len(suffix) :] != suffix:
                token_ids = token_ids + suffix
        return token_ids

    def split_special_text(self, text: str) -> list[str | int]:
        """`text` as ordinary pieces and the ids of the special tokens between them; see `encode_pieces`."""
        return self._special_splitter.split(_well_formed(text))

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """Ids of pieces from `split_special_text`; strings are ordinary text whatever they hold."""
        token_ids: list[int] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                token_ids.append(piece)
            elif piece:
                token_ids += self._encode_text(self._with_space(piece, is_start=index == 0))
        return token_ids

    def _with_space(self, piece: str, *, is_start: bool) -> str:
        if self._space_prefix == "every_piece":
            return " " + piece
        if self._space_prefix == "text_start" and is_start and not piece.startswith((" ", "▁")):
            return " " + piece
        return piece

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Text of `token_ids`, by the rule of this module.

        Where encoding adds a space before a text, decoding takes it away again, so that a whole text comes back as
        it was. `continuation` says that the ids go on after others: then the first space belongs to the text.
        """
        text = b"".join(
            self.token_bytes(token_id, skip_special_tokens=skip_special_tokens) for token_id in token_ids
        ).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space and not continuation else text

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        """Exact bytes that a token stands for: of a special token its text, or none where those are skipped.

        Ids that the vocabulary does not have (padding rows of an embedding) stand for nothing.
        """
        special_text = self._special_text.get(token_id)
        if special_text is not None:
            is_skipped = skip_special_tokens and token_id in self.special_token_ids
            return b"" if is_skipped else special_text.encode()
        always_text = self._always_text.get(token_id)
        if always_text is not None:
            return always_text.encode()
        return self._text_bytes(token_id) if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """A token alone, for showing: like `token_bytes`, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
