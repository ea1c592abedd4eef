"""JSON that stays in one line for every reader: what splits lines elsewhere leaves escaped.

JSON lets U+2028, U+2029 and U+0085 stand in strings as they are, and neither server-sent events nor JSON lines end a
line there. But ``str.splitlines()`` does, and with it httpx' ``iter_lines``, older SSE clients and many scripts over a
downloaded file: an answer that holds one of the three reaches them in two halves. Escaped, it means the same to every
reader of JSON. All else that ``splitlines()`` splits at is below U+0020, which every encoder escapes.
"""

from __future__ import annotations

_OF_TEXT = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def in_one_line(document: bytes) -> bytes:
    """JSON in UTF-8, of any encoder, with the three escaped; the same object where there is none, which of ASCII
    is known at one look. Line ends that an encoder puts between values stay."""
    if document.isascii():
        return document
    # Outside of strings JSON is ASCII, and in UTF-8 no character's bytes stand inside another's. To replace what is not
    # there is cheaper than to ask whether it is: ``in`` takes its left side for a number first.
    document = document.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return document.replace(b"\xc2\x85", b"\\u0085")


def text_in_one_line(document: str) -> str:
    """The same of JSON that is not encoded yet."""
    return document if document.isascii() else document.translate(_OF_TEXT)
