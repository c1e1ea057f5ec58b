"""The printable alphabet in which byte-level BPE vocabularies are written: one character for each of the 256 bytes.

Source: GPT-2 (Radford et al. 2019), `bytes_to_unicode` of its encoder: printable Latin-1 characters stand for
themselves, every other byte for the next free code point from U+0100.
"""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + index): byte for index, byte in enumerate(others)}
    return alphabet


BYTE_OF_CHARACTER = _alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def to_bytes(piece: str) -> bytes:
    """Bytes that a vocabulary entry stands for; an entry outside the alphabet (an added token) is plain text."""
    try:
        return bytes(map(BYTE_OF_CHARACTER.__getitem__, piece))
    except KeyError:
        return piece.encode()
