"""Inside a trainer: damaged checkpoints, saves that fail, saves in the background, memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Callable

import paddle
import paddle.distributed as dist

from paddle_group_sharded import (
    CheckpointManager,
    GroupShardedError,
    group_sharded_parallel,
    load_checkpoint,
    save_checkpoint,
)
from paddle_group_sharded.paddle_compat import allocated_bytes, peak_bytes
from unittests.checkpoint.whole import differing, whole_state
from unittests.harness import fresh
from unittests.sharding.dygraph_save import full_disk, read_only
from unittests.sharding.plain_paddle import build, train

WIDTH = 800
LOCKER = """
import sys, time
from pathlib import Path
from paddle_group_sharded.checkpoint.durable import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""

TRIES = """
import fcntl, sys
fcntl.lockf(open(sys.argv[1] + "/.lock", "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def make(level: str) -> tuple[Any, Any]:
    model, optimizer = build()
    if level != "plain":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
    return model, optimizer


def barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except GroupShardedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# --------------------------------------------------------------------------------------------------------------- damage


def _tensor_file(folder: str, number: int) -> Path:
    return sorted(Path(folder).glob("*.safetensors"))[number]


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def _resize(path: Path, difference: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:difference] if difference < 0 else data + bytes(difference))


def _version(folder: str) -> None:
    path = Path(folder) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 7'))


def _reword(old: str, new: str) -> Callable[[str], Any]:
    """Another text in the manifest, under a checksum that is right."""

    def reword(folder: str) -> None:
        path = Path(folder) / "manifest.json"
        text = path.read_bytes().replace(old.encode(), new.encode())
        text = text[: text.rindex(b', "checksum"')]
        path.write_bytes(text + b', "checksum": "%08x"}\n' % zlib.crc32(text))

    return reword


def _swap(folder: str) -> None:
    """The files of two ranks under each other's names, as after a wrong copy."""
    one, other = _tensor_file(folder, 0), _tensor_file(folder, -1)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def damages(ranks: int) -> dict[str, tuple[Callable[[str], Any], str]]:
    """What is done to a good folder, and words of the message."""
    manifest = "manifest.json"
    found: dict[str, tuple[Callable[[str], Any], str]] = {
        "no folder": (shutil.rmtree, "is no folder"),
        "no manifest": (lambda f: os.remove(f"{f}/{manifest}"), "manifest.json does not exist"),
        "empty manifest": (lambda f: Path(f, manifest).write_text(""), "manifest.json is damaged"),
        "flipped manifest": (lambda f: _flip(Path(f, manifest), 3000), "manifest.json"),
        "another version": (_version, "manifest.json has version 7 of the format, this release reads version 1"),
        "world_size": (_reword(f'"world_size": {ranks}', '"world_size": "x"'), "world_size is 'x', expected a number"),
        "other type": (_reword('"dtype": "float32"', '"dtype": "float16"'), "is float32, expected float16 as in"),
        "unknown type": (_reword('"dtype": "float32"', '"dtype": "foo"'), "has dtype 'foo', expected one of"),
        "another format": (lambda f: Path(f, manifest).write_text('{"map": {}}'), "manifest.json is no manifest"),
    }
    for number in range(ranks):
        name = f"-0000{number}.safetensors"
        found[f"missing file {number}"] = (lambda f, n=number: os.remove(_tensor_file(f, n)), f"{name} cannot be read")
        found[f"truncated {number}"] = (lambda f, n=number: _resize(_tensor_file(f, n), -1), f"{name} is truncated")
        found[f"longer {number}"] = (lambda f, n=number: _resize(_tensor_file(f, n), 8), f"{name} is damaged")
        found[f"last byte {number}"] = (lambda f, n=number: _flip(_tensor_file(f, n), -1), f"{name} is damaged")
        found[f"header {number}"] = (lambda f, n=number: _flip(_tensor_file(f, n), 30), name)
        found[f"length {number}"] = (lambda f, n=number: _flip(_tensor_file(f, n), 6), f"{name} is damaged")
    if ranks > 1:
        found["swapped"] = (_swap, ".safetensors")
    return found


def damaged(folder: str, level: str) -> dict[str, Any]:
    """Every kind of damage: the message, and what has changed in memory."""
    rank = dist.get_rank()
    model, optimizer = make(level)
    train(model, optimizer, 0, 1, rank)
    good, bad = f"{folder}/good", f"{folder}/bad"
    save_checkpoint(good, model, optimizer)
    train(model, optimizer, 1, 3, rank)
    before = whole_state(model, optimizer)
    random = paddle.get_rng_state()
    results: dict[str, Any] = {}
    for kind, (damage, words) in damages(dist.get_world_size()).items():
        if rank == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            damage(bad)
        barrier()
        said = attempt(lambda: load_checkpoint(bad, model, optimizer))
        after = whole_state(model, optimizer)
        results[kind] = (said, words, differing(before, after))
    expected = paddle.rand([4]).numpy()
    paddle.set_rng_state(random)
    results["random states"] = bool((paddle.rand([4]).numpy() == expected).all())
    load_checkpoint(good, model, optimizer)
    train(model, optimizer, 3, 4, rank)
    return results


# --------------------------------------------------------------------------------------------------------- failed saves


def on_rank(wanted: int, context: Any) -> Any:
    return context if dist.get_rank() == wanted else nullcontext()


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Another process is writing into ``folder``."""
    other = None
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        other = subprocess.Popen([sys.executable, "-c", LOCKER, folder], stdout=subprocess.PIPE)
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
    barrier()
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.communicate()
        barrier()


def failing_saves(folder: str, level: str) -> dict[str, Any]:
    """The checkpoint before survives whatever goes wrong; every rank hears of it, and training goes on."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model, optimizer = make(level)
    train(model, optimizer, 0, 1, rank)
    good = f"{folder}/good"
    save_checkpoint(good, model, optimizer, extra=1)
    barrier()
    before = contents(good)
    train(model, optimizer, 1, 2, rank)
    results: dict[str, Any] = {}

    def fails(kind: str, context: Any, **options: Any) -> None:
        path = options.pop("path", good)
        with context:
            said = attempt(lambda: save_checkpoint(path, model, options.pop("optimizer", optimizer), **options))
            barrier()
        results[kind] = (said, contents(good) == before)
        barrier()

    Path(f"{folder}/file{rank}").write_text("x")
    fails("full disk", on_rank(last, full_disk(2000)))
    fails("full disk for the manifest", on_rank(0, full_disk(300_000)), extra="x" * 400_000)
    fails("read-only", on_rank(last, read_only(good)))
    fails("a file", nullcontext(), path=f"{folder}/file0")
    fails("below a file", nullcontext(), path=f"{folder}/file0/deeper")
    fails("not a path", nullcontext(), path=5)
    if last > 0:
        fails("two paths", nullcontext(), path=f"{folder}/good{rank}" if rank else good)
        fails("different extra", nullcontext(), extra={"rank": rank})
    fails("an object", nullcontext(), extra={"set": {1}})
    fails("another model's optimizer", nullcontext(), optimizer=build()[1])
    fails("locked", locked(good))
    save_checkpoint(good, model, optimizer, extra={"rank": 0} if rank == 0 else None)
    barrier()
    results["afterwards"] = (len(contents(good)), len(before), load_checkpoint(good, model, optimizer))
    train(model, optimizer, 2, 3, rank)
    return results


# ------------------------------------------------------------------------------------------------------- in background


def background(folder: str, level: str) -> dict[str, Any]:
    """Training goes on while a copy is written; errors come with the next call."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model, optimizer = make(level)
    train(model, optimizer, 0, 2, rank)
    expected = whole_state(model, optimizer)
    pending = save_checkpoint(f"{folder}/one", model, optimizer, extra=2, async_save=True)
    train(model, optimizer, 2, 4, rank)  # changes what was saved while it is being written
    pending.wait()
    pending.wait()
    later = whole_state(model, optimizer)
    results: dict[str, Any] = {"trained on": len(differing(expected, later)) > 10}
    results["extra"] = load_checkpoint(f"{folder}/one", model, optimizer)
    results["as saved"] = differing(expected, whole_state(model, optimizer))
    barrier()
    results["files"] = sorted(path.suffix for path in Path(folder, "one").iterdir() if path.name != ".lock")

    with on_rank(last, full_disk(2000)):
        save_checkpoint(f"{folder}/one", model, optimizer, extra=3, async_save=True)
        train(model, optimizer, 4, 5, rank)
        results["next save"] = attempt(lambda: save_checkpoint(f"{folder}/two", model, optimizer))
    results["two was not begun"] = not os.path.exists(f"{folder}/two")
    results["one is whole"] = load_checkpoint(f"{folder}/one", model, optimizer)
    save_checkpoint(f"{folder}/two", model, optimizer, extra=4, async_save=True)
    results["load waits"] = load_checkpoint(f"{folder}/two", model, optimizer)
    save_checkpoint(f"{folder}/three", model, optimizer, async_save=True)
    results["next save waits"] = save_checkpoint(f"{folder}/four", model, optimizer) is not None
    results["three is complete"] = os.path.exists(f"{folder}/three/manifest.json")
    return results


# -------------------------------------------------------------------------------------------------------------- memory


def memory(folder: str, level: str) -> dict[str, float]:
    """Bytes beyond those before, in tensors of the model: the most during a save and a load, and after them."""
    model = paddle.nn.Sequential(*(paddle.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    if level != "plain":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
    model(paddle.ones([2, WIDTH])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    tensor = 4 * WIDTH * WIDTH
    save_checkpoint(folder, model, optimizer)
    load_checkpoint(folder, model, optimizer)
    results: dict[str, float] = {}
    for kind, action in (("save", save_checkpoint), ("load", load_checkpoint)):
        # Paddle 2.6 cannot reset its peak: reach it on purpose.
        before = allocated_bytes()
        filler = paddle.empty([max(4, peak_bytes() - before) // 4 + 1])
        base = peak_bytes()
        del filler
        results[f"{kind} headroom"] = (base - before) / tensor
        filler = paddle.empty([max(4, base - allocated_bytes() - 4096) // 4])  # so that any growth is a new peak
        tracemalloc.start()
        action(folder, model, optimizer)
        results[f"{kind} arrays"] = tracemalloc.get_traced_memory()[1] / tensor
        tracemalloc.stop()
        results[f"{kind} tensors"] = (peak_bytes() - base) / tensor
        del filler
        results[f"{kind} after"] = (allocated_bytes() - before) / tensor
    return results


# -------------------------------------------------------------------------------------------------------------- manager


def manager(folder: str, level: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model, optimizer = make(level)
    results: dict[str, Any] = {}
    ours = CheckpointManager(folder, keep=2)
    results["nothing"] = (ours.restore(model, optimizer), ours.latest(), os.path.exists(folder))
    for step in range(1, 5):
        train(model, optimizer, step - 1, step, rank)
        ours.save(step, model, optimizer, extra={"step": step}, async_save=step == 3)
    state = whole_state(model, optimizer)
    results["kept"] = ours.steps()
    results["order"] = attempt(lambda: ours.save(2, model, optimizer))
    if rank == 0:  # what a killed save and a removal that was cut off leave behind
        os.makedirs(ours.path(9))
        Path(ours.path(9), "0123456789abcdef-00000.safetensors.writing").write_text("x")
        Path(folder, "notes.txt").write_text("mine")
    barrier()
    ours.close()

    fresh()
    model, optimizer = make(level)
    other = CheckpointManager(folder, keep=2)
    results["another run"] = attempt(lambda: other.save(5, model, optimizer))
    restored = other.restore(model, optimizer)
    results["newest"] = (restored.step, restored.extra, bool(restored.report))
    results["state"] = differing(state, whole_state(model, optimizer))
    results["older"] = other.restore(model, optimizer, step=3).extra
    odd = ("x", 2.0, True, -1)
    results["no step"] = [attempt(lambda step=step: other.restore(model, optimizer, step=step)) for step in odd]
    results["gone"] = attempt(lambda: other.restore(model, optimizer, step=1))
    with on_rank(0, full_disk(3000)):
        results["failed"] = attempt(lambda: other.save(4, model, optimizer))
    barrier()
    results["after the failure"] = other.steps()
    other.save(3, model, optimizer, extra={"step": "3 again"})  # goes back: the old step 4 is no longer the newest
    barrier()
    results["went back"] = (other.steps(), other.restore(model, optimizer).extra)
    other.close()
    results["left"] = sorted(path.name for path in Path(folder).iterdir())
    with locked(folder):
        results["another job"] = attempt(lambda: other.save(6, model, optimizer))
    other.save(6, model, optimizer)
    second = CheckpointManager(folder)
    second.restore(model, optimizer)
    results["another manager"] = [attempt(lambda: second.save(7, model, optimizer)) for _ in range(2)]
    second.close()
    barrier()
    tried = subprocess.run([sys.executable, "-c", TRIES, folder], stderr=subprocess.DEVNULL)
    results["still locked"] = tried.returncode
    barrier()
    other.save(7, model, optimizer)
    other.close()
    second.save(8, model, optimizer)
    second = CheckpointManager(folder)  # the one before is gone without close()
    second.restore(model, optimizer)
    second.save(9, model, optimizer)
    second.close()
    results["arguments"] = [attempt(lambda keep=keep: CheckpointManager(folder, keep)) for keep in (0, True, "3")]
    return results


