# Functions that quickstart.sh and test.sh share; source it, do not run it.  Written for bash 3.2 and later.
#
#   pgs_find_python          sets PGS_PYTHON to a Python that Paddle has packages for, and that can make environments
#   pgs_make_venv DIR EXTRAS an environment in DIR with this package and its EXTRAS ("cpu,test"); sets PGS_VENV_PYTHON
#
# Both end the calling script with one line on what is wrong and what to do.  Settings by environment variables:
#   PGS_PYTHON=/path/to/python   use this one.

PGS_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PGS_OLDEST=9   # 3.9
PGS_NEWEST=13  # 3.13, the newest that paddlepaddle 3.3.1 has wheels for; paddlepaddle-gpu 2.6.2 ends at 3.12

pgs_say() { printf '== %s\n' "$*"; }

pgs_fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# The minor version of a Python 3, or nothing if the command is no Python 3 that runs (a pyenv shim, say).
pgs_minor_version() {
    "$1" -c 'import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else -1)' 2>/dev/null || true
}

# pgs_find_python [NEWEST_MINOR]
pgs_find_python() {
    local newest="${1:-$PGS_NEWEST}" candidates=() command minor unfit="" no_venv=""
    if [ -n "${PGS_PYTHON:-}" ]; then
        candidates=("$PGS_PYTHON")
    else
        candidates=(python3 python3.12 python3.11 python3.10 python3.9 python3.13 python)
    fi
    for command in "${candidates[@]}"; do
        minor="$(pgs_minor_version "$command")"
        [ -n "$minor" ] || [ -z "${PGS_PYTHON:-}" ] || pgs_fail "PGS_PYTHON=$PGS_PYTHON is no Python that runs"
        [ -n "$minor" ] || continue
        if [ "$minor" -lt "$PGS_OLDEST" ] || [ "$minor" -gt "$newest" ]; then
            unfit="${unfit:+$unfit, }$command, which is $("$command" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')"
        elif ! "$command" -c 'import venv, ensurepip' 2>/dev/null; then
            no_venv="${no_venv:-$command}"
        else
            PGS_PYTHON="$(command -v "$command")"
            return 0
        fi
    done
    if [ -n "$no_venv" ]; then
        minor="$(pgs_minor_version "$no_venv")"
        pgs_fail "$no_venv has no venv module; install it (Debian, Ubuntu: apt-get install python3.$minor-venv)" \
            "or name another Python by PGS_PYTHON=/path/to/python"
    fi
    pgs_fail "needs Python 3.$PGS_OLDEST to 3.$newest, found ${unfit:-none};" \
        "install one or name it by PGS_PYTHON=/path/to/python"
}

# pgs_check_disk DIR MEGABYTES: free space on the file system that DIR is or will be on.
pgs_check_disk() {
    local dir="$1" free
    while [ ! -d "$dir" ]; do dir="$(dirname "$dir")"; done
    [ -w "$dir" ] || pgs_fail "cannot write to $dir; name another place by PGS_VENV=/path/to/environment"
    free="$(df -Pk "$dir" | awk 'NR == 2 { print int($4 / 1024) }')"
    [ "$free" -ge "$2" ] || pgs_fail "needs $2 MB of free disk space in $dir, found $free MB;" \
        "make room or name another place by PGS_VENV=/path/to/environment"
}

# pgs_pip LOG ARGUMENTS: quiet but for a line per large download; the whole output goes to LOG.
pgs_pip() {
    local log="$1" failed="pip ended with an error" line
    shift
    {
        "$PGS_VENV_PYTHON" -m pip --disable-pip-version-check install --progress-bar off --retries 5 --timeout 60 "$@" ||
            echo "$failed"
    } 2>&1 | tee "$log" | while IFS= read -r line; do
        case "$line" in
            *Downloading*" MB)" | "Installing collected"*) printf '   %s\n' "$(printf '%s' "${line#  }" | cut -c1-100)" ;;
        esac
    done || true
    if grep -q 'No space left on device' "$log" || ! [ -s "$log" ]; then
        pgs_fail "the disk became full while installing; make room (pip also needs some in ${TMPDIR:-/tmp}) and run again"
    elif grep -qx "$failed" "$log"; then
        pgs_fail "pip could not install the packages: $(grep '^ERROR' "$log" | tail -1) (all of its output is in $log)"
    fi
}

# What an installation depends on: if this text is the same as last time, nothing has to be installed.
pgs_fingerprint() {
    printf '%s\n' "$PGS_ROOT" "$1"
    cksum <"$PGS_ROOT/setup.py"
}

# pgs_make_venv DIR EXTRAS
pgs_make_venv() {
    local dir="$1" extras="$2" megabytes=3000 newest="$PGS_NEWEST" stamp="$1/pgs-installed.txt"
    case ",$extras," in *,gpu,*) megabytes=6000 newest=12 ;; esac
    PGS_VENV_PYTHON="$dir/bin/python"
    if [ -f "$stamp" ] && "$PGS_VENV_PYTHON" -c '' 2>/dev/null && [ "$(pgs_fingerprint "$extras")" = "$(cat "$stamp")" ]; then
        pgs_say "using the environment in $dir"
        return 0
    fi
    if [ -d "$dir" ] && [ ! -f "$dir/pyvenv.cfg" ] && [ -n "$(ls -A "$dir")" ]; then
        pgs_fail "$dir exists and is no virtual environment; name another place by PGS_VENV=/path/to/environment"
    fi
    pgs_check_disk "$dir" "$megabytes"
    # --clear: an environment that an interrupted run has left, or whose Python is gone, is made again.
    if ! "$PGS_VENV_PYTHON" -c 'import pip' 2>/dev/null; then
        pgs_find_python "$newest"
        pgs_say "making an environment in $dir with $PGS_PYTHON"
        "$PGS_PYTHON" -m venv --clear "$dir" >"$dir.log" 2>&1 ||
            pgs_fail "$PGS_PYTHON could not make an environment: $(tail -1 "$dir.log")"
        rm -f "$dir.log"
    fi
    rm -f "$stamp"
    pgs_say "installing paddle-group-sharded[$extras] (some minutes the first time)"
    pgs_pip "$dir/pip.log" --editable "$PGS_ROOT[$extras]"
    pgs_fingerprint "$extras" >"$stamp"
}
