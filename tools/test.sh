#!/usr/bin/env bash
# Run the test suite through ctest, in an environment of its own.
#
#   tools/test.sh                       everything, on paddlepaddle 3.3.1 (CPU build)
#   tools/test.sh --paddle gpu          the same on paddlepaddle-gpu 2.6.2 (needs no GPU)
#   tools/test.sh -L pure               only tests that start no process; -L process: the others
#   tools/test.sh -R sharding           only files whose path matches; other ctest options work as well
#
# PGS_VENV=DIR     where the environment is (default .venv-test, or .venv-test-gpu, beside the sources)
# PGS_PYTHON=FILE  the Python to make it with
# PGS_EXTRAS=...   more extras of setup.py to install, such as dev
# PGS_JOBS=N       test files at once (default 2: ranks wait for each other half of the time)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

paddle=cpu
arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --paddle) paddle="${2:-}"; shift ;;
        *) arguments+=("$1") ;;
    esac
    [ $# -eq 0 ] || shift
done
[ "$paddle" = cpu ] || [ "$paddle" = gpu ] || pgs_fail "--paddle takes cpu or gpu, got '$paddle'"

suffix=""
[ "$paddle" = cpu ] || suffix="-$paddle"
venv="${PGS_VENV:-$PGS_ROOT/.venv-test$suffix}"
pgs_make_venv "$venv" "$paddle,test,plot${PGS_EXTRAS:+,$PGS_EXTRAS}"

export PATH="$venv/bin:$PATH" # ninja, for cmake
build="$venv/ctest"
cmake -S "$PGS_ROOT" -B "$build" -G Ninja -DPython3_EXECUTABLE="$PGS_VENV_PYTHON" >"$venv/cmake.log" 2>&1 ||
    pgs_fail "cmake could not register the tests: $(grep -m1 -A2 Error "$venv/cmake.log" | tr '\n' ' ')"

version="$("$PGS_VENV_PYTHON" -c 'from importlib.metadata import version as v; import sys
print("Python %d.%d," % sys.version_info[:2], sys.argv[1], v(sys.argv[1]))' "paddlepaddle$suffix")"
pgs_say "testing on $version"
status=0
ctest --test-dir "$build" --output-on-failure --no-tests=error -j "${PGS_JOBS:-2}" ${arguments[@]+"${arguments[@]}"} || status=$?
if [ "$status" -eq 0 ]; then
    pgs_say "all tests passed ($version)"
else
    pgs_say "TESTS FAILED ($version)"
fi
exit "$status"
