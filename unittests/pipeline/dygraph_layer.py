"""Inside a trainer: pipeline layers described, cut and built."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet import meta_parallel
from paddle.nn import functional as F

from paddle_group_sharded import LayerDesc, PipelineLayer, SharedLayerDesc
from paddle_group_sharded.paddle_compat import allocated_bytes, peak_bytes
from unittests.harness import fresh
from unittests.pipeline.layer_models import VOCABULARY, WIDTH, PlainRich, message_of, project, rich_descs

IDS = np.random.RandomState(5).randint(0, VOCABULARY, [3, 6])


# ------------------------------------------------------------------------------------------------------------- build


def param_names(layers: Iterable[tuple[int, nn.Layer]]) -> dict[str, str]:
    """Automatic names by number of the layer and structured name."""
    return {f"{index}.{name}": param.name for index, layer in layers for name, param in layer.named_parameters()}


def build(num_stages: int, num_chunks: int, seed_by_rank: bool = False) -> dict[str, Any]:
    """What this rank holds of the rich model, and what the generators and counters go on with."""
    rank = paddle.distributed.get_rank()
    if seed_by_rank and rank:
        paddle.seed(100 + rank)
        np.random.seed(100 + rank)
        nn.Linear(2, 2)  # on some ranks only: their counters are ahead
    drawn_before = np.random.get_state()[1].tolist(), random.getstate()
    layer = PipelineLayer(rich_descs(), num_stages, num_virtual_pipeline_stages=num_chunks, loss_fn=F.cross_entropy)
    assert drawn_before == (np.random.get_state()[1].tolist(), random.getstate())
    return {
        "stage": layer.grid.stage,
        "chunks": [(chunk.virtual_stage, chunk.start, chunk.stop, len(chunk.layers)) for chunk in layer.chunks],
        "values": layer.layer_state_dict(),
        "names": param_names(layer.named_layers()),
        "sublayers": sorted(layer.state_dict()),
        "indices": [index for index, _ in layer.named_layers()],
        "next": (float(paddle.rand([1]).item()), nn.Linear(2, 2).weight.name, nn.BatchNorm1D(2).weight.name),
        "sequential": layer.to_sequential().state_dict(),
        "stage of 5": layer.get_stage_from_index(5),
        "bounds": layer.segment_parts,
    }


def whole(num_chunks: int) -> dict[str, Any]:
    """One process: against plain Paddle in names, in values after loading, in forward and backward."""
    plain = PlainRich()
    plain_names = param_names((index, getattr(plain, place)) for index, place in PlainRich.PLACES.items())
    fresh()
    layer = PipelineLayer(rich_descs(), num_virtual_pipeline_stages=num_chunks, loss_fn=[F.cross_entropy, F.mse_loss])
    sequential = layer.to_sequential()
    for index, place in PlainRich.PLACES.items():
        state = layer.layer_state_dict()
        own = {name.partition(".")[2]: value for name, value in state.items() if name.split(".")[0] == str(index)}
        getattr(plain, place).set_state_dict(own)
    ids = paddle.to_tensor(IDS)
    expected = plain(ids)
    label = paddle.zeros([3, 6], "int64")
    F.cross_entropy(expected, label).backward()
    seen: dict[str, Any] = {"outputs": [], "grads": [], "names": {}}
    for model in (layer, sequential):
        output = model(ids)
        layer.compute_loss(output, label).backward()
        seen["outputs"].append(float((output - expected).abs().max().item()))
        tied = layer.shared.params("embed")[0] if model is layer else getattr(model, "0").weight
        seen["grads"].append(float((tied.grad - plain.embed.weight.grad).abs().max().item()))
        assert len(model.parameters()) == len(plain.parameters())
    second_loss = layer.compute_loss(expected, paddle.zeros_like(expected), 1)
    seen["second loss"] = float((second_loss - (expected**2).mean()).abs().item())
    ours = param_names(layer.named_layers())
    seen["names"] = {name: (ours[name], plain_names[name]) for name in plain_names if ours[name] != plain_names[name]}
    owners = [held for index, held in layer.named_layers() if index in (0, 11)]
    seen["tied"] = owners[0] is not owners[1] and owners[0].weight is owners[1].weight
    # A trained model, to_sequential() and its optimizer's states.
    optimizer = paddle.optimizer.Adam(0.1, parameters=layer.parameters())
    optimizer.step()
    after = layer.to_sequential()
    seen["trained"] = all((after.state_dict()[name] == value).all() for name, value in layer.layer_state_dict().items())
    again = paddle.optimizer.Adam(0.1, parameters=after.parameters())
    again.set_state_dict(optimizer.state_dict())
    for tensor in after.parameters():
        tensor.grad = paddle.zeros_like(tensor)
    with paddle.utils.unique_name.guard():  # numbers its states as the first optimizer of a process does
        again.step()
    moments = {key: value for key, value in optimizer.state_dict().items() if "moment1" in key}
    seen["moments"] = [
        float((again.state_dict()[key] - 0.9 * value).abs().max().item()) for key, value in moments.items()
    ]
    return seen


# ------------------------------------------------------------------------------------------------------------ memory


def memory_and_fleet(depth: int, width: int) -> dict[str, Any]:
    """In a new process: what a rank allocates of a deep model, then a topology of fleet's own."""
    descs = [LayerDesc(nn.Linear, width, width, bias_attr=False) for _ in range(depth)]
    paddle.rand([2]).sum()
    before = allocated_bytes()
    layer = PipelineLayer(descs, num_stages=2)
    seen: dict[str, Any] = {"held": allocated_bytes() - before, "peak": peak_bytes() - before}
    del layer
    seen["left"] = allocated_bytes() - before  # without the garbage collector
    if paddle.is_compiled_with_cuda() and not paddle.device.cuda.device_count():
        return seen  # fleet.init asks for the version of NCCL there, which is not installed
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    small = [LayerDesc(nn.Linear, 2, 2)] * 3
    hcg = fleet.get_hybrid_communicate_group()
    for name, given in (("implied", {}), ("topology", {"topology": hcg.topology()}), ("group", {"topology": hcg})):
        grid = PipelineLayer(small, **given).grid
        seen[name] = (grid.num_stages, grid.stage, grid.num_replicas)
    return seen


# ---------------------------------------------------------------------------------------------------------- topology


def topologies() -> dict[str, Any]:
    """Four ranks: grids of Paddle's topologies, and those that are refused."""
    seen: dict[str, Any] = {}
    descs = [LayerDesc(nn.Linear, 2, 2)] * 4

    def grid_of(topology: Any = None, num_stages: Any = None) -> Any:
        grid = PipelineLayer(descs, num_stages, topology).grid
        return grid.stage, grid.replica, grid.pipeline_ranks, grid.replica_ranks, grid.all_pipelines

    axes = ["data", "pipe", "sharding", "sep", "model"]
    seen["default"] = grid_of(num_stages=2)
    seen["fleet"] = grid_of(fleet.CommunicateTopology(axes, [2, 2, 1, 1, 1]))
    seen["turned"] = grid_of(fleet.CommunicateTopology(["pipe", "data"], [2, 2]), 2)
    paddle.seed(paddle.distributed.get_rank())
    built = [nn.Linear(2, 2), nn.BatchNorm1D(2)]
    layer = PipelineLayer([*built, *descs[:2]], 2)
    seen["built"] = layer.layer_state_dict()
    seen["errors"] = [
        message_of(lambda: grid_of(fleet.CommunicateTopology(axes, [1, 2, 2, 1, 1]))),
        message_of(lambda: grid_of(fleet.CommunicateTopology(axes, [2, 2, 1, 1, 1]), 4)),
        message_of(lambda: grid_of(fleet.CommunicateTopology(axes, [1, 2, 1, 1, 1]))),
        message_of(lambda: grid_of("pp")),
    ]
    return seen


# ---------------------------------------------------------------------------------------------------------- printing


class AlexNetPipeDesc(PipelineLayer):
    def __init__(self, num_classes: int = 10, **kwargs: Any) -> None:
        self.num_classes = num_classes
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
        super().__init__(layers=descs, loss_fn=nn.CrossEntropyLoss(), **kwargs)


class Tagged:
    """A base that is no layer and takes part in nothing."""

    tag = "tagged"


class TaggedAlexNet(AlexNetPipeDesc, Tagged):
    pass


class Backbone(nn.Layer):
    """As PaddleNLP's pretrained models, first in the bases: ``__init__`` is called for the second base alone."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"backbone.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


class Pretrained(Backbone, PipelineLayer):
    def __init__(self, **kwargs: Any) -> None:
        PipelineLayer.__init__(self, layers=[LayerDesc(nn.Linear, 2, 2), LayerDesc(nn.Linear, 2, 3)], **kwargs)


def printed(num_stages: int) -> dict[str, Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("paddle_group_sharded")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            layer = TaggedAlexNet(num_stages=num_stages)
        with contextlib.redirect_stdout(io.StringIO()) as chunks:
            pretrained = Pretrained(num_stages=num_stages, num_virtual_pipeline_stages=3 - num_stages)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return {
        "stdout": text.getvalue(),
        "logged": records[0],
        "chunks": chunks.getvalue(),
        "functions": [str(layer.descs[index]) for index in (4, 13)],
        "table": layer.table(),
        "bases": (layer.tag, layer.num_classes, sorted(pretrained.state_dict())),
        "loss": [type(loss).__name__ for loss in layer._loss_fn],
    }


# ------------------------------------------------------------------------------------------------------ segmentation


class Slow(nn.Layer):
    def forward(self, x: Any) -> Any:
        time.sleep(0.03)
        return x * 1.0


class Wide(nn.Layer):
    """Keeps 64 times its input for the backward pass."""

    def forward(self, x: Any) -> Any:
        return paddle.concat([x] * 64).exp().reshape([64, -1]).mean(0).reshape(x.shape)


def measured() -> dict[str, Any]:
    """Cuts by what is counted and measured; the first rank's clock counts."""
    sample = paddle.rand([16, 8])
    linear = LayerDesc(nn.Linear, 8, 8)
    seen: dict[str, Any] = {}

    def bounds(descs: list[Any], method: Any, **kwargs: Any) -> Any:
        layer = PipelineLayer(descs, 2, seg_method=method, **kwargs)
        seen.setdefault("tables", []).append(layer.table())
        return layer.segment_parts

    seen["time"] = bounds([linear, F.relu, linear, linear, LayerDesc(Slow)], "time", sample_input=sample)
    seen["memory"] = bounds([LayerDesc(Wide), linear, F.relu, linear, linear], "memory", sample_input=sample)
    statistics = nn.BatchNorm1D(8)
    bounds([statistics, linear], "memory", sample_input=sample)
    seen["statistics"] = statistics.state_dict(), [param.grad is None for param in statistics.parameters()]
    built = [nn.Linear(8, 8) for _ in range(3)]
    seen["parameters"] = bounds([LayerDesc(nn.Linear, 8, 64), LayerDesc(nn.Linear, 64, 8), *built], "parameters")
    seen["weights"] = bounds([linear, linear, linear, LayerDesc(nn.Linear, 8, 2)], {"Linear": 1})
    seen["layer"] = bounds([linear, F.relu, F.relu, F.relu, linear, F.relu], "layer:linear|Linear")
    seen["errors"] = [
        message_of(lambda: bounds([linear, linear], "time")),
        message_of(lambda: bounds([linear, LayerDesc(nn.Linear, 9, 9)], "memory", sample_input=sample)),
        message_of(lambda: bounds([linear, linear], "layer:Conv")),
        message_of(lambda: bounds([linear], "uniform")),
    ]
    return seen


# ------------------------------------------------------------------------------------------------------------ errors


class FailsOnRank1(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        if paddle.distributed.get_rank() == 1:
            raise OSError("no such vocabulary file")


class Weighted(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([1])


def refusals() -> list[str]:
    """Messages on two ranks; each is raised on both."""
    rank = paddle.distributed.get_rank()
    linear = LayerDesc(nn.Linear, 2, 2)
    built = nn.Linear(2, 2)
    different = [linear, LayerDesc(nn.ReLU)] if rank else [linear, linear]
    two = {"num_stages": 2}
    makers = [
        lambda: PipelineLayer([linear, linear]),
        lambda: PipelineLayer([linear] * 3, num_stages=3),
        lambda: PipelineLayer([linear] * 3, num_stages=0),
        lambda: PipelineLayer([], **two),
        lambda: PipelineLayer([linear], **two),
        lambda: PipelineLayer([linear, nn.Linear], **two),
        lambda: PipelineLayer(different, **two),
        lambda: PipelineLayer([linear, LayerDesc(FailsOnRank1)], **two),
        lambda: PipelineLayer([LayerDesc(FailsOnRank1), linear], **two),
        lambda: PipelineLayer([linear, LayerDesc(nn.Linear, 2)], **two),
        lambda: PipelineLayer([built, F.relu, built], **two),
        lambda: PipelineLayer([linear, linear], loss_fn=Weighted(), **two),
        lambda: PipelineLayer([linear, linear], loss_fn="mse", **two),
        lambda: PipelineLayer([linear, linear], recompute_interval=1, recompute_ctx={"offload": True}, **two),
        lambda: PipelineLayer([linear, linear], recompute_interval=-1, **two),
        lambda: PipelineLayer([linear, linear], seed="a", **two),
        lambda: PipelineLayer([linear] * 4, num_virtual_pipeline_stages=2, **two)(paddle.rand([1, 2])),
        lambda: PipelineLayer([linear] * 4, **two)(paddle.rand([1, 2]), chunk_id=1),
        lambda: PipelineLayer([linear] * 4, **two).compute_loss(paddle.rand([1]), paddle.rand([1])),
        lambda: PipelineLayer([nn.Linear(2, 2), nn.Linear(2, 2)], **two).to_sequential(),
        lambda: PipelineLayer([linear, linear], **two).set_layer_state_dict({f"{rank}.bias": paddle.zeros([3])}),
    ]
    return [message_of(make) for make in makers]


def one_process() -> list[str]:
    """M4: two stages asked of one process."""
    return [message_of(lambda: PipelineLayer([LayerDesc(nn.Linear, 2, 2)] * 2, num_stages=2))]


# --------------------------------------------------------------------------------------------------- what may be given


def loaded_by_paddles_method(num_chunks: int) -> dict[str, Any]:
    """A9: ``set_state_dict`` with a state of one process, under either name of the tied weight, and with its own."""
    layer = PipelineLayer(rich_descs(), 2, num_virtual_pipeline_stages=num_chunks)
    whole = layer.to_sequential().state_dict()
    seen: dict[str, Any] = {}
    for number, missing in enumerate(("0.weight", "11.weight")):
        state = {name: paddle.full_like(value, number + 2.0) for name, value in whole.items() if name != missing}
        result = layer.set_state_dict(state)
        if result is not None:  # Paddle 2.6 returns nothing
            assert result[0] == []
        held = layer.layer_state_dict()
        seen[missing] = sorted({float(value.mean().item()) for value in held.values()})
    own = {name: paddle.full_like(value, 5.0) for name, value in layer.state_dict().items()}
    layer.set_state_dict(own)
    seen["own"] = sorted({float(value.mean().item()) for value in layer.layer_state_dict().values()})
    some = next(name for name in own if name.endswith("proj.weight") or name.endswith("1.weight"))
    layer.set_dict({some: paddle.full_like(own[some], 6.0)})
    seen["some"] = float(layer.state_dict()[some].mean().item())
    return seen


def built_and_copied() -> dict[str, Any]:
    """One process: built layers, one of them twice, and their copies in ``to_sequential()``."""
    built = nn.Linear(4, 4)
    layer = PipelineLayer([built, F.relu, built, nn.BatchNorm1D(4), LayerDesc(nn.Linear, 4, 2)])
    copied = layer.to_sequential()
    x = paddle.rand([3, 4])
    first, second = getattr(copied, "0"), getattr(copied, "2")
    return {
        "same": float((copied(x) - layer(x)).abs().max().item()),
        "names": [param.name for param in copied.parameters()] == [param.name for param in layer.parameters()],
        "shared": first is second and first is not built and first.weight is not built.weight,
        "count": len(copied.parameters()),
    }


def foreign_descs() -> dict[str, Any]:
    """Descriptions of Paddle's own, built layers that one rank keeps, loading by one-process names."""
    built = nn.Linear(WIDTH, WIDTH)
    theirs = meta_parallel.SharedLayerDesc("embed", nn.Embedding, None, "weight", VOCABULARY, WIDTH)
    entries = [
        theirs,
        meta_parallel.LayerDesc(nn.Linear, WIDTH, WIDTH),
        built,
        SharedLayerDesc("embed", nn.Embedding, project, "weight", VOCABULARY, WIDTH),
    ]
    layer = PipelineLayer(entries, num_stages=2)
    keeps_built = any(held is built for held in layer.sublayers())
    in_list = any(entry is built for entry in layer.descs)
    state = {name: paddle.full_like(value, 1.0) for name, value in layer.layer_state_dict().items()}
    state.update({"3.weight": paddle.full([VOCABULARY, WIDTH], 2.0), "9.weight": paddle.zeros([1]), "head": 1})
    state.pop("0.weight", None)  # A9: one name of a tied weight is enough, on both of its stages
    state.pop("1.bias", None)
    missing, unexpected = layer.set_layer_state_dict(state)
    return {
        "built": (keeps_built, in_list, str(layer.descs[2])),
        "missing": missing,
        "unexpected": unexpected,
        "values": {name: float(value.mean().item()) for name, value in layer.layer_state_dict().items()},
    }


# --------------------------------------------------------------------------------------------------------- recompute


class NumpyDropout(nn.Layer):
    """N10: a mask that Paddle's generator knows nothing of."""

    calls = 0

    def forward(self, x: Any) -> Any:
        NumpyDropout.calls += 1
        mask = (np.random.rand(*x.shape) < 0.5) & (random.random() < 2)
        return x * paddle.to_tensor(mask.astype("float32"))


STATISTICS = ("7.norm._mean", "7.norm._variance", "7.written", "7.replaced")


class Counted(nn.Layer):
    """Statistics that a second run would move again: BatchNorm's, a buffer written to, and one replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1D(8)
        self.register_buffer("written", paddle.zeros([1]))
        self.register_buffer("replaced", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.written.add_(paddle.ones([1]))
            self.replaced = self.replaced + 1
        return self.norm(x) * 2


def nest(x: Any) -> Any:
    return {"x": x, "none": None, "flag": paddle.ones([2], "bool"), "plain": 3}


def unnest(value: Any) -> Any:
    return value["x"] * (value["plain"] if bool(value["flag"].all().item()) else 0)


def recomputed() -> dict[str, Any]:
    """Gradients with recompute beside those without: dropout of three generators, nested values, N9's plain input."""
    descs = [
        LayerDesc(nn.Linear, 8, 8),
        LayerDesc(nn.Dropout, 0.5),
        nest,
        unnest,
        LayerDesc(nn.Linear, 8, 8),
        LayerDesc(NumpyDropout),
        F.relu,
        LayerDesc(Counted),
    ]
    x = paddle.rand([4, 8])
    results = []
    for interval, chunks in ((0, 1), (2, 1), (3, 2), (8, 1)):
        fresh(7)
        layer = PipelineLayer(descs, recompute_interval=interval, num_virtual_pipeline_stages=chunks, seed=11)
        NumpyDropout.calls = 0
        order: list[int] = []
        output = x
        for chunk in layer.chunks:
            output = chunk(output, order.append)
        forward = list(order)
        paddle.rand([3])  # drawn between forward and backward: the masks must not depend on it
        np.random.rand(3)
        after = paddle.get_rng_state(), random.getstate()
        (output * paddle.arange(8).astype("float32")).sum().backward()
        state = layer.layer_state_dict()
        assert state["7.written"].item() == state["7.replaced"].item() == 1.0
        trained = [param for param in layer.parameters() if not param.stop_gradient]
        found = [param.grad.numpy() for param in trained] + [state[name].numpy() for name in STATISTICS]
        assert len(found) == 6 + 4
        results.append((output.numpy(), found))
        assert forward == list(range(8))
        assert NumpyDropout.calls == (1 if interval == 0 else 2), interval
        assert random.getstate() == after[1]
        layer.eval()
        with paddle.no_grad():
            before = NumpyDropout.calls
            layer(x)
            assert NumpyDropout.calls == before + 1
    first = results[0]
    return {
        "outputs": [float(np.abs(output - first[0]).max()) for output, _ in results],
        "grads": [max(float(np.abs(a - b).max()) for a, b in zip(grads, first[1])) for _, grads in results],
        "zeros": float((first[0] == 0).mean()),
    }
