"""Texts of a column of Parquet files and of the Arrow files that Hugging Face's `save_to_disk` writes, a slice of rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from tokenizer.corpus import CorpusFile
from tokenizer.decoding import CorpusError, ReadOptions, decode

MAX_ROWS = 4096  # of a slice
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream; its reader takes a file cut between two messages for a complete one


@dataclass(frozen=True)
class RowsChunk:
    """Consecutive rows of a table's text column."""

    name: str
    values: pyarrow.Array  # of binary
    first_row: int
    bytes_read: int

    @property
    def size(self) -> int:
        return int(self.values.nbytes)

    def texts(self, options: ReadOptions) -> Iterator[str]:
        for row, value in enumerate(self.values.to_pylist(), start=self.first_row):
            yield decode(value or b"", self.name, 0, options, f"row {row}, ")


def read_parquet(file: CorpusFile, raw: IO[bytes], options: ReadOptions, chunk_bytes: int) -> Iterator[RowsChunk]:
    """Slices of about `chunk_bytes`, whatever the size of the row groups."""
    with pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=chunk_bytes) as table:
        _check_column(file, table.schema_arrow, options)
        column = next(
            i for i in range(table.metadata.num_columns) if table.metadata.schema.column(i).path.split(".")[0] == options.text_field
        )
        first_row, rows = 1, table.metadata.num_rows
        for group in range(table.num_row_groups):
            described = table.metadata.row_group(group)
            row_bytes = described.column(column).total_uncompressed_size / max(1, described.num_rows)
            batch_size = max(1, min(MAX_ROWS, int(chunk_bytes / max(1.0, row_bytes))))
            for batch in table.iter_batches(batch_size, row_groups=[group], columns=[options.text_field], use_threads=False):
                first_row += batch.num_rows
                yield RowsChunk(file.name, _binary(batch.column(0)), first_row - batch.num_rows, file.size * (first_row - 1) // rows)


def read_arrow(file: CorpusFile, raw: IO[bytes], options: ReadOptions, chunk_bytes: int) -> Iterator[RowsChunk]:
    raw.seek(-len(ARROW_END), 2)
    if raw.read() != ARROW_END:
        raise CorpusError(f"{file.name} does not end as an Arrow table does: it is incomplete or of another kind; fetch or save it again")
    raw.seek(0)
    first_row = 1
    with pyarrow.ipc.open_stream(raw) as table:
        _check_column(file, table.schema, options)
        for batch in table:
            values = batch.column(options.text_field)
            step = max(1, min(MAX_ROWS, chunk_bytes * len(values) // max(1, values.nbytes)))
            for start in range(0, len(values), step):
                part = _binary(values.slice(start, step))
                yield RowsChunk(file.name, part, first_row, raw.tell())
                first_row += len(part)


def _check_column(file: CorpusFile, schema: pyarrow.Schema, options: ReadOptions) -> None:
    if options.text_field not in schema.names:
        raise CorpusError(f"{file.name} has no column {options.text_field!r} (columns: {', '.join(schema.names)}); see --text-field")
    kind = schema.field(options.text_field).type
    value_kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if str(value_kind) not in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
        raise CorpusError(f"{file.name}: the column {options.text_field!r} holds {kind}, not text; see --text-field")


def _binary(values: pyarrow.Array) -> pyarrow.Array:
    """As bytes, in memory of its own size: a slice alone would take the whole batch to another process."""
    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return pyarrow.concat_arrays([values.cast(pyarrow.large_binary())])
