#!/usr/bin/env bash
# GRT-1B on 4 nodes of 8 GPUs. From the repository's root, with .venv installed on a file system that all nodes share, after
# `make ops` on a machine with nvcc (once; without it the gate runs in plain PyTorch):
#   sbatch --partition=P --account=A slurm/grt_1b.sh [--section.key value ...]
# Five minutes before its time is up, and at a preemption, the run saves and the job requeues itself, until all steps are done. Where
# jobs may not be requeued, submit as many as it takes, each of which goes on where the one before stopped; those too many end at once:
#   sbatch --array=1-10%1 --partition=P --account=A slurm/grt_1b.sh
#SBATCH --job-name=grt_1b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

CONFIG=${CONFIG:-configs/grt_1b.yaml}
DS_CONFIG=${DS_CONFIG:-configs/ds_zero3.json}
RUN_DIR=${RUN_DIR:-runs/grt_1b}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
CONTAINER=${CONTAINER:-}           # an image for srun's --container-image (pyxis)
PYTHON=${PYTHON:-.venv/bin/python} # in the container, if there is one
source slurm/job.sh                # and MODULES, MAX_CRASHES

prepare_job
CONTAINED=(${CONTAINER:+--container-image="$CONTAINER" --container-mounts="$PWD:$PWD" --container-workdir="$PWD"})
RUN=(--config "$CONFIG" --ds_config "$DS_CONFIG" --run_dir "$RUN_DIR" --parallel.tensor_parallel "$TENSOR_PARALLEL" "$@")
# What is wrong, with nodes and remedies, before anything is computed. Its exit code 2: starting again would not mend it.
srun --kill-on-bad-exit=0 --wait=180 "${CONTAINED[@]}" "$PYTHON" -u launchers/preflight.py "${RUN[@]}"
code=0
# One task a GPU; pretrain/topology.py reads ranks and addresses from Slurm. Not --kill-on-bad-exit=1: it makes 137 of what the other
# ranks say, and the highest code is srun's. --wait ends ranks that outlive one for a minute.
srun --kill-on-bad-exit=0 --wait=60 --output="$LOG%t" "${CONTAINED[@]}" "$PYTHON" -u pretrain/train.py "${RUN[@]}" || code=$?
after_srun "$code"
