from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_options import STATE_FILE, parse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--level", "zero3"], "'zero3' (choose from "),
        (["--level", "zero3"], "p_g_os"),
        (["--amp", "O3"], "'O3' (choose from "),
        (["--layers", "0"], "--layers 0: expected 1 or more"),
        (["--stop-at", "0"], "--stop-at 0: expected 1 or more"),
        (["--eval-every", "-1"], "--eval-every -1: expected 0 or more"),
        (["--lr", "0"], "--lr 0.0: expected more than 0"),
        (["--lr", "nan"], "--lr nan: expected more than 0"),
        (["--clip", "-1"], "--clip -1.0: expected 0 (off) or more"),
        (["--min-lr", "1"], "--min-lr 1.0: expected 0 to the value of --lr, 0.005"),
        (["--dropout", "1"], "--dropout 1.0: expected 0 or more, and less than 1"),
        (["--width", "100", "--heads", "3"], "--width 100: expected a multiple of --heads, 3"),
        (["--batch", "9"], "--batch 9: expected a multiple of 2 ranks x --accumulate 1; for example 10"),
        (["--accumulate", "3"], "--batch 8: expected a multiple of 2 ranks x --accumulate 3; for example 12"),
        (
            ["--amp", "bf16", "--level", "none"],
            "--amp bf16: plain Paddle cannot step bfloat16 weights; expected ",
        ),
        (["--stages", "3"], "--stages 3: expected a divisor of the 2 ranks of this launch"),
        (["--stages", "2", "--level", "os"], "--level os: stages of a pipeline are not sharded; leave it out with"),
        (["--stages", "2", "--amp", "bf16"], "--amp bf16: "),
        (["--stages", "2", "--accumulate", "3"], "expected a multiple of 1 replicas x --accumulate 3; for example 9"),
        (["--stages", "2", "--save-every", "3"], "--save-every 3: a pipeline saves at the end"),
        (["--resume", "/nowhere"], "--resume /nowhere: no readable train_gpt.json there"),
    ],
)
def test_a_bad_value_ends_with_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments, ranks=2)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> str:
    options = vars(parse(["--width", "32", "--lr", "0.01", "--save", "there", "--stop-at", "3"], ranks=2))
    (tmp_path / STATE_FILE).write_text(json.dumps({"step": 3, "options": options}))
    return str(tmp_path)


def test_a_resumed_run_inherits_its_options_but_not_where_it_was_saved_or_stopped(folder: str) -> None:
    options = parse(["--resume", folder], ranks=2)
    assert (options.width, options.lr, options.resume) == (32, 0.01, folder)
    assert (options.save, options.stop_at) == ("output/gpt", None)


def test_a_pipeline_is_not_sharded_and_cannot_continue(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [parse(arguments, ranks=2).level for arguments in ([], ["--stages", "2"])] == ["p_g_os", "none"]
    with pytest.raises(SystemExit):
        parse(["--resume", folder, "--stages", "2", "--level", "none"], ranks=2)
    assert "--resume: a pipeline saves its weights only" in capsys.readouterr().err


def test_a_resumed_run_may_change_level_and_rate_but_not_the_model(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(["--resume", folder, "--level", "os", "--lr", "0.02"], ranks=4)
    assert (options.level, options.lr) == ("os", 0.02)
    with pytest.raises(SystemExit):
        parse(["--resume", folder, "--width", "64"], ranks=2)
    assert f"--width 64: the run in {folder} has 32; leave it out" in capsys.readouterr().err
