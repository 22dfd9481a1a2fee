"""Trains AlexNet as a pipeline on real images of digits, and draws its loss and its timeline.

In two processes:  fleetrun --nproc_per_node 2 tools/train_alexnet.py
In one:            python tools/train_alexnet.py

Needs the extra ``plot`` (scikit-learn for the images, matplotlib for the picture of the loss).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from digits import Digits, load_digits
from help_format import HelpFormatter
from paddle import nn
from paddle.distributed import fleet

from paddle_group_sharded import LayerDesc, PipelineLayer, pipeline_parallel
from paddle_group_sharded.errors import UsageError
from paddle_group_sharded.pipeline.picture import save_picture


class AlexNetPipeDesc(PipelineLayer):
    """AlexNet for images of 32 x 32, described layer by layer; each rank builds its own ones."""

    def __init__(self, num_classes: int = 10, **kwargs: Any) -> None:
        descs = [
            LayerDesc(nn.Conv2D, 3, 64, kernel_size=11, stride=4, padding=5),
            LayerDesc(nn.ReLU),
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
            LayerDesc(nn.Conv2D, 64, 192, kernel_size=5, padding=2),
            F.relu,
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
            LayerDesc(nn.Conv2D, 192, 384, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.Conv2D, 384, 256, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.Conv2D, 256, 256, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
            lambda x: x.flatten(1),
            LayerDesc(nn.Linear, 256, num_classes),
        ]
        super().__init__(layers=descs, loss_fn=[nn.CrossEntropyLoss(), error_rate], **kwargs)


def error_rate(output: Any, label: Any) -> Any:
    """The share of images that are taken for another digit; a second loss, so that every rank knows it."""
    return (output.argmax(axis=-1) != label).astype("float32").mean()


class Trainer:
    """The model, its optimizer, and one pass through the images at a time."""

    def __init__(self, options: Any, train: Digits, test: Digits) -> None:
        self.options, self.train, self.test = options, train, test
        paddle.seed(options.seed)
        layer = AlexNetPipeDesc(
            num_stages=options.stages,
            seg_method=segmentation(options.seg_method),
            num_virtual_pipeline_stages=options.chunks,
            sample_input=paddle.to_tensor(train.images[: max(1, options.batch // options.micro_batches)]),
        )
        self.grid = layer.grid
        if options.table and dist.get_rank() == 0:
            print(layer.table())
        steps = options.epochs * -(-len(train.digits) // options.batch)
        self.scheduler = paddle.optimizer.lr.CosineAnnealingDecay(options.lr, T_max=steps)
        optimizer = paddle.optimizer.AdamW(self.scheduler, parameters=layer.parameters(), weight_decay=0.01)
        self.model, self.optimizer = pipeline_parallel(
            layer, optimizer, micro_batches=options.micro_batches, schedule=options.schedule
        )

    def epoch(self, number: int) -> list[float]:
        """One pass through the images to train on, in an order that depends on the seed; the loss of each step."""
        order = np.random.RandomState(self.options.seed * 1000 + number).permutation(len(self.train.digits))
        losses = []
        for part in batches_of(order, self.options.batch):
            mine = part[self.grid.replica :: self.grid.num_replicas]  # replicas share a batch
            batch = [paddle.to_tensor(self.train.images[mine]), paddle.to_tensor(self.train.digits[mine])]
            loss, _ = self.model.train_batch(batch, self.optimizer, self.scheduler)
            losses.append(loss.item())
        return losses

    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy on the images to test with."""
        loss, errors = 0.0, 0.0
        for part in batches_of(np.arange(len(self.test.digits)), self.options.batch):
            digits = self.test.digits[part]
            batch = [paddle.to_tensor(self.test.images[part]), paddle.to_tensor(digits)]
            values = self.model.eval_batch(batch, compute_loss=True)
            loss, errors = (now + value.item() * len(digits) for now, value in zip((loss, errors), values))
        return loss / len(self.test.digits), 1 - errors / len(self.test.digits)


def batches_of(order: np.ndarray, size: int) -> list[np.ndarray]:
    """``order`` in pieces of at most ``size``, as equal as can be."""
    return np.array_split(order, -(-len(order) // size))


def run(options: Any) -> float:
    """The whole job; the accuracy at the end."""
    shows = dist.get_rank() == 0
    train, test = load_digits()
    train = Digits(*(values[: options.images] for values in train))
    started = time.perf_counter()
    trainer = Trainer(options, train, test)
    losses: list[float] = []
    accuracies: list[float] = []
    for number in range(options.epochs):
        losses += trainer.epoch(number)
        loss, accuracy = trainer.evaluate()
        accuracies.append(accuracy)
        if shows:
            seconds = time.perf_counter() - started
            print(
                f"epoch {number + 1:>2}: loss {losses[-1]:.4f}, test loss {loss:.4f}, "
                f"test accuracy {100 * accuracy:.2f} %, {seconds:.0f} s",
                flush=True,
            )
    report, measured = trainer.model.report(), trainer.model.gather_timeline()  # collective
    if shows:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        print(report)
        title = f"AlexNet, {options.schedule}, {trainer.grid.num_stages} stages"
        save_picture(folder / "timeline.svg", trainer.model.planned_timeline, title=title, measured=measured)
        draw_loss(folder / "loss.png", losses, accuracies)
        print(f"pictures: {folder / 'loss.png'}, {folder / 'timeline.svg'}")
    return accuracies[-1]


def draw_loss(path: Path, losses: Sequence[float], accuracies: Sequence[float]) -> None:
    """Loss of each step, and accuracy after each epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.subplots()
    left.plot(range(1, len(losses) + 1), losses, color="#3f76bf", linewidth=1)
    left.set(xlabel="step", ylabel="training loss", yscale="log", title="AlexNet on digits")
    right = left.twinx()
    ends = [len(losses) * (epoch + 1) / len(accuracies) for epoch in range(len(accuracies))]
    right.plot(ends, [100 * accuracy for accuracy in accuracies], color="#d98a29", marker="o", markersize=3)
    right.set(ylabel="test accuracy, %", ylim=(0, 101))
    figure.savefig(path, dpi=120)


def segmentation(text: str) -> Any:
    """``"0,6"`` as the list of bounds that it is."""
    return [int(part) for part in text.split(",")] if text.replace(",", "").isdigit() else text


def parse(arguments: Sequence[str]) -> Any:
    """The options; ends the process with one line on what is wrong."""
    parser = argparse.ArgumentParser(
        description="Trains AlexNet as a pipeline on real images of digits.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--stages", type=int, help="ranks of a pipeline; others are replicas (default: all ranks)")
    add("--chunks", type=int, default=1, help="virtual stages per rank, for --schedule interleaved")
    add("--schedule", default="1f1b", help="1f1b, gpipe, zb_h1, interleaved, or the path of a plan (.txt, .csv)")
    add("--seg-method", default="uniform", help="where to cut: uniform, parameters, time, memory, layer:<regex>, 0,6")
    add("--table", action="store_true", help="print the balance of the stages too")
    add("--epochs", type=int, default=4)
    add("--batch", type=int, default=64, help="images in a step, over all replicas")
    add("--micro-batches", type=int, default=4, help="into how many a replica's part of a batch is cut")
    add("--lr", type=float, default=7e-4, help="highest learning rate")
    add("--seed", type=int, default=1, help="of weights and order")
    add("--images", type=int, help="how many to train on (default: all 1,442)")
    add("--output", metavar="DIR", default="output/alexnet", help="folder of the pictures")
    options = parser.parse_args(arguments)
    for name in ("chunks", "epochs", "batch", "micro_batches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 1 or more")
    return options


def main() -> None:
    """Start the ranks' part of the job."""
    options = parse(sys.argv[1:])
    if dist.get_world_size() > 1:
        fleet.init(is_collective=True, log_level="WARNING")
    options.stages = options.stages or dist.get_world_size()
    try:
        run(options)
    except ImportError as error:
        sys.exit(f"{Path(__file__).name}: error: {error}; the images and pictures need pip install '.[plot]'")
    except UsageError as error:
        sys.exit(f"{Path(__file__).name}: error: {error}")


if __name__ == "__main__":
    main()
