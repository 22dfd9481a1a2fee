from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = str(Path(__file__).resolve().parents[2] / "tools" / "keep_running.sh")
# Adds a line to a file, and ends with status 7 until there are as many lines as asked for.
SCRIPT = (
    "import sys; path, wanted = sys.argv[1:]; open(path, 'a').write('ran\\n'); "
    "sys.exit(0 if len(open(path).readlines()) >= int(wanted) else 7)"
)


def run(restarts: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOL, restarts, *command], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("wanted", "restarts", "runs", "status"), [(1, 3, 1, 0), (3, 3, 3, 0), (9, 2, 3, 7)])
def test_a_failing_command_is_started_again(
    tmp_path: Path, wanted: int, restarts: int, runs: int, status: int
) -> None:
    ended = run(str(restarts), sys.executable, "-c", SCRIPT, str(tmp_path / "runs"), str(wanted))
    assert ended.returncode == status
    assert (tmp_path / "runs").read_text().count("ran") == runs
    assert ended.stderr.count("ended with status 7; restart") == (runs if status else runs - 1)


def test_a_signal_ends_both(tmp_path: Path) -> None:
    script = f"import time; open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(60)"
    process = subprocess.Popen([TOOL, "3", sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 20
    while not (tmp_path / "up").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "restart" not in said


def test_what_it_is_not_told(tmp_path: Path) -> None:
    for words in (["3"], ["x", "true"], ["-1", "true"]):
        ended = subprocess.run([TOOL, *words], capture_output=True, text=True, timeout=20)
        assert ended.returncode == 2 and "at most N times" in ended.stderr
