"""How long the documents of a dataset are: counted from the doc.bin of its blocks, as a table of text or a picture.

Memory holds how often each length occurs, not the documents: distinct lengths are few, since their sum is at most all tokens. A
document's length includes its EOS.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from pretrain.shard_cache import open_reader
from pretrain.shards import Index

PERCENTILES = (1, 10, 50, 90, 99)
BAR = 24  # characters of a bar of the largest share


class Bin(NamedTuple):
    """Documents of [least, 2 * least) tokens."""

    least: int
    documents: int
    tokens: int


class DocumentLengths:
    """Which lengths occur, and how often.

    Attributes:
        lengths: int64 [distinct], rising.
        documents: int64 [distinct], of that length.
    """

    def __init__(self) -> None:
        self.lengths = np.empty(0, np.int64)
        self.documents = np.empty(0, np.int64)

    def add(self, lengths: np.ndarray) -> None:
        """Counts these documents in."""
        found, documents = np.unique(lengths, return_counts=True)
        merged = np.union1d(self.lengths, found)
        counts = np.zeros(len(merged), np.int64)
        counts[np.searchsorted(merged, self.lengths)] += self.documents
        counts[np.searchsorted(merged, found)] += documents
        self.lengths, self.documents = merged, counts

    @property
    def count(self) -> int:
        return int(self.documents.sum())

    @property
    def tokens(self) -> int:
        return int(self.lengths @ self.documents)

    def percentile(self, percent: float) -> int:
        """The smallest length that at least so many percent of the documents do not exceed."""
        wanted = np.ceil(percent / 100 * self.count)
        return int(self.lengths[np.searchsorted(np.cumsum(self.documents), wanted)])

    def longer_than(self, length: int) -> tuple[int, int]:
        """How many documents are, and how many tokens they have."""
        longer = self.lengths > length
        return int(self.documents[longer].sum()), int(self.lengths[longer] @ self.documents[longer])

    def bins(self) -> list[Bin]:
        """By powers of two, from the shortest document's bin to the longest's."""
        powers = np.frexp(self.lengths)[1] - 1  # floor of log2, exact
        return [
            Bin(1 << power, int(self.documents[powers == power].sum()), int((self.lengths * self.documents)[powers == power].sum()))
            for power in range(int(powers[0]), int(powers[-1]) + 1)
        ]


def count_lengths(index: Index, split: str) -> DocumentLengths:
    """The documents of a split, which need not be empty, with a bar on a terminal. A remote dataset's shards come through its cache.

    Raises:
        DatasetError: from the reads.
        ValueError: the split has no documents.
    """
    shards = index.splits[split].shards
    if not shards:
        raise ValueError(f"the {split} split of {index.directory} has no documents")
    reader = open_reader(index, split, max_open_shards=1)
    found = DocumentLengths()
    total = sum(shard.documents for shard in shards)
    with tqdm(total=total, unit=" documents", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for number, shard in enumerate(shards):
            blocks = []
            for block in range(shard.blocks):
                ends = reader.document_ends(number, block)
                blocks.append(np.diff(ends, prepend=0))
                bar.update(len(ends))
            found.add(np.concatenate(blocks))
    return found


def describe(found: DocumentLengths, sequence_length: int | None) -> list[str]:
    """For a terminal."""
    documents, tokens = found.count, found.tokens
    rows = {"documents": f"{documents:,}", "tokens": f"{tokens:,}", "mean": f"{tokens / documents:,.1f}"}
    rows |= {"median" if percent == 50 else f"p{percent}": f"{found.percentile(percent):,}" for percent in PERCENTILES}
    rows["longest"] = f"{found.lengths[-1]:,}"
    lines = [f"  {name:10}{value:>20}" for name, value in rows.items()]
    if sequence_length is not None:
        longer, their_tokens = found.longer_than(sequence_length)
        lines.append(
            f"  {longer / documents:.2%} of the documents are longer than {sequence_length:,} tokens, and have "
            f"{their_tokens / tokens:.2%} of the tokens"
        )
    return [*lines, "", *_histogram(found.bins(), documents, tokens)]


def _histogram(bins: Sequence[Bin], documents: int, tokens: int) -> list[str]:
    largest = max(max(b.documents / documents, b.tokens / tokens) for b in bins)

    def bar(share: float) -> str:
        return f"{share:7.2%}  {'#' * max(round(BAR * share / largest), share > 0):{BAR}}"

    lines = [f"  {'tokens a document':>27}  {'documents':>15} {'share':>7}  {'':{BAR}} {'of tokens':>9}"]
    for b in bins:
        lengths = f"{b.least:,} to {2 * b.least - 1:,}"
        lines.append(f"  {lengths:>27}  {b.documents:15,} {bar(b.documents / documents)}   {bar(b.tokens / tokens)}".rstrip())
    return lines


def require_plot(path: Path) -> None:
    """Before a long count.

    Raises:
        ValueError: matplotlib is not installed, or could not write that file.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install -e '.[dev]'") from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"--plot {path}: the name must end as one of {', '.join(f'.{kind}' for kind in sorted(kinds))}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no directory {path.absolute().parent}")


def plot(found: DocumentLengths, path: Path, title: str, sequence_length: int | None) -> None:
    """Draws the shares of documents and of tokens over the length."""
    from matplotlib.figure import Figure

    bins = found.bins()
    powers = np.array([b.least.bit_length() - 1 for b in bins])
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.bar(powers + 0.3, [b.documents / found.count * 100 for b in bins], width=0.4, label=f"of {found.count:,} documents")
    axes.bar(powers + 0.7, [b.tokens / found.tokens * 100 for b in bins], width=0.4, label=f"of {found.tokens:,} tokens")
    if sequence_length is not None:
        axes.axvline(np.log2(sequence_length), color="black", linestyle="--", label=f"sequence length {sequence_length:,}")
    ticks = [*powers.tolist(), int(powers[-1]) + 1]
    axes.set_xticks(ticks, [f"{1 << power:,}" for power in ticks], rotation=45, ha="right")
    axes.set(xlabel="tokens a document, EOS included", ylabel="%", title=title)
    axes.legend()
    figure.savefig(path)
