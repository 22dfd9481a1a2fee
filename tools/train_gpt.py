"""Trains a byte-level GPT at any sharding level or as a pipeline, then reads it back with nothing but Paddle.

In two processes:  fleetrun --nproc_per_node 2 tools/train_gpt.py --level p_g_os
As a pipeline:     fleetrun --nproc_per_node 2 tools/train_gpt.py --stages 2 --accumulate 8
In one:            python tools/train_gpt.py

A user's own script differs from this one in the model and the data; the lines that matter are in ``Trainer``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from corpus import Corpus, CorpusError, Windows
from gpt import GPT, GPTConfig, generate
from gpt_optimizer import adamw
from gpt_pipeline import PipelineTrainer
from paddle.distributed import fleet
from train_checkpoints import Checkpoints
from train_options import STATE_FILE, parse, read_state
from train_report import Measured, progress_bar, say, table

from paddle_group_sharded import group_sharded_parallel, load_group_sharded_model, save_group_sharded_model
from paddle_group_sharded.errors import CheckpointError, UsageError
from paddle_group_sharded.paddle_compat import allocated_bytes, peak_bytes

VALIDATION_WINDOWS = 128


class Ranks:
    """The processes that train together; the only place of this script that communicates by itself."""

    def __init__(self) -> None:
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()
        if self.size > 1:
            fleet.init(is_collective=True, log_level="WARNING")

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in fp64; collective."""
        total = paddle.to_tensor(np.array(values, dtype="float64"))
        if self.size > 1:
            dist.all_reduce(total)
        return [float(value) for value in total.numpy()]

    def gather(self, value: float) -> list[float]:
        """The value of each rank; collective."""
        return self.sum([value if rank == self.rank else 0.0 for rank in range(self.size)])


class Trainer:
    """The model, its optimizer and the loop body."""

    def __init__(self, options: Any, corpus: Corpus, ranks: Ranks) -> None:
        self.options, self.corpus, self.ranks = options, corpus, ranks
        self.measured = Measured()
        paddle.seed(options.seed)  # the same weights on every rank
        net = new_model(options)
        self.num_parameters = sum(int(np.prod(parameter.shape)) for parameter in net.parameters())
        self.scheduler, optimizer = adamw(net.parameters(), options)
        if options.amp == "O2":
            net, optimizer = paddle.amp.decorate(net, optimizer, level="O2", dtype=options.amp_dtype)
        fp16 = options.amp in ("O1", "O2") and options.amp_dtype == "float16"
        scaler = paddle.amp.GradScaler() if fp16 else None

        if options.level != "none":
            net, optimizer, scaler = group_sharded_parallel(net, optimizer, options.level, scaler=scaler)
        elif ranks.size > 1:
            net = paddle.DataParallel(net)
        self.model, self.optimizer, self.scaler = net, optimizer, scaler

    def step(self, index: int) -> float:
        """Optimizer step ``index``; the mean loss over the ranks, before the step."""
        options, ranks = self.options, self.ranks
        started = time.perf_counter()
        # Dropout differs between ranks and steps, and is the same again when a run is resumed.
        paddle.seed((options.seed * 1_000_003 + index) * ranks.size + ranks.rank)
        batch = self.corpus.batch(
            seed=options.seed, step=index, seq=options.seq, windows=options.batch, rank=ranks.rank, ranks=ranks.size
        )
        mine = 0.0
        size = len(batch.inputs) // options.accumulate
        for micro in range(options.accumulate):
            part = slice(micro * size, (micro + 1) * size)
            with self._communication(last=micro == options.accumulate - 1):
                with self._amp():
                    loss = window_losses(self.model, batch, part).mean() / options.accumulate
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            mine += loss.item()
        del loss  # it holds the last activations
        self.measured.states_bytes = allocated_bytes()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.clear_grad()
        self.scheduler.step()
        mean = ranks.sum([mine])[0] / ranks.size
        self.measured.losses.append(mean)
        self.measured.seconds.append(time.perf_counter() - started)
        return mean

    def validate(self) -> float:
        """Mean loss over the validation windows of all ranks; collective."""
        return validation_loss(self.model, self.corpus, self.options, self.ranks.rank, self.ranks.size, self.ranks.sum)

    def save(self, step: int) -> None:
        """Write the weights, the optimizer and, last, the step: without it a folder is unfinished.  Collective."""
        folder = Path(self.options.save)
        if self.ranks.rank == 0:
            (folder / STATE_FILE).unlink(missing_ok=True)
        if self.options.level == "none":
            if self.ranks.rank == 0:
                paddle.save(self.model.state_dict(), str(folder / "model.pdmodel"))
                paddle.save(self.optimizer.state_dict(), str(folder / "model.pdopt"))
        else:
            save_group_sharded_model(self.model, str(folder), optimizer=self.optimizer)
        if self.ranks.rank == 0:
            state = {"step": step, "checksum": self.corpus.checksum, "options": vars(self.options)}
            (folder / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    def resume(self) -> int:
        """Continue what ``--resume`` names; the steps it has done.  Any level and number of ranks may have saved it."""
        state = read_state(self.options.resume)
        if state["checksum"] != self.corpus.checksum:
            raise CorpusError(f"--resume {self.options.resume}: its text was another than {self.corpus.source}")
        load_group_sharded_model(self.model, self.options.resume, optimizer=self.optimizer)
        if self.scheduler.last_epoch != state["step"]:
            raise CorpusError(
                f"--resume {self.options.resume}: {STATE_FILE} says step {state['step']}, but the optimizer's file "
                f"step {self.scheduler.last_epoch}: they are not of one saving; resume from another folder"
            )
        return int(state["step"])

    def _communication(self, *, last: bool) -> Any:
        """Where gradients stay whole, they are reduced once, with the last micro-batch.

        At os_g and p_g_os each micro-batch is reduced at once: a rank never keeps what it does not own.
        """
        whole = self.options.level == "os" or (self.options.level == "none" and self.ranks.size > 1)
        return self.model.no_sync() if whole and not last else contextlib.nullcontext()

    def _amp(self) -> Any:
        if self.options.amp not in ("O1", "O2"):
            return contextlib.nullcontext()
        return paddle.amp.auto_cast(level=self.options.amp, dtype=self.options.amp_dtype)


class Stages(PipelineTrainer):
    """The same steps, on a model that is spread over ranks; it is saved at the end, weights only."""

    def __init__(self, options: Any, corpus: Corpus, ranks: Ranks) -> None:
        super().__init__(options, corpus, ranks)

    def validate(self, windows: int = VALIDATION_WINDOWS) -> float:
        """Mean loss over the validation windows of all replicas; collective."""
        return super().validate(windows)

    def save(self, step: int) -> None:
        """Write the weights; collective."""
        self.save_weights(Path(self.options.save))


def new_model(options: Any) -> GPT:
    """The model that the options describe, before any wrapping."""
    model = GPT(GPTConfig(options.layers, options.width, options.heads, options.seq, options.dropout))
    if options.amp == "bf16":
        model.to(dtype="bfloat16")
    return model


def last_step(options: Any) -> int:
    """Where this launch ends."""
    return int(options.steps if options.stop_at is None else min(options.stop_at, options.steps))


def window_losses(model: paddle.nn.Layer, batch: Windows, part: slice) -> paddle.Tensor:
    """Mean cross entropy in nats per byte of each window in ``part`` of ``batch``, [windows]."""
    logits = model(paddle.to_tensor(batch.inputs[part]))
    losses = F.cross_entropy(logits, paddle.to_tensor(batch.targets[part]), reduction="none")
    return losses.reshape([logits.shape[0], -1]).mean(axis=1)


def validation_loss(model: paddle.nn.Layer, corpus: Corpus, options: Any, rank: int, ranks: int, total: Any) -> float:
    """Mean loss of the held out windows; ``total`` sums numbers over the ranks that share them."""
    batch = corpus.held_out(seq=options.seq, windows=VALIDATION_WINDOWS, rank=rank, ranks=ranks)
    chunk = max(1, options.batch // ranks)
    model.eval()
    with paddle.no_grad():
        parts = [slice(start, start + chunk) for start in range(0, len(batch.inputs), chunk)]
        losses = np.concatenate([window_losses(model, batch, part).numpy() for part in parts])
    model.train()
    loss, weight = total([float((losses * batch.weights).sum()), float(batch.weights.sum())])
    return float(loss / weight)


def read_back(options: Any, corpus: Corpus) -> str:
    """Load what was saved into a plain model with plain Paddle, validate it in this process, and let it write."""
    model = new_model(options)
    model.set_state_dict(paddle.load(os.path.join(options.save, "model.pdmodel")))
    loss = validation_loss(model, corpus, options, 0, 1, lambda values: values)
    prompt = b"\ndef "
    text = prompt + generate(model, prompt, options.sample, options.temperature, options.seed)
    return (
        f"read back into an unwrapped model, one process: validation loss {loss:.4f}\n"
        f"a sample of {options.sample} bytes:\n{text.decode('utf-8', 'replace')}"
    )


def train(trainer: Union[Trainer, Stages], start: int, checkpoints: Optional[Checkpoints]) -> float:
    """Steps ``start`` to the end, with a progress bar on rank 0; the last validation loss."""
    options = trainer.options
    stop = last_step(options)
    bar = progress_bar(start, options.steps, disable=trainer.ranks.rank != 0)
    with bar:
        say(bar, f"step {start}: validation loss {trainer.validate():.4f}")
        for index in range(start, stop):
            loss = trainer.step(index)
            speed = options.batch * options.seq / trainer.measured.seconds[-1]
            live = f"{allocated_bytes() / 1e6:.1f}MB"
            bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}", live=live, refresh=False)
            bar.update()
            done = index + 1
            if options.eval_every and done % options.eval_every == 0 and done < stop:
                say(bar, f"step {done}: validation loss {trainer.validate():.4f}")
            if options.save_every and done % options.save_every == 0 and done < stop:
                trainer.save(done)
            if checkpoints is not None:
                checkpoints.after_step(done, last=done == stop)
        validation = trainer.validate()
        say(bar, f"step {stop}: validation loss {validation:.4f}")
    return validation


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the whole job; 0, or 1 with a line on what is wrong."""
    options = parse(arguments, dist.get_world_size())
    if options.amp in ("O1", "O2") and paddle.get_device() == "cpu":
        return refuse(f"--amp {options.amp}: auto_cast does nothing on CPU, where only --amp none and bf16 are allowed")
    try:
        corpus = Corpus.of_stdlib() if options.data is None else Corpus.of_file(options.data)
        corpus.check(options.seq)
        Path(options.save).mkdir(parents=True, exist_ok=True)
        ranks = Ranks()
        trainer: Any = (Trainer if options.stages == 1 else Stages)(options, corpus, ranks)
        checkpoints = None if options.checkpoint is None else Checkpoints(trainer)
        start = 0 if checkpoints is None else checkpoints.restore()
        if options.resume is not None and start == 0:
            start = trainer.resume()
        if start >= last_step(options):
            folder = options.checkpoint or options.resume
            return refuse(f"{folder}: it has done its {start} steps; ask for more with --steps")
        if ranks.rank == 0:
            sizes = f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out"
            print(f"{corpus.source}: {sizes}", flush=True)
        validation = train(trainer, start, checkpoints)
        summary = summarize(trainer, validation)
        trainer.save(trainer.scheduler.last_epoch)
    except (CorpusError, CheckpointError, UsageError, OSError) as error:
        return refuse(str(error))
    if ranks.rank == 0:
        print(summary, read_back(options, corpus), sep="\n\n", flush=True)
    return 0


def summarize(trainer: Any, validation: float) -> str:
    """The table of the run so far, and how full the pipeline was; collective."""
    report = f"\n\n{trainer.report()}" if trainer.options.stages > 1 else ""
    lines = table(
        level=trainer.options.level,
        parameters=trainer.num_parameters,
        tokens=trainer.options.batch * trainer.options.seq,
        measured=trainer.measured,
        validation=validation,
        states=trainer.ranks.gather(trainer.measured.states_bytes),
        peaks=trainer.ranks.gather(peak_bytes()),
        sixteen_bit=trainer.options.amp in ("O2", "bf16"),
        stages=trainer.options.stages,
    )
    return lines + report


def refuse(reason: str) -> int:
    """Say why the run ends."""
    print(f"train_gpt.py: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
