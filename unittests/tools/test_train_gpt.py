"""The main job as a user starts it, on sizes that take a second; the launches take the time."""

# ctest: timeout=900

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest

from unittests.tools import TOOLS, run_tool  # runs a subprocess

# Dropout and two micro-batches: what a resumed run, or another level, would get wrong first.
SMALL = "--layers 2 --width 16 --heads 2 --seq 16 --batch 8 --accumulate 2 --dropout 0.1 --lr 0.001 --sample 8".split()
STEPS = "--steps 8 --warmup 2 --eval-every 4".split()


class Run:
    """One launch that has ended well, or the output of one that has not."""

    def __init__(self, folder: Path, ranks: int, *arguments: str) -> None:
        self.folder = folder
        arguments = ("--save", str(folder), *arguments)
        self.status, self.output = run_tool("train_gpt.py", folder, ranks, *arguments, timeout=240)

    def number(self, label: str) -> float:
        """The first number after ``label`` and blanks."""
        found = re.search(label + r"\s+([0-9.]+)", self.output)
        assert found, f"no {label!r} in:\n{self.output}"
        return float(found.group(1))

    def file(self, name: str) -> dict[str, Any]:
        """Arrays of a saved file by entry name, read without Paddle."""
        assert self.status == 0, self.output
        entries = pickle.loads((self.folder / name).read_bytes())
        return {key: value for key, value in entries.items() if isinstance(value, np.ndarray)}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``launched(ranks, level)`` is the whole small run, made once."""
    runs: dict[tuple[int, str], Run] = {}

    def get(ranks: int, level: str) -> Run:
        if (ranks, level) not in runs:
            folder = tmp_path_factory.mktemp(f"{level}_{ranks}")
            runs[ranks, level] = Run(folder, ranks, "--level", level, *SMALL, *STEPS)
        assert runs[ranks, level].status == 0, runs[ranks, level].output
        return runs[ranks, level]

    return get


def assert_same(found: Run, expected: Run, name: str, tolerance: Optional[float]) -> None:
    """The same entries, bit-equal or within an absolute tolerance."""
    mine, theirs = found.file(name), expected.file(name)
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        if tolerance is None:
            assert np.array_equal(mine[key], value), key
        else:
            np.testing.assert_allclose(mine[key], value, rtol=0, atol=tolerance, err_msg=key)


def test_one_plain_process_learns_and_reads_its_model_back(tmp_path: Path) -> None:
    arguments = "--level none --layers 1 --width 32 --heads 2 --seq 32 --steps 60 --lr 0.01 --sample 20".split()
    run = Run(tmp_path, 1, *arguments)
    assert run.status == 0, run.output
    assert run.number("step 0: validation loss") == pytest.approx(np.log(256), abs=0.1)  # it knows nothing yet
    trained = run.number("step 60: validation loss")
    assert trained < 3.5
    assert run.number(r"unwrapped model, one process: validation loss") == trained
    assert len(run.output.split("sample of 20 bytes:\n\ndef ")[1]) >= 20


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_two_ranks_get_what_data_parallel_gets_at_every_level(launched: Any, level: str) -> None:
    sharded, replicated = launched(2, level), launched(2, "none")
    assert_same(sharded, replicated, "model.pdmodel", tolerance=1e-6)
    assert_same(sharded, replicated, "model.pdopt", tolerance=1e-6)
    assert sharded.number("step 8: validation loss") == pytest.approx(
        replicated.number("step 8: validation loss"), abs=2e-4
    )
    assert sharded.number("unwrapped model, one process: validation loss") == pytest.approx(
        sharded.number("step 8: validation loss"), abs=2e-4
    )
    formula = sharded.number(r"ZeRO formula, [0-9N/+ ]+ bytes a parameter")
    assert sharded.number("model states, MB per rank") == pytest.approx(formula, rel=0.1)  # MB with two digits


@pytest.mark.parametrize(("ranks", "level"), [(1, "none"), (2, "p_g_os")])
def test_a_resumed_run_equals_an_unbroken_one(launched: Any, tmp_path: Path, ranks: int, level: str) -> None:
    stopped = Run(tmp_path / "stopped", ranks, "--level", level, *SMALL, *STEPS, "--stop-at", "3")
    assert stopped.status == 0, stopped.output
    assert not np.array_equal(
        stopped.file("model.pdmodel")["norm.weight"], launched(ranks, level).file("model.pdmodel")["norm.weight"]
    )
    resumed = Run(tmp_path / "resumed", ranks, "--resume", str(stopped.folder))
    assert resumed.status == 0, resumed.output
    assert_same(resumed, launched(ranks, level), "model.pdmodel", tolerance=None)
    assert_same(resumed, launched(ranks, level), "model.pdopt", tolerance=None)


def test_a_pipeline_of_two_stages_saves_the_model_of_one_process(launched: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, 2, "--stages", "2", "--schedule", "zb_h1", *SMALL, *STEPS)
    assert run.status == 0, run.output
    weights, plain = run.file("model.pdmodel"), launched(1, "none").file("model.pdmodel")
    assert {name: value.shape for name, value in weights.items()} == {name: v.shape for name, v in plain.items()}
    assert run.number("step 8: validation loss") < run.number("step 0: validation loss")
    assert run.number("unwrapped model, one process: validation loss") == pytest.approx(
        run.number("step 8: validation loss"), abs=2e-4
    )
    assert "schedule zb_h1, last training step:" in run.output and "2 stages, 2 ranks, " in run.output


def test_bfloat16_weights_train_in_two_thirds_of_the_memory(launched: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, 2, "--level", "os_g", "--amp", "bf16", *SMALL, *STEPS)
    assert run.file("model.pdmodel")["norm.weight"].dtype == np.uint16  # the bits of bfloat16, as Paddle saves them
    full = launched(2, "os_g")
    assert run.number("step 8: validation loss") == pytest.approx(full.number("step 8: validation loss"), rel=0.01)
    assert run.number("model states, MB per rank") == pytest.approx(
        full.number("model states, MB per rank") * (2 + 14 / 2) / (4 + 12 / 2), rel=0.1
    )


def test_a_run_continues_at_another_level_and_number_of_ranks(tmp_path: Path) -> None:
    calm = [*SMALL, *STEPS, "--dropout", "0"]  # masks depend on the rank
    unbroken = Run(tmp_path / "unbroken", 1, "--level", "none", *calm)
    Run(tmp_path / "stopped", 2, "--level", "os_g", *calm, "--stop-at", "5")
    resumed = Run(tmp_path / "resumed", 1, "--resume", str(tmp_path / "stopped"), "--level", "p_g_os")
    assert_same(resumed, unbroken, "model.pdmodel", tolerance=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--amp", "O1"], "--amp O1: auto_cast does nothing on CPU, where only --amp none and bf16 are allowed"),
        (["--data", "/nowhere"], "--data /nowhere: No such file or directory; give a readable text file"),
        (["--data", str(TOOLS / "zero_formula.py"), "--seq", "512"], "but --seq 512 needs 10260; give --data FILE"),
    ],
)
def test_what_cannot_run_ends_with_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    run = Run(tmp_path, 1, *arguments)
    assert run.status == 1
    assert message in run.output
    assert "Traceback" not in run.output
