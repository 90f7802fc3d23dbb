#!/usr/bin/env bash
# Exports a run's newest checkpoint to Hugging Face's format, on one node without a GPU. To have it follow a run, which it waits for
# through all requeues:
#   sbatch --dependency=afterok:JOB --partition=P --account=A slurm/convert.sh [--dtype bf16 ...]
#SBATCH --job-name=convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

RUN_DIR=${RUN_DIR:-runs/grt_1b}
OUTPUT=${OUTPUT:-exported/$(basename "$RUN_DIR")}
PYTHON=${PYTHON:-.venv/bin/python}
source slurm/job.sh # and MODULES

load_modules
CHECKPOINT=$RUN_DIR/checkpoints/$(cat "$RUN_DIR/checkpoints/latest")
srun "$PYTHON" -u tools/convert_to_hf.py "$CHECKPOINT" --output "$OUTPUT" "$@"
