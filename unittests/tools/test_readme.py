from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.S)


@pytest.mark.parametrize("name", ["README.md", "README_cn.md"])
def test_the_code_of_the_readme_runs(name: str, tmp_path: Path) -> None:
    code = "\n".join(BLOCK.findall((ROOT / name).read_text(encoding="utf-8")))
    assert "group_sharded_parallel" in code
    code += (
        "\nstate = paddle.load('output/linear/model.pdmodel')\n"
        "assert sorted(state) == ['bias', 'weight'] and state['weight'].shape == [1000, 10]\n"
        "assert (model.state_dict()['weight'].numpy() == state['weight'].numpy()).all()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr


def test_both_languages_show_the_same_code_and_numbers() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README_cn.md"))
    without_comments = [re.sub(r" *#.*", "", text) for text in (english, chinese)]
    assert BLOCK.findall(without_comments[0]) == BLOCK.findall(without_comments[1])
    numbers = [re.findall(r"\d+(?:\.\d+)? MB|\d+ ms", text) for text in (english, chinese)]
    assert numbers[0] == numbers[1]
