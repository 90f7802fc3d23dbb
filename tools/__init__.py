"""Commands around a training run: `python tools/NAME.py --help`, for convert_to_hf, generate, prepare_data and verify_shards.

The other files are parts of these: `export_check.py` and `safetensors_stream.py` of convert_to_hf; `shard_writer.py`, `progress.py`,
`workers.py` and `restart.py` of prepare_data and verify_shards; `shard_checks.py` of verify_shards; `dataset_writer.py`, `tasks.py`,
`document_work.py`, `duplicates.py` and `corpus_estimate.py` of prepare_data. `hf/` is the code that an exported model carries.
"""
