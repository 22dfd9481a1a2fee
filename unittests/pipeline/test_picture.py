from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.action import Plan
from paddle_group_sharded.pipeline.picture import save_picture, svg
from paddle_group_sharded.pipeline.schedules import gpipe, interleaved, one_f_one_b, zb_h1
from paddle_group_sharded.pipeline.simulate import Costs, timeline

SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture: str) -> dict[str, ElementTree.Element]:
    """Boxes of actions by the hint that is shown on hovering."""
    root = ElementTree.fromstring(picture)
    titled = ((box.find(f"{SVG}title"), box) for box in root.iter(f"{SVG}rect"))
    return {str(title.text): box for title, box in titled if title is not None}


def texts(picture: str) -> list[str]:
    return [str(text.text) for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_every_action_is_a_box_as_long_as_it_takes() -> None:
    found = boxes(svg(one_f_one_b(2, 2)))
    assert list(found) == [
        *("0F0: 0 to 1", "0F1: 1 to 2", "0B0: 4 to 6", "0B1: 7 to 9"),
        *("1F0: 1 to 2", "1B0: 2 to 4", "1F1: 4 to 5", "1B1: 5 to 7"),
    ]
    left = {hint: float(box.attrib["x"]) for hint, box in found.items()}
    unit = left["0F1: 1 to 2"] - left["0F0: 0 to 1"]
    for hint, box in found.items():
        start, stop = map(float, re.findall(r"(\d+) to (\d+)", hint)[0])
        assert left[hint] == pytest.approx(left["0F0: 0 to 1"] + start * unit, abs=0.01)
        assert float(box.attrib["width"]) == pytest.approx((stop - start) * unit - 1, abs=0.01)


def test_kinds_and_chunks_have_colours_of_their_own_and_ranks_rows() -> None:
    found = boxes(svg(zb_h1(2, 2)))
    assert len({(hint[1], box.attrib["fill"]) for hint, box in found.items()}) == 3
    assert len({(hint[0], box.attrib["y"]) for hint, box in found.items()}) == 2
    shades = {box.attrib["fill"] for hint, box in boxes(svg(interleaved(2, 2, 3))).items() if "F" in hint}
    assert len(shades) == 3


def test_the_numbers_of_a_plan_are_written_beside_it() -> None:
    words = texts(svg(one_f_one_b(2, 3), title="a <title> & more"))
    assert "a <title> & more" in words
    assert "bubble 25.00 %" in words
    assert words.count("25.0 %") == 2
    assert {"rank 0", "rank 1", "forward", "backward", "waits"} <= set(words)
    assert "weight gradient" not in words


def test_labels_that_do_not_fit_are_left_out() -> None:
    def labels(plan: Plan) -> int:
        return sum(word.isdigit() for word in texts(svg(plan)))

    assert labels(gpipe(2, 8)) > 32
    assert labels(gpipe(2, 100)) < 40  # ticks and peaks only


def test_what_was_measured_lies_under_the_plan_on_the_same_scale() -> None:
    measured = timeline(one_f_one_b(2, 2), Costs(0.25, 0.25, 0.25, transfer=0.125))
    found = boxes(svg(one_f_one_b(2, 2), measured=measured))
    assert svg(one_f_one_b(2, 2), measured=measured).count("<title>") == 16
    planned, run = found["0F0: 0 to 0.25"], found["1B1: 1.375 to 1.875"]
    assert float(run.attrib["width"]) + 1 == pytest.approx(2 * (float(planned.attrib["width"]) + 1), abs=0.02)
    words = texts(svg(one_f_one_b(2, 2), measured=measured))
    assert "bubble plan 33.33 %, run 40.00 %" in words
    assert {"plan", "run", "0.5 s"} <= set(words)


def test_what_was_measured_has_as_many_ranks() -> None:
    with pytest.raises(UsageError, match="the plan has 2 ranks, but the measured timeline has 3"):
        svg(one_f_one_b(2, 2), measured=timeline(one_f_one_b(3, 2)))


def test_pictures_are_written_as_the_name_says(tmp_path: Path) -> None:
    save_picture(tmp_path / "plan.svg", zb_h1(2, 3), title="zb_h1")
    assert (tmp_path / "plan.svg").read_text() == svg(zb_h1(2, 3), title="zb_h1")
    with pytest.raises(UsageError, match="end in .svg or .png; got 'plan.gif'"):
        save_picture(tmp_path / "plan.gif", zb_h1(2, 3))


def test_png(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    save_picture(tmp_path / "plan.png", zb_h1(2, 3), title="zb_h1, 2 stages, 3 micro-batches")
    pixels = image.imread(tmp_path / "plan.png")
    root = ElementTree.fromstring(svg(zb_h1(2, 3), title="zb_h1, 2 stages, 3 micro-batches"))
    assert pixels.shape[1] == pytest.approx(2 * float(root.attrib["width"]), abs=2)
    # the middle row of rank 0, in pixels of the SVG: its colours are those of the boxes there
    colours = {tuple(round(float(c) * 255) for c in pixel[:3]) for pixel in pixels[2 * 60, :]}
    fills = {box.attrib["fill"] for hint, box in boxes(svg(zb_h1(2, 3))).items() if hint.startswith("0")}
    assert {tuple(int(fill[i : i + 2], 16) for i in (1, 3, 5)) for fill in fills} <= colours


def test_png_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        save_picture(tmp_path / "plan.png", zb_h1(2, 3))
