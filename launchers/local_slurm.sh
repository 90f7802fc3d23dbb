#!/usr/bin/env bash
# A Slurm of several nodes on this machine, for tests and for trying the scripts of slurm/:
#   launchers/local_slurm.sh start|status|stop
# Everything it makes is in one directory, which `stop` removes. It touches no Slurm that is installed here otherwise, and runs as
# any user, whose jobs alone it takes.
set -euo pipefail

DIRECTORY=${LOCAL_SLURM_DIR:-${XDG_RUNTIME_DIR:-/tmp}/grt-slurm-$(id -u)}
NODES=${LOCAL_SLURM_NODES:-2}
CPUS=${LOCAL_SLURM_CPUS:-4} # of each node, whatever the machine has: its nodes share what there is
LIMIT=60                    # seconds in which its nodes are to come up

export SLURM_CONF=$DIRECTORY/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin # where Debian puts daemons, and users' shells do not look
unset "${!SBATCH_@}" "${!SLURM_JOB@}"

main() {
  case ${1:-} in
    start) start ;;
    status) show_status ;;
    stop) stop ;;
    *) fail "Usage: launchers/local_slurm.sh start|status|stop" ;;
  esac
}

start() {
  require_programs
  if is_up; then
    echo "It runs already."
  else
    stop > /dev/null # what is left of one that was killed
    mkdir -m 755 "$DIRECTORY" "$DIRECTORY/state"
    write_configuration
    start_munge
    slurmctld > "$DIRECTORY/slurmctld.start" 2>&1 || fail_with "slurmctld does not start" "$DIRECTORY"/slurmctld.{start,log}
    for ((node = 1; node <= NODES; node++)); do
      slurmd -N "node$node" > "$DIRECTORY/node$node.start" 2>&1 || fail_with "slurmd does not start" "$DIRECTORY/node$node".{start,log}
    done
    wait_for_nodes
  fi
  show_status
}

show_status() {
  is_up || fail "No local Slurm of all its nodes runs in $DIRECTORY: launchers/local_slurm.sh start"
  sinfo --Node --long
  echo "To use it: export SLURM_CONF=$SLURM_CONF"
}

# Its jobs end too. Nothing of it is worth an orderly end.
stop() {
  local i pids
  [[ -e $SLURM_CONF ]] || { echo "Nothing to stop in $DIRECTORY."; return; }
  for ((i = 0; i < 100; i++)); do
    pids=$(processes)
    [[ -n $pids ]] || break
    # shellcheck disable=SC2086 # they are several, and may have ended
    kill -KILL $pids 2> /dev/null || true
    sleep 0.1
  done
  rm -rf "$DIRECTORY"
  echo "Stopped, and $DIRECTORY removed."
}

# Ids of its daemons, and of all that its jobs started: those that a killed daemon left behind, too.
processes() {
  local process
  for process in /proc/[0-9]*; do
    if grep --quiet --null-data --line-regexp --fixed-strings "SLURM_CONF=$SLURM_CONF" "$process/environ" 2> /dev/null &&
      { grep --quiet --extended-regexp '^(munged|slurm(ctld|scriptd|d|stepd))$' "$process/comm" ||
        grep --quiet --null-data '^SLURM_JOB_ID=' "$process/environ"; } 2> /dev/null; then
      echo "${process#/proc/}"
    fi
  done
}

require_programs() {
  local program
  for program in munged slurmctld slurmd sinfo; do
    command -v "$program" > /dev/null ||
      fail "$program is not installed: apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge"
  done
  (($(ulimit -Hn) >= 1024)) || fail "Only $(ulimit -Hn) open files are allowed here; slurmctld needs 1024: ulimit -n"
}

write_configuration() {
  local user host ports
  user=$(id -un) host=$(hostname -s)
  ports=$(free_ports $((NODES + 1)))
  cat > "$SLURM_CONF" << END
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ports
SlurmUser=$user
SlurmdUser=$user
# A requeued job waits as long as a credential is valid, and a second: two minutes unless set.
AuthInfo=socket=$DIRECTORY/munge.socket,cred_expire=15
StateSaveLocation=$DIRECTORY/state
SlurmdSpoolDir=$DIRECTORY/%n
SlurmctldPidFile=$DIRECTORY/slurmctld.pid
SlurmdPidFile=$DIRECTORY/%n.pid
SlurmctldLogFile=$DIRECTORY/slurmctld.log
SlurmdLogFile=$DIRECTORY/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
SlurmdTimeout=10
ReturnToService=2
NodeName=node[1-$NODES] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((ports + 1))-$((ports + NODES))] CPUs=$CPUS
PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=NO
# A job of this partition preempts those of the other.
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
END
}

# The first of $1 ports that nothing listens on, below those that the kernel hands out.
free_ports() {
  local attempt first port
  for ((attempt = 0; attempt < 100; attempt++)); do
    first=$((20000 + RANDOM % 10000))
    for ((port = first; port < first + $1; port++)); do
      if (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then continue 2; fi
    done
    echo "$first"
    return
  done
  fail "No $1 free ports in a row were found from 20000 to 29999."
}

start_munge() {
  dd if=/dev/urandom of="$DIRECTORY/munge.key" bs=1024 count=1 status=none
  chmod 600 "$DIRECTORY/munge.key"
  # --force: the directory may be one that only this user can enter
  munged --force --key-file="$DIRECTORY/munge.key" --socket="$DIRECTORY/munge.socket" --pid-file="$DIRECTORY/munged.pid" \
    --log-file="$DIRECTORY/munged.log" --seed-file="$DIRECTORY/munged.seed" --num-threads=2 2> "$DIRECTORY/munged.start" ||
    fail_with "munged does not start" "$DIRECTORY"/munged.{start,log}
}

# Whether the controller answers and all nodes can work.
is_up() {
  local states
  [[ -e $SLURM_CONF ]] && states=$(timeout 10 sinfo --noheader --Node --partition=main --format=%T 2> /dev/null) &&
    [[ -n $states ]] && ! grep --invert-match --quiet --line-regexp --extended-regexp 'idle|mixed|allocated|completing' <<< "$states"
}

wait_for_nodes() {
  local start=$SECONDS
  until is_up; do
    ((SECONDS - start < LIMIT)) || fail_with "Its nodes are not up after $LIMIT seconds" "$DIRECTORY"/{slurmctld,node*}.log
    sleep 0.2
  done
}

fail() {
  echo "local_slurm: $1" >&2
  exit 1
}

# Fails with the ends of the files after $1.
fail_with() {
  tail -n 5 "${@:2}" >&2 || true
  fail "$1; see above. What it wrote is in $DIRECTORY until the next start."
}

main "$@"
