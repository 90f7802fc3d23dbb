"""What is damaged in one shard, a file here or behind a URL.

Responsible for a shard at a time, in whatever process; not for the dataset around it (`verify_shards.py`). The one fact to know: crc32s
lie in the shard itself, so only its sha256, and in each block its name and its counts, tie it to the index.
"""

import errno
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from pretrain import remote
from pretrain.shards import (
    CHUNK_TOKENS,
    COLUMNS,
    TAR_BLOCK,
    Damage,
    DatasetError,
    Index,
    Shard,
    Split,
    block_identity,
    block_json,
    block_key,
    chunk_crcs,
    shard_file_damage,
    size_damage,
)
from tools.shard_writer import member_header


@dataclass(frozen=True)
class ShardCheck:
    """What another process needs to know to check a shard.

    Attributes:
        mode: quick, block or full; see `verify_shards.py`.
        directory: where the shard lies, or, with `url`, where it may be kept for a while.
        url: of the dataset.
        first_block: number of the shard's first block in its split.
        blocks: uint64 [len(COLUMNS), blocks of the shard].
    """

    mode: str
    directory: Path
    url: str | None
    shard: Shard
    source: str
    itemsize: int
    first_block: int
    blocks: np.ndarray


class Checked(NamedTuple):
    damage: list[Damage]
    bytes_read: int  # of the shard, each counted once


def shard_check(index: Index, split: Split, number: int, mode: str) -> ShardCheck:
    first, end = split.first_block[number : number + 2].tolist()
    blocks = np.stack([split.columns[name][first:end] for name in COLUMNS])
    url = index.cache.url if index.cache else None
    return ShardCheck(mode, index.directory, url, split.shards[number], index.source, index.dtype.itemsize, first, blocks)


def check_shard(check: ShardCheck) -> Checked:
    try:
        return _check_remote(check) if check.url else _check_file(check)
    except OSError as error:
        return Checked([Damage(check.shard.name, f"cannot be read ({error.strerror or error})", "unreadable")], 0)


def _check_file(check: ShardCheck) -> Checked:
    damage = shard_file_damage(check.directory, check.shard)
    if damage or check.mode == "quick":
        return Checked(damage, 0)
    return Checked(content_damage(check), check.shard.bytes)


def _check_remote(check: ShardCheck) -> Checked:
    shard, path = check.shard, check.directory / check.shard.name
    url = f"{check.url}/{shard.name}"
    try:
        size = remote.with_retries(url, lambda: remote.size(url), remote.ATTEMPTS)
        damage = [] if size is None else size_damage(shard, size)
        if damage or check.mode == "quick":
            return Checked(damage, 0)
        remote.with_retries(url, lambda: remote.download(url, path, shard.bytes, shard.sha256), remote.ATTEMPTS)
        return Checked([], shard.bytes)
    except DatasetError as error:
        reason = error.__cause__
        if not isinstance(reason, remote.ContentError):
            kind = "missing" if isinstance(reason, FileNotFoundError) else "unreadable"
            return Checked([Damage(shard.name, str(error), kind)], 0)
        if shard_file_damage(check.directory, shard):  # the server did not say its size
            return Checked([Damage(shard.name, str(error), "size", shard.bytes)], 0)
        return Checked(content_damage(replace(check, mode="full")), shard.bytes)  # names what makes the sha256 differ
    finally:
        path.unlink(missing_ok=True)


def content_damage(check: ShardCheck) -> list[Damage]:
    """Of a shard that lies in its directory and has its right size: its blocks' members, else (not in mode block) the tar around them."""
    with open(check.directory / check.shard.name, "rb") as file:
        damage = [found for block in range(check.shard.blocks) for found in _block_damage(check, block, file)]
        if damage or check.mode == "block":
            return damage
        file.seek(0)
        expected, found = check.shard.sha256, hashlib.file_digest(file, "sha256").hexdigest()
    if found == expected:
        return []
    text = f"sha256 expected {expected}, found {found}: the tar's padding or end is damaged"
    return [Damage(check.shard.name, text, "sha256", expected, found)]


class _Member(NamedTuple):
    """A member of a block, as it is in the tar."""

    name: str
    offset: int  # of its contents
    expected_header: bytes
    header: bytes
    contents: bytes


def _read_block(check: ShardCheck, number: int, file: BinaryIO) -> tuple[dict[str, _Member], bytes]:
    """The members of the shard's block by their endings, and what its JSON should be."""
    row = dict(zip(COLUMNS, check.blocks[:, number].tolist(), strict=True))
    description = block_json(check.source, row["tokens"], row["documents"])
    sizes = {
        "crc.bin": (row["crc_offset"], 4 * (-(-row["tokens"] // CHUNK_TOKENS) + 2)),
        "doc.bin": (row["document_offset"], 4 * row["documents"]),
        "json": (row["json_offset"], len(description)),
        "tok.bin": (row["token_offset"], row["tokens"] * check.itemsize),
    }
    members = {}
    for ending, (offset, size) in sizes.items():
        name = f"{block_key(check.first_block + number)}.{ending}"
        header = _read(file, offset - TAR_BLOCK, TAR_BLOCK)
        members[ending] = _Member(name, offset, member_header(name, size), header, _read(file, offset, size))
    return members, description


def _block_damage(check: ShardCheck, number: int, file: BinaryIO) -> Iterator[Damage]:
    """Of a block: contents against their crc32, name and counts against the index, and (not in mode block) headers against the writer's."""
    members, description = _read_block(check, number, file)
    crcs, documents, json, tokens = (members[ending] for ending in ("crc.bin", "doc.bin", "json", "tok.bin"))

    def damage(member: _Member, text: str, kind: str, expected: str, found: str) -> Damage:
        return Damage(check.shard.name, f"{member.name}{text}", kind, expected, found, check.first_block + number, member.name)

    def crc_damage(member: _Member, text: str, expected: int, found: int) -> Damage:
        text = f"{text}: crc32 expected {expected:08x}, found {found:08x}"
        return damage(member, text, "crc32", f"{expected:08x}", f"{found:08x}")

    checks_headers = check.mode != "block"
    for member in members.values():
        if checks_headers and member.header != member.expected_header:
            text = f": its tar header is damaged (byte {member.offset - TAR_BLOCK} of the file)"
            yield damage(member, text, "header", _described(member.expected_header), _described(member.header))

    *chunks, documents_crc, json_crc = np.frombuffer(crcs.contents, "<u4").tolist()
    found_chunks = chunk_crcs(tokens.contents, check.itemsize)
    bad = [chunk for chunk, found in enumerate(found_chunks) if found != chunks[chunk]]
    if bad:
        place = f" or its crc.bin: {len(bad)} of {len(chunks)} chunks, the first from token {bad[0] * CHUNK_TOKENS}"
        yield crc_damage(tokens, place, chunks[bad[0]], found_chunks[bad[0]])
    for member, expected in ((documents, documents_crc), (json, json_crc)):
        found = zlib.crc32(member.contents)
        if found != expected:
            yield crc_damage(member, "", expected, found)

    wanted, identity = block_identity(json.expected_header, description), block_identity(json.header, json.contents)
    already_named = zlib.crc32(json.contents) != json_crc or (checks_headers and json.header != json.expected_header)
    if identity != wanted and not already_named:
        yield damage(json, f": {identity!r}, but the index's block is {wanted!r}", "identity", repr(wanted), repr(identity))


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise OSError(errno.EIO, "it became shorter while it was read")
    return data


def _described(header: bytes) -> str:
    try:
        member = tarfile.TarInfo.frombuf(header, "ascii", "surrogateescape")
    except tarfile.HeaderError:
        return "no tar header"
    return f"{member.name} of {member.size} bytes"
