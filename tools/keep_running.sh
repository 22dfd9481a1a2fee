#!/usr/bin/env bash
# Start a command again when it fails, at most N times: a killed run that writes checkpoints goes on by itself.
#
#   tools/keep_running.sh 3 fleetrun --nproc_per_node 2 tools/train_gpt.py --checkpoint output/run
#
# fleetrun's own --max_restart restarts only where the job has an etcd master.  Ctrl-C and SIGTERM end everything.
set -u
[ $# -ge 2 ] && [ "$1" -ge 0 ] 2>/dev/null || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
restarts="$1"
shift
trap 'stopped=1; [ -z "${child:-}" ] || kill "$child" 2>/dev/null' INT TERM
for attempt in $(seq 0 "$restarts"); do
    "$@" &
    child=$!
    wait "$child"
    status=$?
    [ -z "${stopped:-}" ] || { wait "$child"; exit 130; }
    [ "$status" -ne 0 ] || exit 0
    echo "keep_running.sh: ended with status $status; restart $((attempt + 1)) of $restarts" >&2
done
echo "keep_running.sh: given up after $restarts restarts" >&2
exit "$status"
