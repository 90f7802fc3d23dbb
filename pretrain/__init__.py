"""One training run: entry point, topology, data stream, engine, schedule, checkpoints, validation and metrics."""
