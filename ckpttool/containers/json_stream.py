"""JSON that is read in passing: one small value at a time, whatever the size of the file.

A program of 100 MB would take a gigabyte as Python objects. Values are still decoded by the standard library's
scanner; what is done here is to keep the file's text coming, and to step into the containers that are too large to be
decoded whole.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from math import isinf
from typing import Any, BinaryIO, NoReturn

CHUNK = 1 << 20
"""Bytes read at a time, and the least text that lies ahead of a value before it is decoded (unless the file ends)."""
LARGEST = 1 << 28
"""Characters of a single value that is decoded whole."""
_NEAR = 16
"""Characters before the end of the text within which an error may only mean that more is to come (`tru`, `\\ud8`)."""
_SPACE = " \t\n\r"
_SURROGATES = ("\\ud", "\\uD")


class JsonError(ValueError):
    """The text is not JSON; says what is wrong and at which byte."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(f"{what} (byte {at:,})")
        self.what = what
        self.at = at


class _NumberError(ValueError):
    """NaN, Infinity or a number that fits no double: Python reads them, and stricter readers (Paddle's) do not."""


def _constant(name: str) -> NoReturn:
    raise _NumberError(f"`{name}` is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise _NumberError(f"`{text}` is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_constant, parse_float=_float)


class JsonStream:
    """A cursor in a JSON text. Every method raises JsonError where the text is not JSON."""

    def __init__(self, f: BinaryIO, chunk: int = CHUNK) -> None:
        self._file = f
        self._chunk = chunk
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._scan = _DECODER.raw_decode
        self._text = ""
        self._pos = 0
        self._base = 0
        """Byte of the file at which ``_text`` begins."""
        self._ended = False
        self._value: Any = None
        self._unbatched: str | None = None
        """A text in which values are taken one by one."""
        self._more(1)
        if self._text.startswith("\ufeff"):  # which JSON forbids and Paddle skips
            self._pos = 1

    def fail(self, what: str) -> NoReturn:
        """Raise JsonError for what is at the cursor."""
        raise JsonError(what, self._byte(self._pos))

    def _byte(self, pos: int) -> int:
        text = self._text[:pos]
        return self._base + (pos if text.isascii() else len(text.encode()))

    def _more(self, least: int) -> None:
        """Have at least ``least`` characters from the cursor on, unless the file ends."""
        parts = [self._text[self._pos :]]
        self._base = self._byte(self._pos)
        have = len(parts[0])
        while have < least and not self._ended:
            data = self._file.read(self._chunk)
            self._ended = not data
            before = self._base + sum(len(p.encode()) for p in parts)
            try:
                parts.append(self._utf8.decode(data, final=self._ended))
            except UnicodeDecodeError as e:
                raise JsonError("the text is not UTF-8", before + e.start) from None
            have += len(parts[-1])
        self._text = "".join(parts)
        self._pos = 0

    def _peek(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            text, pos, end = self._text, self._pos, len(self._text)
            while pos < end and text[pos] in _SPACE:
                pos += 1
            self._pos = pos
            if pos < end:
                return text[pos]
            if self._ended:
                return ""
            self._more(self._chunk)

    def _take(self, wanted: str) -> None:
        c = self._peek()
        if c != wanted:
            self.fail(f"`{wanted}` expected, found {f'`{c}`' if c else 'the end of the file'}")
        self._pos += 1

    def starts(self, character: str) -> bool:
        """Whether the next value is an object (``{``), an array (``[``), a string (``"``)."""
        return self._peek() == character

    # -- values

    def ahead(self) -> tuple[Any] | None:
        """The next value, when it is near; None when it is too long to be looked at whole."""
        self._ahead()
        return (self._value,) if self._decode() else None

    def value(self) -> Any:
        """The next value, however long."""
        self._peek()
        least = self._chunk
        while not self._decode():
            least *= 2
            if least > LARGEST:
                self.fail(f"a single value is longer than {LARGEST >> 20} MiB")
            self._more(least)
        return self._value

    def _ahead(self) -> None:
        """Go to the next value, with enough text after it."""
        self._peek()
        if len(self._text) - self._pos < self._chunk // 2 and not self._ended:
            self._more(self._chunk)

    def _decode(self) -> bool:
        """Decode the value at the cursor into ``_value``. False when its end may not be in the text yet."""
        try:
            value, end = self._scan(self._text, self._pos)
        except json.JSONDecodeError as e:
            if not self._ended and (e.msg.startswith("Unterminated string") or e.pos >= len(self._text) - _NEAR):
                return False
            raise JsonError(self._reason(e), self._byte(e.pos)) from None
        except _NumberError as e:
            self.fail(str(e))
        except RecursionError:
            self.fail("the value is nested too deeply")
        except ValueError:  # an integer of more digits than Python converts
            self.fail("a number is too long")
        if end > len(self._text) - _NEAR and not self._ended:
            return False  # a number may go on, also behind `0.` and `1e+`
        self._check_text(value, self._pos, end)
        self._pos = end
        self._value = value
        return True

    def _reason(self, e: json.JSONDecodeError) -> str:
        if self._ended and e.pos >= len(self._text.rstrip(_SPACE)):
            return "the file ends within a value"
        if e.msg.startswith("Unterminated string"):
            return "a text that begins here has no end"
        return e.msg[:1].lower() + e.msg[1:]

    def _check_text(self, value: Any, start: int, end: int) -> None:
        """Half characters, which Python reads and stricter readers do not."""
        if any(self._text.find(mark, start, end) >= 0 for mark in _SURROGATES):
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                self.fail("a text holds half a character, a lone surrogate")

    # -- containers that are stepped into

    def names(self) -> Iterator[str]:
        """The names of an object. After each of them its value must be consumed."""
        self._take("{")
        if self._peek() == "}":
            self._pos += 1
            return
        while True:
            if self._peek() != '"':
                self.fail("a name in quotes is expected")
            name = self.value()
            self._take(":")
            yield name
            if self._peek() == "}":
                self._pos += 1
                return
            self._take(",")

    def items(self) -> Iterator[int]:
        """Numbers of the values of an array. After each of them the value must be consumed."""
        self._take("[")
        if self._peek() == "]":
            self._pos += 1
            return
        number = 0
        while True:
            yield number
            number += 1
            if self._peek() == "]":
                self._pos += 1
                return
            self._take(",")

    def batches(self) -> Iterator[list[Any]]:
        """The values of an array that may be long, many at a time."""
        self._take("[")
        if self._peek() == "]":
            self._pos += 1
            return
        while True:
            found = self._batch()
            if found:
                yield found
                continue
            yield [self.value()]
            if self._peek() == "]":
                self._pos += 1
                return
            self._take(",")

    def _batch(self) -> list[Any]:
        """Values up to a comma far ahead; none when the text up to there is not a part of the array."""
        self._ahead()
        start = self._pos
        if self._text is self._unbatched:
            return []
        cut = self._text.rfind("},", start) + 1 if self._peek() == "{" else self._text.rfind(",", start)
        try:
            found: list[Any] = _DECODER.decode(f"[{self._text[start:cut]}]") if cut > start else []
        except (ValueError, RecursionError):
            found = []
        if found:
            self._check_text(found, start, cut)
            self._pos = cut + 1
        else:  # the array ends in this text, or is wrong: one by one will tell
            self._unbatched = self._text
        return found

    def end(self) -> None:
        """There is nothing more."""
        if self._peek():
            self.fail("there is more after the end of the JSON value")
