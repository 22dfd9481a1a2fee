from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corpus import Corpus, CorpusError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)) * 10)
    return Corpus.of_file(str(file))


def test_standard_library_is_python_and_capped() -> None:
    corpus = Corpus.of_stdlib(limit=100_000)
    text = bytes(corpus.train) + bytes(corpus.validation)
    assert len(text) == 100_000
    assert text.count(b"def ") > 100
    assert Corpus.of_stdlib(limit=100_000).checksum == corpus.checksum


def test_held_out_text_is_the_tail(corpus: Corpus) -> None:
    whole = np.arange(2000) % 200
    assert np.array_equal(corpus.train, whole[:1900])
    assert np.array_equal(corpus.validation, whole[1900:])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_read_one_total_batch(corpus: Corpus, ranks: int) -> None:
    def inputs(rank: int, of: int) -> np.ndarray:
        return corpus.batch(seed=3, step=7, seq=9, windows=8, rank=rank, ranks=of).inputs

    assert np.array_equal(np.concatenate([inputs(rank, ranks) for rank in range(ranks)]), inputs(0, 1))


def test_steps_and_seeds_read_different_windows(corpus: Corpus) -> None:
    read = {
        corpus.batch(seed=seed, step=step, seq=9, windows=8, rank=0, ranks=1).inputs.tobytes()
        for seed in range(4)
        for step in range(4)
    }
    assert len(read) == 16


def test_targets_are_the_bytes_after_the_inputs(corpus: Corpus) -> None:
    batch = corpus.batch(seed=0, step=0, seq=9, windows=8, rank=0, ranks=1)
    assert batch.inputs.shape == batch.targets.shape == (8, 9)
    assert np.array_equal(batch.targets, (batch.inputs + 1) % 200)  # the text counts up


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("windows", [1, 4, 7, 100])
def test_validation_windows_are_shared_out_evenly_and_weigh_once(corpus: Corpus, ranks: int, windows: int) -> None:
    parts = [corpus.held_out(seq=9, windows=windows, rank=rank, ranks=ranks) for rank in range(ranks)]
    count = min(windows, 10)  # 100 bytes hold 10 windows of 9 and the byte after
    assert len({len(part.inputs) for part in parts}) == 1
    weighing = [int(window[0]) for part in parts for window, weight in zip(part.inputs, part.weights) if weight]
    alone = corpus.held_out(seq=9, windows=windows)
    assert len(alone.inputs) == count
    assert sorted(weighing) == sorted(int(window[0]) for window in alone.inputs)
    assert len(set(weighing)) == count


def test_too_little_text_names_what_is_needed(corpus: Corpus) -> None:
    corpus.check(seq=99)
    with pytest.raises(CorpusError, match=r"2000 bytes of text, but --seq 100 needs 2020.*--data"):
        corpus.check(seq=100)


def test_missing_file_is_named() -> None:
    with pytest.raises(CorpusError, match=r"--data /nowhere: No such file"):
        Corpus.of_file("/nowhere")
