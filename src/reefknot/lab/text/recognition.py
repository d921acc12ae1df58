"""Recognise what a text file holds by its bytes: its Unicode encoding, and whether it is JSON lines.

Other encodings cannot be recognised with certainty. `suggest_encoding` returns a guess for an error message.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Literal

Kind = Literal["plain", "jsonl", "parquet", "json"]
"""The kind of a file: "json" is JSON that is not one object per line, which cannot be read."""

_BYTE_ORDER_MARKS = [  # UTF-32 first, because its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
]
_WESTERN = "cp1252"
_MAX_WESTERN_ACCENTS = 0.3  # of all letters; a text in Greek or Cyrillic letters has far more bytes beyond ASCII
_MAX_WESTERN_SYMBOLS = 0.1  # of all bytes beyond ASCII
_PUNCTUATION = "\u2019\u2013\u2014\u00ad"  # between letters in Western text: apostrophe, dashes, soft hyphen
_FREQUENT_ENCODINGS = [
    *("cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874"),
    *("iso8859_2", "iso8859_5", "iso8859_7", "koi8_r", "koi8_u", "cp437", "cp850", "cp852", "cp866", "mac_roman"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949"),
]
_SAMPLE_BYTES = 1 << 16
_JSON_OBJECT = re.compile(r'\{\s*"(?:[^"\\]|\\.)*"\s*:')
_JSON_ARRAY = re.compile(r'\[\s*\{\s*"')


def detect_encoding(head: bytes) -> str:
    """Return UTF-16 or UTF-32 if the first bytes show it, and UTF-8 otherwise."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding
    # Without a byte order mark, every second byte of most UTF-16 text is zero.
    sample = head[:4096]
    if len(sample) >= 8 and sample[::2].count(0) + sample[1::2].count(0) > 0.3 * len(sample):
        if not sample[::2].count(0) and b"\0\0" not in sample:
            return "utf-16-le"
        if not sample[1::2].count(0) and b"\0\0" not in sample:
            return "utf-16-be"
    return "utf-8"


def check_utf8(blocks: Iterable[bytes]) -> Literal["ascii", "utf-8", "other"]:
    """Return whether the bytes of a text are ASCII, valid UTF-8, or neither."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_ascii = True
    try:
        for block in blocks:
            is_ascii = is_ascii and block.isascii()
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "other"
    return "ascii" if is_ascii else "utf-8"


def suggest_encoding(sample: bytes) -> str | None:
    """Return a probable encoding of bytes that are not valid UTF-8, or None if most of them are UTF-8.

    The encoding of Western Europe, cp1252, is returned unless the bytes show another one: letters beyond ASCII are
    frequent, as in Greek or Cyrillic text, or would be symbols inside words. Then charset-normalizer decides, if it is
    installed.
    """
    sample = sample[:_SAMPLE_BYTES]
    text = sample.decode("utf-8", "replace")
    num_invalid = text.count("\ufffd")
    if sum(not character.isascii() for character in text) > 2 * num_invalid:
        return None
    if _is_western(sample):
        return _WESTERN
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return _WESTERN
    match = from_bytes(sample, cp_isolation=_FREQUENT_ENCODINGS).best()
    return match.encoding if match is not None and match.encoding != "utf_8" else _WESTERN


def _is_western(sample: bytes) -> bool:
    """Return whether bytes can be read as cp1252, with words of Latin letters of which few have accents."""
    try:
        text = sample.decode(_WESTERN)
    except UnicodeDecodeError:
        return False
    num_letters = sum(character.isalpha() for character in text)
    num_beyond_ascii = sum(not character.isascii() for character in text)
    between_letters = re.findall(r"(?<=[^\W\d_])[^\x00-\x7f](?=[^\W\d_])", text)
    num_symbols = sum(not character.isalpha() and character not in _PUNCTUATION for character in between_letters)
    return (
        num_beyond_ascii <= _MAX_WESTERN_ACCENTS * max(num_letters, 1)
        and num_symbols <= _MAX_WESTERN_SYMBOLS * num_beyond_ascii
    )


def recognise_json(head: bytes, encoding: str | None, *, is_named_json: bool) -> Kind:
    """Return "jsonl" if the first line is a JSON object, "json" if the text is other JSON, and "plain" otherwise.

    Args:
        head: The first bytes of the file, unpacked.
        encoding: The encoding that the user gave, or None.
        is_named_json: Whether the name of the file ends in .json. JSON over several lines is recognised only then.
    """
    text = head.decode(encoding or detect_encoding(head), "ignore").lstrip()
    if not text.startswith(("{", "[")):
        return "plain"
    first_line, line_end, _rest = text.partition("\n")
    try:
        if isinstance(json.loads(first_line), dict):
            return "jsonl"
    except (ValueError, RecursionError):
        if not line_end and _JSON_OBJECT.match(first_line):  # the line does not end in these bytes
            return "jsonl"
    return "json" if is_named_json or _JSON_ARRAY.match(text) else "plain"
