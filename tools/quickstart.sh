#!/usr/bin/env bash
# Train a small GPT in two processes with everything sharded, then read the result back into plain Paddle.
#
#   tools/quickstart.sh                    on CPU, or on GPUs where nvidia-smi finds them
#   tools/quickstart.sh --level os_g       every other option is passed on to tools/train_gpt.py (--help lists them)
#
# PGS_VENV=DIR     where the environment is (default .venv beside the sources); it is kept for the next run
# PGS_PYTHON=FILE  the Python to make it with
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

output="$PGS_ROOT/output"
gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
if [ "$gpus" -gt 0 ]; then
    extra=gpu
    processes=$((gpus < 2 ? 1 : 2))
else
    extra=cpu
    processes=2
fi
pgs_make_venv "${PGS_VENV:-$PGS_ROOT/.venv}" "$extra"

# The MKL in Paddle's CPU build takes its slowest code path on AMD processors unless it is told which they are like.
if grep -q AuthenticAMD /proc/cpuinfo 2>/dev/null && grep -qw avx2 /proc/cpuinfo; then
    export MKL_DEBUG_CPU_TYPE="${MKL_DEBUG_CPU_TYPE:-5}"
fi
# glibc gives large blocks back to the system at once, and a fresh page costs more than what is computed in it.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"
# Leave out what Paddle logs about itself.
export GLOG_minloglevel="${GLOG_minloglevel:-2}" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::UserWarning}"

case " $* " in *" --help "* | *" -h "*) exec "$PGS_VENV_PYTHON" "$PGS_ROOT/tools/train_gpt.py" --help ;; esac

pgs_say "training on $processes $extra processes: tools/train_gpt.py --save $output/gpt $*"
rm -rf "$output/gpt-log"
status=0
"$PGS_VENV_PYTHON" -m paddle.distributed.launch --log_level ERROR --log_dir "$output/gpt-log" --nproc_per_node "$processes" \
    "$PGS_ROOT/tools/train_gpt.py" --save "$output/gpt" "$@" || status=$?
[ "$status" -eq 0 ] || pgs_fail "training ended with status $status; what each process printed is in $output/gpt-log"
pgs_say "done; the model is in plain Paddle files in $output/gpt"
