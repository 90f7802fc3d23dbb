#!/usr/bin/env bash
# A small GRT on two nodes' CPUs, in a minute, by default on the data of `make demo`. It needs no cluster:
#   launchers/local_slurm.sh start    # and the `export SLURM_CONF` that it prints
#   sbatch slurm/grt_small.sh [--section.key value ...]
#   DATA=data/mine RUN_DIR=runs/mine sbatch slurm/grt_small.sh --model.vocab_size 32000
# To see it preempted and go on: scancel --signal=USR1 JOB
#SBATCH --job-name=grt_small
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

CONFIG=${CONFIG:-configs/demo.yaml}
DS_CONFIG=${DS_CONFIG:-configs/ds_zero3.json}
DATA=${DATA:-runs/demo/data}
RUN_DIR=${RUN_DIR:-runs/grt_small}
TOKENS=${TOKENS:-204800} # 100 steps
PYTHON=${PYTHON:-.venv/bin/python}
source slurm/job.sh # and MODULES, MAX_CRASHES

prepare_job
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
code=0
srun --kill-on-bad-exit=0 --wait=60 --output="$LOG%t" \
  "$PYTHON" -u pretrain/train.py --config "$CONFIG" --ds_config "$DS_CONFIG" --run_dir "$RUN_DIR" \
  --data.path "$DATA" --schedule.total_tokens "$TOKENS" "$@" || code=$?
after_srun "$code"
