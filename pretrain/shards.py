"""A dataset directory: its index, cheap checks at start-up, and token reads that are checked as they are made.

`index.json` describes the WebDataset tars beside it; a sample of a tar is a block of whole documents, in members `blk000000.crc.bin`,
`.doc.bin`, `.json` and `.tok.bin`. Tars are read by offset, never as tars: a reader checks that a shard begins with the block that the
index names, a read verifies the crc32 of the 4,096-token chunks it touches, and nothing else is looked at. How shards are made is
`tools/prepare_data.py`; which tokens are read when is `pretrain/order.py`; how remote shards come to this node is
`pretrain/shard_cache.py`.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32  # zlib's, ten times as fast

from tokenizer.fingerprint import files_sha256

if TYPE_CHECKING:
    from pretrain.shard_cache import ShardCache

FORMAT = "grt-shards"
VERSION = 1
CHUNK_TOKENS = 4096  # tokens under one crc32
SPLITS = ("train", "validation")
TOKENIZER_FOLDER = "tokenizer"
TAR_BLOCK = 512  # a tar's headers and contents start at multiples of it
TAR_NAME = 100  # bytes of a header that hold the name
# One row a block: sizes, and the byte offsets of its members' contents in the shard. crc.bin holds one uint32 for each chunk of tok.bin,
# then one for doc.bin and one for the JSON. doc.bin holds the end of each document in the block, as uint32 counts of tokens.
COLUMNS = ("tokens", "documents", "crc_offset", "document_offset", "json_offset", "token_offset")


class DatasetError(Exception):
    """A dataset that is missing, damaged or of another kind; the message names the file and the remedy."""


class DamageError(DatasetError):
    """What the dataset holds is not what the index says."""


class Damage(NamedTuple):
    """One thing that is not as the index says, or could not be looked at. Its `str` is a line for a person."""

    shard: str | None  # None for the kinds index and tokenizer
    text: str
    # index, tokenizer, missing, size, header (of a tar's member), identity (another block), crc32, sha256 or, if unknown, unreadable
    kind: str
    expected: str | int | None = None
    found: str | int | None = None
    block: int | None = None  # in the split
    member: str | None = None  # of the tar

    def __str__(self) -> str:
        return f"{self.shard or self.kind}: {self.text}"


def canonical_json(value: Any) -> bytes:
    """The one spelling of `value` in this format: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def index_json(content: dict[str, Any]) -> bytes:
    """The bytes of `index.json`: `content`, with a hash of itself so that damage shows."""
    return canonical_json({**content, "content_sha256": hashlib.sha256(canonical_json(content)).hexdigest()})


@dataclass(frozen=True)
class Shard:
    name: str
    bytes: int
    sha256: str
    tokens: int
    documents: int
    blocks: int


class Split:
    """The shards of one split and the columns of their blocks.

    Attributes:
        shards: in order.
        columns: uint64 [blocks], one array for each of COLUMNS.
        first_block: int64 [shards + 1], where each shard's blocks begin in the columns.
    """

    def __init__(self, shards: list[Shard], table: np.ndarray) -> None:
        self.shards = shards
        self.columns = dict(zip(COLUMNS, table, strict=True))
        self.first_block = np.cumsum([0] + [shard.blocks for shard in shards])

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True)
class Index:
    """What `index.json` and the arrays beside it say. `fingerprint` is the sha256 of index.json, which covers everything else."""

    directory: Path
    fingerprint: str
    source: str
    dtype: np.dtype
    vocab_size: int
    eos_id: int
    tokenizer_fingerprint: str
    tokenizer_files: list[str]  # in TOKENIZER_FOLDER
    splits: dict[str, Split]
    cache: "ShardCache | None" = None  # through which the shards of a remote dataset come; `directory` is then its folder there

    def token_count(self, split: str) -> int:
        return self.splits[split].tokens


def columns_file(split: str) -> str:
    """Name of a split's block columns: little-endian uint64 of shape [len(COLUMNS), blocks]."""
    return f"{split}.blocks.bin"


def block_key(number: int) -> str:
    """WebDataset's key of a split's block: the start of its members' names."""
    return f"blk{number:06d}"


def block_json(source: str, tokens: int, documents: int) -> bytes:
    return canonical_json({"documents": documents, "source": source, "tokens": tokens})


def block_identity(header: bytes, description: bytes) -> bytes:
    """Of the tar header and the contents of a block's JSON: its name and the JSON. No other block of the split has the same."""
    return header[:TAR_NAME].rstrip(b"\0") + description


def chunk_crcs(tokens: bytes, itemsize: int) -> list[int]:
    """crc32 of each 4,096-token chunk of a token payload."""
    step = CHUNK_TOKENS * itemsize
    view = memoryview(tokens)
    return [crc32(view[start : start + step]) for start in range(0, len(view), step)]


def open_dataset(path: Path) -> Index:
    """Loads the index of a dataset directory and makes the checks that need not read the shards.

    Raises:
        DatasetError: no dataset, another format version, or a file that is missing or differs from the index.
    """
    index = load_index(path)
    damage = file_damage(index)
    if damage:
        more = f" (and {len(damage) - 1} more; see tools/verify_shards.py)" if len(damage) > 1 else ""
        raise DatasetError(f"dataset {path}: {damage[0]}{more}; restore the file, or make the dataset again with tools/prepare_data.py")
    return index


def load_index(path: Path) -> Index:
    """The index alone: neither shards nor tokenizer are looked at.

    Raises:
        DatasetError: it is missing, damaged, or of another version.
    """
    path = Path(path)
    try:
        data = (path / "index.json").read_bytes()
    except OSError as error:
        message = f"no dataset in {path}: index.json cannot be read ({error.strerror}); make one with tools/prepare_data.py"
        raise DatasetError(message) from error
    content = index_content(data, str(path))
    try:
        return Index(
            directory=path,
            fingerprint=hashlib.sha256(data).hexdigest(),
            source=content["source"],
            dtype=np.dtype({"uint16": "<u2", "uint32": "<u4"}[content["dtype"]]),
            vocab_size=content["vocab_size"],
            eos_id=content["eos_id"],
            tokenizer_fingerprint=content["tokenizer_sha256"],
            tokenizer_files=content["tokenizer_files"],
            splits={split: _load_split(path, split, content["splits"][split]) for split in SPLITS},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(f"{path}/index.json is damaged ({error!r}); restore it, or make the dataset again") from error


def index_content(data: bytes, place: str) -> dict[str, Any]:
    """What the bytes of an index.json in `place` say, checked against their hash.

    Raises:
        DatasetError: damaged, or of another version.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            found = f"{content['format']} version {content['version']}"
            raise DatasetError(f"{place}/index.json is of {found}, this code reads {FORMAT} version {VERSION}; make the dataset again")
        claimed = content.pop("content_sha256")
        if data != index_json(content):
            raise ValueError(f"its contents do not match their sha256 {claimed}")
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(f"{place}/index.json is damaged ({error!r}); restore it, or make the dataset again") from error
    return content


def _load_split(path: Path, name: str, content: dict[str, Any]) -> Split:
    shards = [Shard(**shard) for shard in content["shards"]]
    file = path / columns_file(name)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DatasetError(f"{file} cannot be read ({error.strerror}); restore it, or make the dataset again") from error
    found = hashlib.sha256(data).hexdigest()
    if found != content["columns_sha256"]:
        raise DamageError(f"{file} is damaged: sha256 expected {content['columns_sha256']}, found {found}; restore it")
    table = np.frombuffer(data, "<u8").reshape(len(COLUMNS), sum(shard.blocks for shard in shards))
    return Split(shards, table)


def file_damage(index: Index) -> list[Damage]:
    """Of each file whose presence, size or (for the tokenizer's copy) hash differs from the index."""
    shards = [shard for split in index.splits.values() for shard in split.shards]
    return [damage for shard in shards for damage in shard_file_damage(index.directory, shard)] + tokenizer_damage(index)


def shard_file_damage(directory: Path, shard: Shard) -> list[Damage]:
    """What can be said of a shard without reading it: one thing at most."""
    try:
        size = (directory / shard.name).stat().st_size
    except OSError as error:
        kind = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
        return [Damage(shard.name, f"cannot be read ({error.strerror})", kind)]
    return size_damage(shard, size)


def size_damage(shard: Shard, size: int) -> list[Damage]:
    if size == shard.bytes:
        return []
    return [Damage(shard.name, f"{size} bytes, the index says {shard.bytes}", "size", shard.bytes, size)]


def tokenizer_damage(index: Index) -> list[Damage]:
    """One thing if the tokenizer's copy is not the one that the index names."""
    try:
        found = files_sha256(index.directory / TOKENIZER_FOLDER / name for name in index.tokenizer_files)
    except OSError as error:
        return [Damage(None, f"the tokenizer's copy cannot be read ({error.strerror})", "tokenizer", index.tokenizer_fingerprint)]
    if found != index.tokenizer_fingerprint:
        text = f"sha256 expected {index.tokenizer_fingerprint}, found {found}"
        return [Damage(None, text, "tokenizer", index.tokenizer_fingerprint, found)]
    return []


def _match(data: bytes, step: int, crcs: memoryview, chunk: int) -> bool:
    """Whether pieces of `step` bytes have the crc32 that `crcs` holds from number `chunk` on."""
    if len(data) <= step:
        return crc32(data) == crcs[chunk]
    view = memoryview(data)
    for begin in range(0, len(data), step):
        if crc32(view[begin : begin + step]) != crcs[chunk]:
            return False
        chunk += 1
    return True


class _Layout(NamedTuple):
    """Where an open shard's blocks lie: plain numbers, since NumPy's scalars would take longer than the reads."""

    begins: list[int]  # each block's first token in the shard's stream, and the end of the last
    token_offsets: list[int]
    crc_offsets: list[int]
    crcs: dict[int, memoryview]  # block -> the uint32 of its tok.bin's chunks, once read: 1 KiB a million tokens


class TokenReader:
    """Reads ranges of a shard's token stream: its blocks' tokens one after the other. Opens shards when they are first read."""

    max_open_shards = 64

    def __init__(self, index: Index, split: str) -> None:
        self._directory, self._source = index.directory, index.source
        self._dtype, self._itemsize = index.dtype, index.dtype.itemsize
        self._split = index.splits[split]
        self._open_files: OrderedDict[int, int] = OrderedDict()  # shard -> file descriptor, the last used last
        self._layouts: dict[int, _Layout] = {}

    def read(self, shard: int, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the shard's stream, [count] of the dataset's dtype.

        Raises:
            DatasetError: the file is missing or short, or a chunk does not match its crc32; names shard, block, expected and found.
        """
        layout = self._layouts.get(shard) or self._describe(shard)
        begins = layout.begins
        block, end = bisect_right(begins, start) - 1, start + count
        if end <= begins[block + 1]:
            return self._read_block(shard, layout, block, start - begins[block], end - begins[block])
        pieces = []
        while start < end:
            stop = min(end, begins[block + 1])
            pieces.append(self._read_block(shard, layout, block, start - begins[block], stop - begins[block]))
            start, block = stop, block + 1
        return np.concatenate(pieces)

    def _describe(self, shard: int) -> _Layout:
        first, end = self._split.first_block[shard : shard + 2].tolist()
        tokens, token_offsets, crc_offsets = (
            self._split.columns[name][first:end].tolist() for name in ("tokens", "token_offset", "crc_offset")
        )
        layout = _Layout(list(accumulate(tokens, initial=0)), token_offsets, crc_offsets, {})
        if len(self._layouts) >= self.max_open_shards:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[shard] = layout
        return layout

    def _read_block(self, shard: int, layout: _Layout, block: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a block, numbered from the shard's first, out of chunks read and checked whole."""
        itemsize = self._itemsize
        first_chunk = start // CHUNK_TOKENS
        chunk_start = first_chunk * CHUNK_TOKENS
        chunk_stop = min(-(-stop // CHUNK_TOKENS) * CHUNK_TOKENS, layout.begins[block + 1] - layout.begins[block])
        data = self._pread(shard, layout.token_offsets[block] + chunk_start * itemsize, (chunk_stop - chunk_start) * itemsize)
        crcs = layout.crcs.get(block) or self._read_crcs(shard, layout, block)
        if not _match(data, CHUNK_TOKENS * itemsize, crcs, first_chunk):
            crcs = self._read_crcs(shard, layout, block)  # those kept may be of a damaged copy that was replaced since
            if not _match(data, CHUNK_TOKENS * itemsize, crcs, first_chunk):
                raise DamageError(self._damage(shard, block, first_chunk, crcs, chunk_crcs(data, itemsize)))
        return np.frombuffer(data, self._dtype, stop - start, (start - chunk_start) * itemsize)

    def _read_crcs(self, shard: int, layout: _Layout, block: int) -> memoryview:
        chunks = -(-(layout.begins[block + 1] - layout.begins[block]) // CHUNK_TOKENS)
        layout.crcs[block] = np.frombuffer(self._pread(shard, layout.crc_offsets[block], 4 * chunks), "<u4").astype(np.uint32).data
        return layout.crcs[block]

    def _damage(self, shard: int, block: int, first_chunk: int, crcs: memoryview, found: list[int]) -> str:
        """Names the first chunk from `first_chunk` on whose crc32 is not the expected one."""
        expected = crcs[first_chunk : first_chunk + len(found)].tolist()
        bad = next(number for number in range(len(found)) if found[number] != expected[number])
        return (
            f"{self._path(shard)}: block {block}, tokens from {(first_chunk + bad) * CHUNK_TOKENS}: crc32 expected {expected[bad]:08x}, "
            f"found {found[bad]:08x}; the file is damaged: restore it, or make the dataset again with tools/prepare_data.py"
        )

    def _path(self, shard: int) -> str:
        return f"{self._directory}/{self._split.shards[shard].name}"

    def document_ends(self, shard: int, block: int) -> np.ndarray:
        """Where the documents of a shard's block end, in tokens from the block's first: int64 [documents].

        Raises:
            DatasetError: the file is missing or short, or doc.bin does not match its crc32; names shard, block, expected and found.
        """
        number = int(self._split.first_block[shard]) + block
        row = {name: int(column[number]) for name, column in self._split.columns.items()}
        ends = self._pread(shard, row["document_offset"], 4 * row["documents"])
        chunks = -(-row["tokens"] // CHUNK_TOKENS)
        expected = int.from_bytes(self._pread(shard, row["crc_offset"] + 4 * chunks, 4), "little")
        found = crc32(ends)
        if found != expected:
            raise DamageError(
                f"{self._path(shard)}: block {block}, doc.bin: crc32 expected {expected:08x}, found {found:08x}; "
                "the file is damaged: restore it, or make the dataset again with tools/prepare_data.py"
            )
        return np.frombuffer(ends, "<u4").astype(np.int64)

    def _pread(self, shard: int, offset: int, count: int) -> bytes:
        try:
            data = os.pread(self._descriptor(shard), count, offset)
        except OSError as error:
            raise DatasetError(f"{self._path(shard)} cannot be read at byte {offset}: {error.strerror}") from error
        if len(data) != count:
            raise DamageError(f"{self._path(shard)} ends before byte {offset + count}: it was cut after training began; restore it")
        return data

    def _descriptor(self, shard: int) -> int:
        descriptor = self._open_files.get(shard)
        if descriptor is None:
            descriptor = self._open_files[shard] = self._open(shard)
            if len(self._open_files) > self.max_open_shards:
                os.close(self._open_files.popitem(last=False)[1])
        self._open_files.move_to_end(shard)
        return descriptor

    def _open(self, shard: int) -> int:
        descriptor = os.open(self._path(shard), os.O_RDONLY)
        try:
            self._check_identity(shard, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_identity(self, shard: int, descriptor: int) -> None:
        """Another shard under this name can have the right size, and its tokens match the crc32s that it brings along."""
        block = int(self._split.first_block[shard])
        row = {name: int(column[block]) for name, column in self._split.columns.items()}
        description = block_json(self._source, row["tokens"], row["documents"])
        expected = block_identity(f"{block_key(block)}.json".encode(), description)
        data = os.pread(descriptor, TAR_BLOCK + len(description), row["json_offset"] - TAR_BLOCK)
        found = block_identity(data[:TAR_BLOCK], data[TAR_BLOCK:])
        if found != expected:
            raise DamageError(
                f"{self._path(shard)}: begins with {found!r}, not with {expected!r}: another shard's file, or damaged; restore it, or "
                "make the dataset again with tools/prepare_data.py"
            )

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open_files", {}).values():
            os.close(descriptor)
