"""From bytes of a corpus to text, with what is wrong named by its place. Knows nothing of files and formats."""

import json
from dataclasses import dataclass
from typing import Literal


class CorpusError(Exception):
    """Input that cannot be read as text; the message names the file, the place and a way on."""


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents."""

    text_field: str = "text"  # of JSON objects and of the rows of tables
    invalid_utf8: Literal["error", "replace", "skip"] = "error"  # replace: by U+FFFD; skip: leave the document out
    max_text_bytes: int = 1 << 20  # a longer text file is cut, at line ends, into documents of about this size


_WAY_ON = "convert the file, or pass --invalid-utf8 replace or --invalid-utf8 skip"


def decode(data: bytes, name: str, offset: int, options: ReadOptions, place: str = "") -> str:
    """Text of `data`, which starts at byte `offset` of the (decompressed) file or place; empty for a document to skip."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if options.invalid_utf8 == "error":
            position = offset + error.start
            message = f"{name} is not UTF-8: {place}byte 0x{data[error.start]:02x} at offset {position} ({error.reason})"
            raise CorpusError(f"{message}; {_WAY_ON}") from error
        return "" if options.invalid_utf8 == "skip" else data.decode(errors="replace")


def json_text(data: str, place: str, options: ReadOptions) -> str:
    """The text field of a JSON object; empty for a document to skip.

    Args:
        place: the file and the line or member, for messages.
    """
    try:
        row = json.loads(data)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict) or not isinstance(row.get(options.text_field), str):
        fields = ", ".join(row) if isinstance(row, dict) else f"none: it is a {type(row).__name__}"
        raise CorpusError(f"{place}: no text in the field {options.text_field!r} (fields: {fields}); see --text-field")
    text: str = row[options.text_field]
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no UTF-8 can
        if options.invalid_utf8 == "error":
            message = f"{place}: the escape \\u{ord(text[error.start]):04x} is half a surrogate pair"
            raise CorpusError(f"{message}; {_WAY_ON}") from error
        return "" if options.invalid_utf8 == "skip" else text.encode(errors="surrogatepass").decode(errors="replace")
    return text
