"""The model's vocabulary as llguidance sees it: the exact bytes of each token, control tokens and ends of sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from serving.structured.grammar_worker import TokenTable, make_tokenizer
from serving.text.tokenizer import Tokenizer


class ModelTokenTable(TokenTable):
    """Tokens [0, vocab_size) of a model, and one end of sequence more where it has none. Ids that the tokenizer does not
    have stand for nothing and are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self.eos_token_ids = list(eos_token_ids) or [vocab_size]
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        if not eos_token_ids:
            tokens.append(b"")
        special = {i for i in (*tokenizer.special_token_ids, *self.eos_token_ids) if i < len(tokens)}
        super().__init__(tokens, sorted(special), self.eos_token_ids)
        self.usable = self.mask(i for i in range(vocab_size) if tokens[i] or i in special)

    @property
    def mask_size(self) -> int:
        """Words of a mask."""
        return -(-len(self.tokens) // 32)

    def mask(self, token_ids: Iterable[int]) -> np.ndarray:
        """[mask_size] int32 with a bit set for each token, lowest first."""
        bits = np.zeros(32 * self.mask_size, np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view("<i4")

    def for_worker(self) -> dict[str, Any]:
        """The vocabulary as `grammar_worker` takes it."""
        return {
            "tokens": [data.hex() for data in self.tokens],
            "special": self.special_token_ids,
            "eos": self.eos_token_ids,
        }


def make_library_tokenizer(table: ModelTokenTable) -> Any:
    """The llguidance.LLTokenizer of a vocabulary."""
    return make_tokenizer(table, table.eos_token_ids)
