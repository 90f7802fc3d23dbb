"""Texts of WebDataset tars: a sample is the consecutive members of one key, its document the `.txt` member, else the `.json` one's field.

Python's tarfile, like webdataset, takes a damaged header for the end of the archive; here what follows the last member must be the zeros
that end a tar.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple

from tokenizer.corpus import CorpusFile
from tokenizer.decoding import CorpusError, ReadOptions, decode, json_text


class Member(NamedTuple):
    name: str
    data: bytes


@dataclass(frozen=True)
class SamplesChunk:
    """Documents of consecutive samples, each as the member that holds it."""

    name: str
    members: list[Member]
    bytes_read: int

    @property
    def size(self) -> int:
        return sum(len(member.data) for member in self.members)

    def texts(self, options: ReadOptions) -> Iterator[str]:
        for member in self.members:
            text = decode(member.data, self.name, 0, options, f"member {member.name}, ")
            yield json_text(text, f"{self.name}, member {member.name}", options) if member.name.endswith(".json") and text else text


def read_tar(file: CorpusFile, raw: IO[bytes], chunk_bytes: int) -> Iterator[SamplesChunk]:
    members: list[Member] = []
    size = 0
    found = False
    try:
        with tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in _documents(tar):
                found = True
                members.append(member)
                size += len(member.data)
                if size >= chunk_bytes:
                    yield SamplesChunk(file.name, members, tar.offset)
                    members, size = [], 0
            _check_end(file, raw, tar.offset)
    except tarfile.TarError as error:
        raise CorpusError(f"{file.name} cannot be read as a tar: {error}; it is damaged, incomplete or of another kind") from error
    if not found:
        raise CorpusError(f"{file.name} holds no .txt or .json member: it is no tar of text")
    if members:
        yield SamplesChunk(file.name, members, file.size)


def _documents(tar: tarfile.TarFile) -> Iterator[Member]:
    """The member of each sample that holds its text."""
    key: str | None = None
    chosen: Member | None = None
    while (header := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header; the attribute is documented in no stub
        folder, slash, base = header.name.rpartition("/")
        stem, _, ending = base.partition(".")
        if folder + slash + stem != key:
            if chosen:
                yield chosen
            key, chosen = folder + slash + stem, None
        # The ending after the first dot is what webdataset takes; "a.en.txt" is a text too.
        is_text, is_json = (ending == kind or ending.endswith("." + kind) for kind in ("txt", "json"))
        if header.isfile() and (is_text or (is_json and chosen is None)):
            content = tar.extractfile(header)
            assert content is not None
            chosen = Member(header.name, content.read())
    if chosen:
        yield chosen


def _check_end(file: CorpusFile, raw: IO[bytes], offset: int) -> None:
    raw.seek(offset)
    rest = raw.read(1 << 16)
    if not rest:
        raise CorpusError(f"{file.name} ends at byte {offset} without the end mark of a tar: it is incomplete; fetch it again")
    while rest:
        if rest.strip(b"\0"):
            raise CorpusError(f"{file.name}: the tar header at byte {offset} is damaged, or data follows the end mark; fetch it again")
        offset, rest = offset + len(rest), raw.read(1 << 16)
