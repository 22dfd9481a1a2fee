"""The GPT of gpt.py as a pipeline: the same model as a list of layers, and the trainer that runs it.

The embedding stands at both ends, tied: the first stage looks tokens up in it, the last one compares with its rows.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from gpt import Block, Embedding, GPTConfig, LayerNorm
from gpt_optimizer import adamw
from paddle import nn
from train_report import Measured

from paddle_group_sharded import LayerDesc, PipelineLayer, SharedLayerDesc, pipeline_parallel
from paddle_group_sharded.paddle_compat import allocated_bytes

__all__ = ["PipelineTrainer", "gpt_layers", "gpt_name"]


def gpt_layers(config: GPTConfig) -> list[Any]:
    """What ``GPT(config)`` runs, one after the other; nothing is built yet."""

    def embedding(forward: Any) -> SharedLayerDesc:
        normal = paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, 0.02))
        return SharedLayerDesc(
            "embedding", Embedding, forward, "weight", config.vocabulary, config.width, weight_attr=normal
        )

    return [
        embedding(None),
        LayerDesc(nn.Dropout, config.dropout),
        *[LayerDesc(Block, config) for _ in range(config.layers)],
        LayerDesc(LayerNorm, config.width),
        embedding(_logits),
    ]


def gpt_name(name: str, config: GPTConfig) -> str:
    """What ``GPT`` calls the weight that the list of layers calls ``name``."""
    number, _, rest = name.partition(".")
    places = {0: "embedding", config.layers + 2: "norm", config.layers + 3: "embedding"}
    return f"{places.get(int(number), f'blocks.{int(number) - 2}')}.{rest}"


class PipelineTrainer:
    """What ``train_gpt.Trainer`` does, by ``train_batch`` and ``eval_batch``; all calls are collective."""

    def __init__(self, options: Any, corpus: Any, ranks: Any) -> None:
        self.options, self.corpus, self.ranks = options, corpus, ranks
        self.measured = Measured()
        self.config = GPTConfig(options.layers, options.width, options.heads, options.seq, options.dropout)
        layer = PipelineLayer(
            gpt_layers(self.config), num_stages=options.stages, loss_fn=mean_loss, seed=options.seed
        )
        self.layer, self.grid = layer, layer.grid
        counted = [float(parameter.size) for parameter in layer.parameters() if layer.shared.counted(parameter)]
        self.num_parameters = round(ranks.sum([sum(counted)])[0] / self.grid.num_replicas)
        self.scheduler, optimizer = adamw(layer.parameters(), options)
        self.model, self.optimizer = pipeline_parallel(layer, optimizer, options.accumulate, options.schedule)

    def step(self, index: int) -> float:
        """Optimizer step ``index``; the mean loss over the replicas, before the step."""
        started = time.perf_counter()
        batch = self.corpus.batch(
            seed=self.options.seed,
            step=index,
            seq=self.options.seq,
            windows=self.options.batch,
            rank=self.grid.replica,
            ranks=self.grid.num_replicas,
        )
        loss = self.model.train_batch([batch.inputs, batch.targets], self.optimizer, self.scheduler)
        self.measured.states_bytes = allocated_bytes()
        mean = self.ranks.sum([float(loss.item())])[0] / self.ranks.size  # every rank of a replica has its loss
        self.measured.losses.append(mean)
        self.measured.seconds.append(time.perf_counter() - started)
        return mean

    def validate(self, windows: int) -> float:
        """Mean loss of the held out windows, which the replicas share."""
        seq, replicas = self.options.seq, self.grid.num_replicas
        batch = self.corpus.held_out(seq=seq, windows=windows, rank=self.grid.replica, ranks=replicas)
        size = max(1, self.options.batch // replicas)
        loss = weight = 0.0
        for start in range(0, len(batch.inputs), size):
            part = slice(start, start + size)
            outputs = self.model.eval_batch([batch.inputs[part], None])
            if outputs is not None:  # on the last stage
                logits = paddle.concat(outputs)
                losses = F.cross_entropy(logits, paddle.to_tensor(batch.targets[part]), reduction="none")
                losses = losses.reshape([logits.shape[0], -1]).mean(axis=1).numpy()
                loss += float((losses * batch.weights[part]).sum())
                weight += float(batch.weights[part].sum())
        loss, weight = self.ranks.sum([loss, weight])
        return loss / weight

    def save_weights(self, folder: Path) -> None:
        """A file for each layer, then, by rank 0, all of them as the plain model's ``model.pdmodel``."""
        layers = folder / "layers"
        self.layer.save_state_dict(str(layers))
        if self.ranks.rank == 0:
            state: dict[str, np.ndarray] = {}
            for path in sorted(layers.glob("layer_*.pdparams")):
                number = int(path.name[len("layer_") :].split("-")[0])
                for name, tensor in paddle.load(str(path)).items():
                    state[gpt_name(f"{number}.{name}", self.config)] = tensor
            paddle.save(state, str(folder / "model.pdmodel"))

    def report(self) -> str:
        """The bubble of the last step and its timeline beside the plan, for people."""
        return f"schedule {self.options.schedule}, last training step:\n{self.model.report()}"


def mean_loss(logits: Any, targets: Any) -> Any:
    """Mean cross entropy in nats per byte; logits [windows, seq, vocabulary], targets [windows, seq]."""
    return F.cross_entropy(logits, targets)


def _logits(layer: Any, x: Any) -> Any:
    return paddle.matmul(x, layer.weight, transpose_y=True)
