"""SentencePiece BPE vocabularies (tokenizer.model, and the `llama` vocabularies of GGUF)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from serving.text.base import BaseTokenizer, SpacePrefix, TokenizerError, TokenizerInfo
from serving.text.special_text import SpecialToken

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# SentencePiece's ModelProto.SentencePiece.Type; GGUF's token types have the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def piece_bytes(piece: str) -> bytes:
    """Bytes that a piece stands for: <0x..> is one byte, "▁" a space."""
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


class SentencePieceTokenizer(BaseTokenizer):
    """Encodes with a `sentencepiece.SentencePieceProcessor` that adds no space of its own (see `load_processor`)."""

    def __init__(
        self,
        processor: Any,
        info: TokenizerInfo,
        *,
        special: Iterable[SpecialToken],
        always_special: Iterable[SpecialToken] = (),
        space_prefix: SpacePrefix,
    ):
        special, always_special = tuple(special), tuple(always_special)
        beyond = [token.token_id + 1 for token in (*special, *always_special)]
        super().__init__(
            info,
            vocab_size=max([processor.get_piece_size(), *beyond]),
            special=special,
            always_special=always_special,
            space_prefix=space_prefix,
            strips_space=space_prefix != "never",
        )
        self._processor = processor
        self._num_pieces: int = processor.get_piece_size()

    def _encode_text(self, text: str) -> list[int]:
        token_ids: list[int] = self._processor.encode(text)
        return token_ids

    def _text_bytes(self, token_id: int) -> bytes:
        return piece_bytes(self._processor.id_to_piece(token_id)) if token_id < self._num_pieces else b""


def load_processor(model_proto: bytes, source: str) -> Any:
    """A SentencePieceProcessor for a serialized ModelProto. Raises TokenizerError naming `source`."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model_proto)
    except (RuntimeError, ValueError, OSError) as error:
        raise TokenizerError(f"{source}: not a SentencePiece model that can be used: {error}") from error
    return processor


def build_model_proto(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> bytes:
    """A serialized SentencePiece ModelProto: BPE with identity normalisation and no space added before text.

    Field numbers from sentencepiece_model.proto: pieces 1 {piece 1, score 2, type 3}, trainer_spec 2 {model_type 3,
    byte_fallback 35}, normalizer_spec 3 {name 1, add_dummy_prefix 3, remove_extra_whitespaces 4,
    escape_whitespaces 5}. Encoding then follows SentencePiece itself, with the scores as merge priorities.
    """
    parts: list[bytes] = []
    for piece, score, piece_type in zip(pieces, scores, types, strict=True):
        data = piece.encode()
        body = b"\x0a%b%b\x15%b\x18%c" % (_varint(len(data)), data, struct.pack("<f", score), piece_type)
        parts += (b"\x0a", _varint(len(body)), body)
    trainer = b"\x18\x02"  # model_type = BPE
    if BYTE in types:
        trainer += _varint(35 << 3) + b"\x01"
    normalizer = b"\x0a\x08identity\x18\x00\x20\x00\x28\x01"
    parts += (b"\x12", _varint(len(trainer)), trainer, b"\x1a", _varint(len(normalizer)), normalizer)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """A protocol buffer varint: seven bits a byte, low ones first, the top bit on all but the last."""
    if value <= 0x7F:
        return bytes((value,))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
