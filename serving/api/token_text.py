"""Token by token: the text that each adds, and how a token alone is shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from serving.text.tokenizer import Tokenizer


class TokenText:
    """The text that each token of a completion adds: joined, the text of all of them as UTF-8.

    A token that ends inside a character adds the characters before it; the one that completes it adds it whole.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._decoder.decode(
            self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip_special_tokens)
        )


def prompt_text(tokenizer: Tokenizer | None, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of a prompt that came as token ids; none without a tokenizer."""
    return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def prompt_token_texts(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str | None, *, skip_special_tokens: bool
) -> list[str]:
    """The text that each token of a prompt adds. Joined, they are the prompt's text.

    text: what the client sent, or None for token ids. What encoding put before it (BOS, a space) adds nothing.
    """
    if text is None:
        text = prompt_text(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
    else:
        skip_special_tokens = False  # the text of control tokens in a raw prompt is part of it
    decoder = TokenText(tokenizer, skip_special_tokens=skip_special_tokens)
    texts = [decoder.add(token_id) for token_id in token_ids]
    added = sum(map(len, texts)) - len(text)
    if added > 0 and "".join(texts).endswith(text):
        for index, piece in enumerate(texts):
            texts[index] = piece[added:]
            added = max(0, added - len(piece))
    return texts


def shown_token(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token alone, unlike any other: its text, or `bytes:\\x..` where it has parts of characters."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: Tokenizer | None, token_id: int) -> list[int] | None:
    return None if tokenizer is None else list(tokenizer.token_bytes(token_id))
