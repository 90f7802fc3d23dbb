"""What tells tokenizers apart: a hash of their files.

Apart from `tokenizer.py`, so that a training rank, which never encodes text, does not load the tokenizer libraries to compare two.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def files_sha256(files: Iterable[Path]) -> str:
    """Hex sha256 of the files' bytes, one after the other: a tokenizer's fingerprint."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
