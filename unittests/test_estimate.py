"""The command ``estimate``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import paddle
import pytest

from paddle_group_sharded.__main__ import main
from paddle_group_sharded.estimate import _STATES
from paddle_group_sharded.sharding.state import probe_states

Run = Callable[..., str]
NO_VALUES = (
    "my_models_of_estimate:needs_values cannot be made under paddle.LazyGuard (ValueError: there are no values); "
    "pass --eager"
)
MODULE = """
import paddle

def make():
    return paddle.nn.Sequential(*(paddle.nn.Linear(1000, 1000) for _ in range(5)))

def needs_values():
    layer = make()
    if not layer[0].weight._is_initialized():
        raise ValueError("there are no values")
    return layer
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "my_models_of_estimate.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(line: str, status: int = 0) -> str:
        assert main(["estimate", *line.split()]) == status
        out = capsys.readouterr()
        return out.err if status else out.out

    return call


def test_a_number_of_parameters(run: Run) -> None:
    """The example of the paper: 120, 31.4, 16.6 and 1.9 GB."""
    lines = run("--parameters 7.5e9 --ranks 1 64 --dtype bfloat16").splitlines()
    assert lines[0] == "7.500 G parameters, AdamW, bfloat16: parameters, gradients and states of one rank"
    assert [line.split("  ")[-1].strip() for line in lines[1:6]] == [
        "64 ranks",
        "120.0 GB",
        "31.41 GB",
        "16.64 GB",
        "1.875 GB",
    ]
    assert [" ".join(line.split()[1:-4]) for line in lines[2:6]] == ["16", "4 + 12/N", "2 + 14/N", "16/N"]


@pytest.mark.parametrize("name", list(_STATES))
def test_the_states_of_each_class(name: str) -> None:
    layer = paddle.nn.Linear(3, 5)
    optimizer = getattr(paddle.optimizer, name)(0.1, parameters=layer.parameters())
    specs = probe_states(optimizer, layer.weight, paddle.float32, whole=False)
    assert sum(not spec.scalar for spec in specs.values()) == _STATES[name]


def test_a_model(run: Run) -> None:
    lines = run("my_models_of_estimate:make --ranks 2 64 --optimizer Momentum --activations 1e6").splitlines()
    assert lines[0].startswith("5.005 M parameters, Momentum, 2 ranks")
    assert lines[7].startswith("5.005 M parameters, Momentum, 64 ranks")
    p_g_os = lines[5].split()
    assert p_g_os[:7] == ["p_g_os", "10.01", "MB", "10.01", "MB", "10.01", "MB"]
    assert "1.000 MB" in lines[5]


def test_a_model_in_sixteen_bits(run: Run) -> None:
    lines = run("my_models_of_estimate:make --ranks 2 --dtype bfloat16").splitlines()
    assert lines[5].split()[:7] == ["p_g_os", "5.005", "MB", "5.005", "MB", "30.03", "MB"]
    assert paddle.get_default_dtype() == "float32"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--parameters 7e9 --ranks 8 --optimizer RMSProp", "the states of RMSProp are known from a model only"),
        ("--parameters 7e9 --ranks 8 0", "--ranks: expected numbers of ranks, at least 1, got 0"),
        ("--parameters 7e9 --ranks 8 --activations 1", "--eager and --activations need module:factory"),
        ("my_models_of_estimate --ranks 8", "expected module:factory"),
        ("my_models_of_estimate:nothing --ranks 8", "module 'my_models_of_estimate' has no function 'nothing'"),
        ("no_such_module_here:make --ranks 8", "cannot import 'no_such_module_here'"),
        ("my_models_of_estimate:make --ranks 8 --optimizer Adum", "--optimizer: paddle.optimizer has no 'Adum'"),
        ("my_models_of_estimate:needs_values --ranks 8", NO_VALUES),
    ],
)
def test_refusals(run: Run, line: str, message: str) -> None:
    assert run(line, status=2).startswith(f"error: {message}")


def test_a_model_made_with_its_values(run: Run) -> None:
    values = run("my_models_of_estimate:needs_values --ranks 8 --eager")
    assert values == run("my_models_of_estimate:make --ranks 8")
