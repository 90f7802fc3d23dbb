"""Checks a dataset against its index, and names each damaged thing on a line.

`quick` looks at the index, the arrays, the tokenizer's copy and every shard's size, as training does at its start. `full` reads every
byte: each shard's sha256 and, to say what is damaged in it, its tar headers and the crc32 of its contents. Exit code 0: nothing
found; 1: damage. A dataset behind a URL is downloaded, shard by shard, and compared with the sha256 of its index; `quick` looks at no
shard of it. Examples:

    python tools/verify_shards.py data/mine
    python tools/verify_shards.py data/mine --mode quick
    python tools/verify_shards.py s3://bucket/mine
"""

import argparse
import hashlib
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from pretrain.remote import is_url
from pretrain.shard_cache import open_remote_dataset
from pretrain.shards import (
    CHUNK_TOKENS,
    COLUMNS,
    DatasetError,
    Index,
    Split,
    chunk_crcs,
    file_damage,
    load_index,
)
from tools.shard_writer import TAR_BLOCK, block_json, block_key, member_header


def full_damage(index: Index) -> Iterator[str]:
    """As `file_damage`, then every byte of every shard that has its size."""
    damaged_files = file_damage(index)
    yield from damaged_files
    shards = [(split, number) for split in index.splits.values() for number in range(len(split.shards))]
    for split, number in tqdm(shards, unit="shard", disable=not sys.stderr.isatty()):
        if not any(line.startswith(f"{split.shards[number].name}:") for line in damaged_files):
            yield from shard_damage(index, split, number)


def url_damage(url: str, mode: str) -> tuple[Index, list[str]]:
    """The index of the dataset at `url` and what is damaged in it; a shard at a time lies on this machine's disk."""
    with tempfile.TemporaryDirectory() as folder:
        index = open_remote_dataset(url, Path(folder), max_bytes=0)
        assert index.cache is not None
        shards = [shard for split in index.splits.values() for shard in split.shards] if mode == "full" else []
        damage = []
        for shard in tqdm(shards, unit="shard", disable=not sys.stderr.isatty()):
            try:
                index.cache.fetch(shard)
            except DatasetError as error:
                damage.append(str(error))
        return index, damage


def shard_damage(index: Index, split: Split, number: int) -> Iterator[str]:
    """Damage of one shard, which has its right size: its blocks' members, else the tar around them."""
    shard = split.shards[number]
    with open(index.directory / shard.name, "rb") as file:
        blocks = range(int(split.first_block[number]), int(split.first_block[number + 1]))
        damage = [line for block in blocks for line in block_damage(index, split, block, file)]
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != shard.sha256 and not damage:
        damage = [f"sha256 expected {shard.sha256}, found {digest}: the tar's padding or end is damaged"]
    yield from (f"{shard.name}: {line}" for line in damage)


def block_damage(index: Index, split: Split, block: int, file: BinaryIO) -> Iterator[str]:
    """Damage of one block: headers against those that the writer makes, contents against their crc32."""
    row = {name: int(split.columns[name][block]) for name in COLUMNS}
    key = block_key(block)
    description = block_json(index.source, row["tokens"], row["documents"])
    members = {  # offset and size
        "crc.bin": (row["crc_offset"], 4 * (-(-row["tokens"] // CHUNK_TOKENS) + 2)),
        "doc.bin": (row["document_offset"], 4 * row["documents"]),
        "json": (row["json_offset"], len(description)),
        "tok.bin": (row["token_offset"], row["tokens"] * index.dtype.itemsize),
    }
    contents = {}
    for ending, (offset, size) in members.items():
        file.seek(offset - TAR_BLOCK)
        if file.read(TAR_BLOCK) != member_header(f"{key}.{ending}", size):
            yield f"{key}.{ending}: its tar header is damaged (byte {offset - TAR_BLOCK} of the file)"
        contents[ending] = file.read(size)

    *chunks, documents_crc, json_crc = np.frombuffer(contents["crc.bin"], "<u4").tolist()
    found_chunks = chunk_crcs(contents["tok.bin"], index.dtype.itemsize)
    bad = [number for number, found in enumerate(found_chunks) if found != chunks[number]]
    if bad:
        place = f"{len(bad)} of {len(chunks)} chunks, the first from token {bad[0] * CHUNK_TOKENS}"
        yield f"{key}.tok.bin or its crc.bin: {place}: {crc_mismatch(chunks[bad[0]], found_chunks[bad[0]])}"
    for ending, expected in (("doc.bin", documents_crc), ("json", json_crc)):
        found = zlib.crc32(contents[ending])
        if found != expected:
            yield f"{key}.{ending}: {crc_mismatch(expected, found)}"


def crc_mismatch(expected: int, found: int) -> str:
    return f"crc32 expected {expected:08x}, found {found:08x}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a directory that prepare_data.py wrote, or its URL")
    parser.add_argument("--mode", choices=["quick", "full"], default="full", help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        if is_url(args.dataset):
            index, damage = url_damage(args.dataset, args.mode)
        else:
            index = load_index(Path(args.dataset))
            damage = file_damage(index) if args.mode == "quick" else list(full_damage(index))
    except (DatasetError, OSError) as error:
        damage = [str(error)]
    for line in damage:
        print(line)
    if not damage:
        shards = sum(len(split.shards) for split in index.splits.values())
        print(f"{args.dataset}: no damage found in {shards} shards ({args.mode})")
    return 1 if damage else 0


if __name__ == "__main__":
    sys.exit(main())
