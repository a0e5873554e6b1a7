"""Decode a text file: by its byte order mark; as UTF-16 or UTF-32 if zero bytes show it; otherwise as UTF-8.

Errors name the remedy for other encodings.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from lockstep.core.errors import DataError
from lockstep.core.foreign_errors import reading

# UTF-32 comes before UTF-16: the little-endian mark of UTF-32 starts with the mark of UTF-16.
_MARKS = [
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
]
_MAGIC = {
    b"\x1f\x8b": ("gzip-compressed", "decompress it first (gunzip)"),
    b"BZh": ("bzip2-compressed", "decompress it first (bunzip2)"),
    b"\xfd7zXZ": ("xz-compressed", "decompress it first (unxz)"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "decompress it first (unzstd)"),
    b"PK\x03\x04": ("a ZIP archive (Excel files are ZIP archives, too)", "unpack it first, or save the sheet as CSV"),
    b"PAR1": ("Parquet", "give the file the suffix .parquet"),
}
_HEAD = 4096
_NOT_IN_CP1252 = {0x81, 0x8D, 0x8F, 0x90, 0x9D}
_CONTROLS = {*range(32), 127} - {*b"\t\n\r\f\x1b"}


def read_text(path: Path) -> str:
    """The text of a file, without its byte order mark.

    Raises:
        DataError: see `decoded`.
    """
    return decoded(path)[0]


def decoded(path: Path) -> tuple[str, str | None]:
    """The text of a file without its byte order mark, and its encoding if it has no mark and is not UTF-8.

    Raises:
        DataError: the file cannot be read, or its bytes are not in the encoding of its mark (without a mark: UTF-8).
    """
    with reading(path):
        raw = path.read_bytes()
    mark, encoding = next(((mark, name) for mark, name in _MARKS if raw.startswith(mark)), (b"", ""))
    guessed = None if mark else _without_mark(raw)
    if guessed:
        try:
            return raw.decode(guessed), guessed
        except UnicodeDecodeError as error:
            remedy = f"the file is damaged or truncated; convert it: iconv -c -f {guessed} -t utf-8 {path.name}"
            what = f"not UTF-8: zero bytes between the characters, as in {guessed.upper()}"
            raise DataError(what, where=str(path), remedy=remedy) from error
    try:
        return raw[len(mark) :].decode(encoding or "utf-8"), None
    except UnicodeDecodeError as error:
        place = error.start + len(mark)
    if mark and encoding != "utf-8":
        what = f"not {encoding.upper()}, although its byte order mark says so: byte {place} does not start a character"
        raise DataError(
            what, where=str(path), remedy="the file is damaged or truncated; write it again, preferably as UTF-8"
        )
    what, remedy = _explained(raw, place, path.name)
    raise DataError(what, where=str(path), remedy=remedy)


def guessed(path: Path) -> str | None:
    """UTF-16 or UTF-32, if a file without a byte order mark shows it, and is read so."""
    with reading(path), path.open("rb") as file:
        head = file.read(_HEAD)
    return None if any(head.startswith(mark) for mark, _ in _MARKS) else _without_mark(head)


def _without_mark(raw: bytes) -> str | None:
    """UTF-16 or UTF-32, if the zero bytes show it: an ASCII letter has one zero byte in UTF-16 and three in UTF-32."""
    head = raw[: _HEAD - _HEAD % 4]
    if head.count(0) < max(2, len(head) // 4):
        return None
    zeros = [head[start::4].count(0) * 4 > len(head) * 3 // 4 for start in range(4)]
    patterns = {(False, True, True, True): "utf-32-le", (True, True, True, False): "utf-32-be"}
    patterns |= {(False, True, False, True): "utf-16-le", (True, False, True, False): "utf-16-be"}
    return patterns.get((zeros[0], zeros[1], zeros[2], zeros[3]))


def _explained(raw: bytes, place: int, name: str) -> tuple[str, str]:
    """The fault of bytes that are not UTF-8 at `place`, and the remedy."""
    for magic, (what, remedy) in _MAGIC.items():
        if raw.startswith(magic):
            return f"{what}, not text", remedy
    line = raw[:place].count(b"\n") + 1
    what = f"not UTF-8: byte 0x{raw[place]:02x} at byte {place} (line {line})"
    if any(byte in _CONTROLS for byte in set(raw)):
        return what, "it contains control characters, so it may not be text at all; give a text file, or repair it"
    read = raw.decode("utf-8", errors="replace")
    if sum(letter > "\x7f" for letter in read) > 3 * read.count("\ufffd"):  # all other non-ASCII characters are UTF-8
        return (
            what,
            f"the rest of it is UTF-8, so repair this line, or remove such bytes: iconv -c -f utf-8 -t utf-8 {name}",
        )
    high = [byte for byte in raw if byte > 127]
    if 4 * len(high) <= len(raw) and not _NOT_IN_CP1252.intersection(high):
        guess, called = ("windows-1252", "Windows-1252") if any(byte < 0xA0 for byte in high) else ("latin1", "Latin-1")
        return what, f"it may be {called}; if so, convert it: iconv -f {guess} -t utf-8 {name}"
    return what, f"convert it from the encoding that it was written in: iconv -f ENCODING -t utf-8 {name}"
