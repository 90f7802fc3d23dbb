#!/usr/bin/env bash
# A sweep, for an example: a run for each learning rate and seed, two at a time, each in a directory of its own, requeued by itself.
#   sbatch slurm/sweep.sh [--section.key value ...]
#SBATCH --job-name=sweep
#SBATCH --array=0-5%2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out
set -euo pipefail

RATES=(1e-3 2e-3 4e-3)
SEEDS=(1 2)
SWEEP_DIR=${SWEEP_DIR:-runs/sweep}

rate=${RATES[SLURM_ARRAY_TASK_ID % ${#RATES[@]}]}
seed=${SEEDS[SLURM_ARRAY_TASK_ID / ${#RATES[@]}]}
export RUN_DIR=$SWEEP_DIR/rate_$rate-seed_$seed
exec slurm/grt_small.sh --schedule.learning_rate "$rate" --seed "$seed" "$@"
