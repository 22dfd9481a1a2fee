"""Kill jobs with SIGKILL while they save checkpoints, many times, and check that the newest complete one loads.

    python tools/kill_checkpoints.py                 200 kills at random moments, and one before each change of a file
    python tools/kill_checkpoints.py --kills 20

Half of the jobs have one rank, half two, of which one or both are killed.  Ends with status 1 at the first checkpoint
that is lost, leaving its folder.  Takes about two seconds a kill.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from unittests.checkpoint.kills import kill_at_call, kill_at_random  # noqa: E402
from unittests.harness import RankFailure, RankPool  # noqa: E402

LAST_CALLS = {(1, 0): 36, (2, 0): 40, (2, 1): 11}  # (ranks, victim): changes of files in three saves, about


def main() -> int:
    """Kill and look, over and over; 0 where nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="at random moments")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-checkpoints-"))
    for world_size in (1, 2):
        kills = kill_at_random(world_size, args.kills // 2, str(folder / f"random{world_size}"), args.seed)
        for number, (victims, step, problem) in enumerate(kills, 1):
            print(f"{world_size} ranks, kill {number} of ranks {victims}: found step {step} {problem}", flush=True)
            if problem:
                return 1
    for (world_size, victim), last in LAST_CALLS.items():
        with RankPool(world_size) as pool:
            for call in range(1, last + 1):
                path = str(folder / f"call-{world_size}-{victim}-{call}")
                try:
                    step, problem = kill_at_call(pool, path, call, victim)
                except RankFailure as failure:
                    print(f"{world_size} ranks, change {call} of rank {victim}: {failure}", flush=True)
                    return 1
                what = f"{world_size} ranks, before change {call} of rank {victim}"
                print(f"{what}: found step {step} {problem}", flush=True)
                if problem:
                    return 1
    shutil.rmtree(folder)
    print("no checkpoint was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
