"""The command line: inspect, verify, diff, merge, reshard, convert, on every format."""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_group_sharded.__main__ import main
from paddle_group_sharded.checkpoint.dtypes import CODES
from unittests.harness import Ranks

WORKER = "unittests.checkpoint.dygraph_convert"
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object, status: int = 0) -> str:
        assert main(["checkpoint", *map(str, words)]) == status
        out = capsys.readouterr()
        return (out.err if status == 2 else out.out).rstrip("\n")

    return call


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ranks(2).run(WORKER, "write_all", str(folder))
    ranks(1).run(WORKER, "write_plain", str(folder))
    return folder


def test_inspect(run: Run, saved: Path) -> None:
    lines = run("inspect", saved / "half").splitlines()
    states = "moment1 moment2 beta1_pow_acc beta2_pow_acc master_weight"
    assert [line.split() for line in lines[:3]] == [
        "tensor shape dtype size pieces optimizer states".split(),
        ["embedding.weight", "[11,", "7]", "bfloat16", "154", "B", "1", *states.split()],
        ["middle.weight", "[7,", "5]", "bfloat16", "70", "B", "2", *states.split()],
    ]
    assert "checkpoint: 5 tensors of the model with 159 elements, 318 B; 25 optimizer states" in lines[7]
    assert lines[8].startswith("saved by: ranks 2, level p_g_os, paddle ")
    assert lines[9:] == ["extra: {'step': 3, 'where': [1, 2]}", "optimizer: AdamW", "learning_rate: 0.05"]
    assert "embedding.weight = head.weight" in run("inspect", saved / "rich")
    assert "paddle: 16 tensors" in run("inspect", saved / "rich_whole")
    assert "paddle: 16 tensors" in run("inspect", saved / "plain.pdparams")
    assert "is no folder" in run("verify", saved / "nothing", status=2)
    assert "the save was not finished" in run("inspect", saved, status=2)


def test_verify_finds_every_kind_of_damage(run: Run, saved: Path, tmp_path: Path) -> None:
    assert run("verify", saved / "rich").endswith(": all right")
    copy = tmp_path / "copy"
    for number in range(2):
        for position in (3, 40, -40):
            shutil.copytree(saved / "rich", copy)
            path = sorted(copy.glob("*.safetensors"))[number]
            data = bytearray(path.read_bytes())
            data[position] ^= 1
            path.write_bytes(data)
            merge, reshard = ("merge", tmp_path / "m.safetensors"), ("reshard", tmp_path / "r", "--files", 1)
            for action in (("verify",), merge, reshard):
                assert f"{path} is damaged" in run(action[0], copy, *action[1:], status=2)
            assert not list(tmp_path.glob("[mr]*"))
            shutil.rmtree(copy)


def test_diff_names_the_first_difference(run: Run, saved: Path) -> None:
    same = run("diff", saved / "rich", saved / "rich_whole")
    assert same.startswith("equal: the weights and optimizer states of ")
    lines = run("diff", saved / "rich", saved / "rich_later", status=1).splitlines()
    assert lines[0].startswith(
        "the weights and optimizer states differ in 42 tensors; the first: scale differs in 1 of 1 elements, by 0.0"
    )
    assert any(line.startswith("optimizer/embedding.weight/moment1 differs in 77 of 77") for line in lines)
    lines = run("diff", saved / "rich", saved / "half", "--weights", status=1).splitlines()
    assert "scale is in the first only" in lines[0]
    assert "embedding.weight has dtype float32 and bfloat16" in lines
    assert "middle.weight is in the second only" in lines


def test_diff_tells_by_how_much(run: Run, tmp_path: Path) -> None:
    one = {"a": np.zeros([2, 3], "float32"), "b": np.arange(4), "c": np.ones([2], "float16")}
    other = {**one, "a": one["a"].copy(), "c": np.ones([3], "float16")}
    other["a"][1, 2], other["a"][0, 1] = -2.5, 0.125
    save_file(one, tmp_path / "one.safetensors")
    save_file(other, tmp_path / "other.safetensors")
    lines = run("diff", tmp_path / "one.safetensors", tmp_path / "other.safetensors", status=1).splitlines()
    assert sorted(line.partition("first: ")[2] or line for line in lines) == [
        "a differs in 2 of 6 elements, by 2.5 at most, first at [0, 1]",
        "c has shape [2] and [3]",
    ]


@pytest.mark.parametrize(("kind", "name"), [("AdamW", "rich"), ("half", "half")])
def test_convert_both_ways(run: Run, ranks: Ranks, saved: Path, tmp_path: Path, kind: str, name: str) -> None:
    """To plain Paddle and back, through other numbers of files; loaded, everything has the bits that were saved."""
    made = tmp_path / "made"
    run("convert", saved / name, made / "paddle", "--to", "paddle")
    run("convert", made / "paddle", made / "back", "--to", "checkpoint")
    run("convert", saved / f"{name}_whole", made / "whole", "--to", "checkpoint")
    run("reshard", saved / name, made / "three", "--files", 3)
    run("reshard", made / "three", made / "one", "--files", 1)
    assert len(list((made / "three").glob("*.safetensors"))) == 3
    shutil.copy(saved / f"{name}.pickle", made)
    for result in ("paddle", "back", "whole", "three", "one"):
        assert "equal" in run("diff", saved / name, made / result)
        assert ranks(1).run(WORKER, "read", str(made), kind, result, name) == [[]], result
        if result not in ("paddle", "whole", "back"):
            assert "all right" in run("verify", made / result)
    assert "exists already" in run("convert", saved / name, made / "paddle", "--to", "paddle", status=2)
    assert "exists already" in run("reshard", saved / name, made / "one", "--files", 2, status=2)


def test_plain_files(run: Run, ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    run("convert", saved / "plain.pdparams", tmp_path / "checkpoint", "--to", "checkpoint")
    shutil.copy(saved / "plain.pickle", tmp_path)
    assert ranks(1).run(WORKER, "read", str(tmp_path), "AdamW", "checkpoint", "plain") == [[]]
    run("convert", tmp_path / "checkpoint", tmp_path / "again", "--to", "paddle")
    assert "equal" in run("diff", saved / "plain.pdparams", tmp_path / "again")


def test_equal_automatic_names_are_no_ties(run: Run, tmp_path: Path) -> None:
    """Entries of two files, merged into one: only those that have the same bytes are one tensor."""
    automatic = {"a.w": "linear_0.w_0", "b.w": "linear_0.w_0", "c.w": "linear_0.w_0", "d.w": "linear_0.w_0"}
    values = {"a.w": np.array([1.0, -0.0], "float32"), "b.w": np.array([1.0, 0.0], "float32")}
    values.update({"c.w": values["b.w"].copy(), "d.w": values["a.w"].astype("float64")})
    merged = tmp_path / "merged.pdparams"
    merged.write_bytes(pickle.dumps({**values, "StructuredToParameterName@@": automatic}, protocol=2))
    for kind in ("checkpoint", "paddle", "safetensors"):
        run("convert", merged, tmp_path / kind, "--to", kind)
        assert "equal" in run("diff", merged, tmp_path / kind)
    assert "b.w = c.w" in run("inspect", tmp_path / "checkpoint")
    found = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert {name: (str(array.dtype), array.tobytes()) for name, array in found.items()} == {
        name: (str(array.dtype), array.tobytes()) for name, array in values.items() if name in found
    }
    assert {"a.w", "b.w", "d.w"} <= set(found)
    # Whichever side has the tie, the other one's values count.
    save_file({**values, "c.w": values["b.w"] + 1}, tmp_path / "untied.safetensors")
    sides = (tmp_path / "checkpoint", tmp_path / "untied.safetensors")
    for first, second in (sides, sides[::-1]):
        assert "c.w differs in 2 of 2 elements, by 1 at most" in run("diff", first, second, status=1)
    merged.with_suffix(".pdopt").write_bytes(pickle.dumps({"linear_0.w_0_moment1_0": values["a.w"]}, protocol=2))
    message = run("convert", merged, tmp_path / "none", "--to", "checkpoint", status=2)
    assert "'linear_0.w_0_moment1_0' may belong to any of a.w, b.w, d.w, whose values differ" in message


def test_safetensors_of_hugging_face(run: Run, saved: Path, tmp_path: Path) -> None:
    """Read by the library itself; several files with an index, and back."""
    out = run("convert", saved / "rich", tmp_path / "hf", "--to", "safetensors", "--max-size", "500")
    assert "model-00001-of-00003.safetensors, model-00002-of-00003.safetensors" in out
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    arrays: dict[str, np.ndarray] = {}
    for file in sorted((tmp_path / "hf").glob("*.safetensors")):
        assert file.stat().st_size < 2000
        found = load_file(file)
        assert all(index["weight_map"][key] == file.name for key in found)
        arrays.update(found)
    assert set(arrays) == set(index["weight_map"]) and len(arrays) == 16
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    run("merge", saved / "rich", tmp_path / "one" / "all.safetensors")
    merged = load_file(tmp_path / "one" / "all.safetensors")
    assert all(merged[key].tobytes() == array.tobytes() for key, array in arrays.items()) and len(merged) == 16
    run("convert", tmp_path / "hf", tmp_path / "back", "--to", "checkpoint")
    assert "equal: the weights of" in run("diff", saved / "rich", tmp_path / "back")


def test_merge_takes_masters(run: Run, ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    run("merge", saved / "half", tmp_path / "half.pdparams")
    run("merge", saved / "half", tmp_path / "masters.pdparams", "--masters")
    run("merge", saved / "half", tmp_path / "masters.safetensors", "--masters")
    half, masters = (
        ranks(1).run(WORKER, "read_weights_by_paddle", str(tmp_path / f"{name}.pdparams"))[0]
        for name in ("half", "masters")
    )
    exact = load_file(tmp_path / "masters.safetensors")
    assert set(half) == set(masters) == set(exact) and len(exact) == 5
    for name, value in exact.items():
        assert value.dtype == np.float32 and value.tobytes() == masters[name].tobytes()
        assert 0 < np.abs(value - half[name]).max() < 0.01
    assert "expected a file NAME.safetensors" in run("merge", saved / "half", tmp_path / "x.bin", status=2)


def test_files_of_layers(run: Run, ranks: Ranks, tmp_path: Path) -> None:
    parts = ranks(2).run(WORKER, "write_layers", str(tmp_path))
    run("merge", tmp_path / "layers", tmp_path / "layers.safetensors")
    found = load_file(tmp_path / "layers.safetensors")
    expected = {**parts[0], **parts[1]}
    assert set(found) == set(expected) == {"0.weight", "0.bias", "2.weight"}
    assert all(found[name].tobytes() == value.tobytes() for name, value in expected.items())


def test_a_machine_smaller_than_the_model(run: Run, tmp_path: Path) -> None:
    """One tensor in memory at a time: twelve of 2 MiB."""
    rng = np.random.default_rng(0)
    arrays = {f"layer.{index}": rng.standard_normal([512, 1024], "float32") for index in range(12)}
    tensor = arrays["layer.0"].nbytes
    save_file(arrays, tmp_path / "big.safetensors")
    run("convert", tmp_path / "big.safetensors", tmp_path / "checkpoint", "--to", "checkpoint")  # loads modules once
    for words in (
        ("reshard", tmp_path / "checkpoint", tmp_path / "four", "--files", 4),
        ("merge", tmp_path / "four", tmp_path / "all.safetensors"),
        ("merge", tmp_path / "four", tmp_path / "all.pdparams"),
        ("convert", tmp_path / "four", tmp_path / "hf", "--to", "safetensors", "--max-size", "5M"),
        ("verify", tmp_path / "four"),
        ("diff", tmp_path / "four", tmp_path / "hf"),
    ):
        tracemalloc.start()
        run(*words)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (9 if words[0] == "diff" else 2.6) * tensor, words
    merged = load_file(tmp_path / "all.safetensors")
    assert all(merged[name].tobytes() == array.tobytes() for name, array in arrays.items())


def test_the_reader_of_the_documentation(ranks: Ranks, saved: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoint_format.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in CODES)
    space: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], space)
    expected = pickle.loads((saved / "rich.pickle").read_bytes())
    names = [key.removeprefix("model ") for key in expected if key.startswith("model ")]
    assert "head.weight" in names and len(names) == 17
    for name in names:
        found = space["read"](saved / "rich", name)
        assert found.shape == expected[f"model {name}"].shape
        assert found.tobytes() == expected[f"model {name}"].tobytes()


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (
        ["schedule", str(tmp_path / "nofile.txt"), "--stages", "2", "--micro-batches", "4"],
        ["schedule", "1f1b", "--stages", "2", "--micro-batches", "4", "--output", str(tmp_path / "no" / "x.svg")],
    ):
        assert main(words) == 2
        path = words[1] if words[1] != "1f1b" else words[-1]
        assert capsys.readouterr().err == f"error: {path}: No such file or directory\n"
