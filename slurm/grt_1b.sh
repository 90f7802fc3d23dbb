#!/usr/bin/env bash
# GRT-1B on 4 nodes of 8 GPUs. From the repository's root, with .venv installed on a file system that all nodes share, after
# `make ops` on a machine with nvcc (once; without it the gate runs in plain PyTorch):
#   sbatch --partition=P --account=A slurm/grt_1b.sh [--section.key value ...]
# The same command resumes from the newest complete checkpoint, as a requeued job does. A run longer than the time limit is
# submitted several times with --dependency=singleton: jobs of one name then wait for one another.
#SBATCH --job-name=grt_1b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

CONFIG=${CONFIG:-configs/grt_1b.yaml}
DS_CONFIG=${DS_CONFIG:-configs/ds_zero3.json}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
PYTHON=${PYTHON:-.venv/bin/python}
NODE_LOCAL=${SLURM_TMPDIR:-/tmp}/grt-$(id -un) # build caches: their locks hang on network file systems

ulimit -l unlimited 2> /dev/null || true # InfiniBand registers memory
ulimit -n "$(ulimit -Hn)"                # with the usual 1024 open files NCCL cannot connect 4 nodes
ulimit -c 0
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it from sbatch
export OMP_NUM_THREADS=$SRUN_CPUS_PER_TASK
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 PYTHONFAULTHANDLER=1
export TORCH_EXTENSIONS_DIR=$NODE_LOCAL/torch_extensions TRITON_CACHE_DIR=$NODE_LOCAL/triton

# One task a GPU; pretrain/topology.py reads ranks and addresses from Slurm.
srun --wait=60 --kill-on-bad-exit=1 --label "$PYTHON" -u pretrain/train.py --config "$CONFIG" --ds_config "$DS_CONFIG" \
  --parallel.tensor_parallel "$TENSOR_PARALLEL" "$@"
