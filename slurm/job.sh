# shellcheck shell=bash
# Sourced by the jobs beside it, for what comes before and after their one srun: `prepare_job` sets modules, limits and caches,
# `after_srun CODE` starts the job again or says why not. RUN_DIR is the job's own.

MODULES=${MODULES:-}          # environment modules to load, as "cuda/12.8 nccl"
MAX_CRASHES=${MAX_CRASHES:-3} # after so many of one job without a new checkpoint between them, the next is its last

load_modules() {
  [[ -n $MODULES ]] || return 0
  set +u # the function `module` reads variables that are not set
  # shellcheck disable=SC2086 # they are several
  module load $MODULES
  set -u
}

prepare_job() {
  load_modules
  ulimit -l unlimited 2> /dev/null || true # InfiniBand registers memory
  ulimit -n "$(ulimit -Hn)"                # with the usual 1024 open files NCCL cannot connect 4 nodes
  ulimit -c 0
  export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it from sbatch
  export OMP_NUM_THREADS=$SRUN_CPUS_PER_TASK
  export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 PYTHONFAULTHANDLER=1
  local node_local
  node_local=${SLURM_TMPDIR:-/tmp}/grt-$(id -un) # build caches: their locks hang on network file systems
  export TORCH_EXTENSIONS_DIR=$node_local/torch_extensions TRITON_CACHE_DIR=$node_local/triton
  LOG=$RUN_DIR/logs/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.rank # of each rank and start; srun adds the rank
  mkdir -p "$RUN_DIR/logs"
  say "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST; rank 0 writes to ${LOG}0"
}

# The codes are those of pretrain/train.py: 0 done, 75 stopped in order, 2 bad input, any other a crash.
after_srun() {
  local code=$1 crash crashes
  # A rank that alone found bad input ends alone; srun then kills those that wait for it, and tells of them.
  if ((code > 128)) && grep --quiet '^error: ' "$LOG"*; then code=2; fi
  case $code in
    0)
      say "done"
      ;;
    75)
      requeue "stopped in order, and saved"
      ;;
    2)
      grep --no-filename --max-count=1 '^error' "$LOG"* | sort --unique || true
      say "bad input, which starting again would not mend"
      exit 2
      ;;
    *)
      crash="$SLURM_JOB_ID $(cat "$RUN_DIR/checkpoints/latest" 2> /dev/null || echo none)"
      echo "$crash" >> "$RUN_DIR/logs/crashes"
      crashes=$(grep --count --line-regexp --fixed-strings "$crash" "$RUN_DIR/logs/crashes")
      if ((crashes > MAX_CRASHES)); then
        say "crashed with exit code $code, $crashes times without a new checkpoint: given up; see ${LOG}*"
        exit "$code"
      fi
      requeue "crashed with exit code $code ($crashes of $MAX_CRASHES times without a new checkpoint; see ${LOG}*)"
      ;;
  esac
}

requeue() {
  say "$1; requeues itself" # Slurm may end this script at once
  scontrol requeue "$SLURM_JOB_ID" || { say "it may not: submit it again, and it goes on"; exit 75; }
}

say() {
  echo "$(date +%FT%T) $SLURM_JOB_NAME $SLURM_JOB_ID: $1"
}
