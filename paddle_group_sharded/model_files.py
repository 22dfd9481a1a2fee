"""``model.pdmodel`` and ``model.pdopt``: one file each, as plain Paddle writes and reads them.

The files hold what ``paddle.save(model.state_dict())`` and ``paddle.save(optimizer.state_dict())`` of an unsharded run
would: right for models that fit on one host.  Rank 0 writes, one group at a time passes through the ranks' memory, and
the files appear under their names only when they are complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, Optional

import numpy as np
import paddle
from paddle import nn

from .comm.base import Comm
from .errors import CheckpointError, GroupShardedError, UsageError
from .sharding.model import ShardedModel
from .sharding.optimizer import ShardedOptimizer
from .sharding.rules import unwrap_optimizer

__all__ = ["load_group_sharded_model", "save_group_sharded_model"]

MODEL_FILE = "model.pdmodel"
OPTIMIZER_FILE = "model.pdopt"

_NAME_TABLE = "StructuredToParameterName@@"  # paddle.save keeps under it what each entry's tensor is called
_LABEL = "save_group_sharded_model"


# --------------------------------------------------------------------------------------------------------------- save


def save_group_sharded_model(model: nn.Layer, output: str, optimizer: Optional[Any] = None) -> None:
    """Write the whole model, and the whole optimizer state, as plain Paddle files.  Collective: call it on all ranks.

    Args:
        model: what :func:`.group_sharded_parallel` returned.
        output: a folder, made if it does not exist; gets ``model.pdmodel`` and, with an optimizer, ``model.pdopt``.
        optimizer: what :func:`.group_sharded_parallel` returned beside ``model``.

    Raises:
        UsageError: on every rank, where ``model`` or ``optimizer`` is not a wrapped one or ``output`` is a file.
        CheckpointError: on every rank, where rank 0 cannot write; files of an earlier save are then as they were.

    Training goes on as if nothing had happened.  Group rank 0 needs host memory for one copy of what it writes.
    """
    if not isinstance(model, ShardedModel):
        raise UsageError(f"model must be one that group_sharded_parallel returned, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise UsageError(f"optimizer must be one that group_sharded_parallel returned, got {type(optimizer).__name__}")
    engine = model._engine
    comm: Comm = engine.comm
    writes = comm.rank == 0 and engine.dp_comm.rank == 0
    _on_writer(comm, writes, lambda: _make_folder(output))
    model_arrays = _model_arrays(model, writes)
    _on_writer(comm, writes, lambda: _write(model_arrays, os.path.join(output, MODEL_FILE)))
    model_arrays.clear()
    if optimizer is not None:
        state = optimizer._states.whole(keep=writes, as_arrays=True)
        _on_writer(comm, writes, lambda: _write(_optimizer_arrays(state), os.path.join(output, OPTIMIZER_FILE)))


def _on_writer(comm: Comm, writes: bool, action: Callable[[], None]) -> None:
    """Run ``action`` on the writing rank; every rank returns after it, or raises what it raised."""
    problem: Optional[Exception] = None
    if writes:
        try:
            action()
        except GroupShardedError as error:
            problem = error
        except OSError as error:
            problem = CheckpointError(f"rank {comm.ranks[comm.rank]} cannot write: {error}")
    for reported in comm.exchange(problem, _LABEL):
        if reported is not None:
            raise reported


def _make_folder(output: str) -> None:
    if os.path.isfile(output):
        raise UsageError(f"output must be a folder, but {output!r} is a file")
    os.makedirs(output, exist_ok=True)


def _model_arrays(model: ShardedModel, keep: bool) -> dict[str, Any]:
    """The model's entries as arrays, under every name; empty on the ranks that do not write.  Collective."""
    arrays = {id(tensor): copy.numpy() for tensor, copy in model._whole_params(keep)}
    if not keep:
        return {}
    state = model._names_root.state_dict()
    result: dict[str, Any] = {
        name: arrays[id(tensor)] if id(tensor) in arrays else tensor.numpy() for name, tensor in state.items()
    }
    result[_NAME_TABLE] = {name: tensor.name for name, tensor in state.items()}
    return result


def _optimizer_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """In the form that Paddle reads as tensors: with masters, pairs of name and array; without, a table of names."""
    special = ("LR_Scheduler", "master_weights")
    if "master_weights" not in state:
        return {**state, _NAME_TABLE: {name: name for name in state if name not in special}}
    masters = {name: (name, array) for name, array in state["master_weights"].items()}
    pairs = {name: value if name in special else (name, value) for name, value in state.items()}
    return {**pairs, "master_weights": masters}


def _write(value: dict[str, Any], path: str) -> None:
    """Write under a temporary name, force it to the disk, then rename: a reader sees the old file or the new one."""
    temporary = f"{path}.writing"
    try:
        paddle.save(value, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


# --------------------------------------------------------------------------------------------------------------- load


def load_group_sharded_model(model: nn.Layer, path: str, optimizer: Optional[Any] = None) -> None:
    """Read what :func:`save_group_sharded_model`, or plain ``paddle.save``, has written.

    Args:
        model: a plain layer or a wrapped model, at any level and any number of ranks.
        path: a folder with ``model.pdmodel`` (and ``model.pdopt``); or plain Paddle files, given as ``NAME.pdparams``
            or as ``NAME``, beside ``NAME.pdopt``.
        optimizer: a plain or a wrapped optimizer over the parameters of ``model``; None reads weights only.

    Raises:
        CheckpointError: on every rank, naming the entry: a file that is missing, truncated or foreign, an entry that is
            missing or unexpected, another shape.  Nothing has been changed then.

    Collective where ``model`` is wrapped: call it on all ranks, each of which reads the files.  Parameters are matched
    by their structured names, so a second model of the same process, whose automatic names differ, loads as well.
    """
    comm = model._engine.comm if isinstance(model, ShardedModel) else None
    problem: Optional[GroupShardedError] = None
    apply: list[Callable[[], None]] = []
    try:
        apply = _prepare(model, path, optimizer)
    except GroupShardedError as error:
        problem = error
    reports = comm.exchange(problem, "load_group_sharded_model") if comm is not None else [problem]
    for rank, reported in enumerate(reports):
        if reported is not None:
            raise problem or type(reported)(f"rank {rank}: {reported}")
    for action in apply:
        action()


def _prepare(model: nn.Layer, path: str, optimizer: Optional[Any]) -> list[Callable[[], None]]:
    """Read and check everything; what is returned changes things and does not fail."""
    model_path, optimizer_path = _find_files(path)
    entries = _read(model_path)
    file_names = entries.pop(_NAME_TABLE, {})
    root = model._names_root if isinstance(model, ShardedModel) else model
    targets = root.state_dict()
    _check_entries(entries, targets, model_path)
    actions: list[Callable[[], None]] = [lambda: _set_model(model, entries)]
    if optimizer is not None:
        state = _read(optimizer_path)
        state.pop(_NAME_TABLE, None)
        new_names = {file_names[name]: tensor.name for name, tensor in targets.items() if name in file_names}
        state = _rename(state, new_names)
        if isinstance(optimizer, ShardedOptimizer):
            commit = optimizer._states.prepare(state, optimizer_path)
            actions.append(commit)
        else:
            inner = unwrap_optimizer(optimizer)
            _check_plain_optimizer(inner, state, optimizer_path)
            actions.append(lambda: inner.set_state_dict(state))
    return actions


def _find_files(path: str) -> tuple[str, str]:
    if os.path.isdir(path):
        return os.path.join(path, MODEL_FILE), os.path.join(path, OPTIMIZER_FILE)
    stem = path[: -len(".pdparams")] if path.endswith(".pdparams") else path
    return f"{stem}.pdparams", f"{stem}.pdopt"


def _read(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} does not exist")
    try:
        value = paddle.load(path, keep_name_table=True)
    except Exception as error:  # whatever unpickling a damaged file raises
        raise CheckpointError(f"{path} cannot be read, it is damaged or not a Paddle file: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected the dict of a state_dict()")
    return value


def _check_entries(entries: Mapping[str, Any], targets: Mapping[str, Any], path: str) -> None:
    missing = sorted(set(targets) - set(entries))
    unexpected = sorted(set(entries) - set(targets))
    shapes = [
        f"{name}: expected shape {list(tensor.shape)}, got {list(np.shape(entries[name]))}"
        for name, tensor in targets.items()
        if name in entries and list(np.shape(entries[name])) != list(tensor.shape)
    ]
    problems = [f"missing: {', '.join(missing)}"] * bool(missing)
    problems += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
    problems += shapes
    if problems:
        raise CheckpointError(f"{path} does not fit the model; " + "; ".join(problems))


def _set_model(model: nn.Layer, entries: dict[str, Any]) -> None:
    model.set_state_dict(entries)


def _rename(state: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """``state`` with the parameter names of the process that wrote it replaced by those of this one."""
    by_length = sorted(new_names, key=len, reverse=True)  # linear_1 must not match linear_11

    def renamed(key: str) -> str:
        for old in by_length:
            if key == old or key.startswith(f"{old}_"):
                return new_names[old] + key[len(old) :]
        return key

    result = {key if key == "LR_Scheduler" else renamed(key): value for key, value in state.items()}
    if "master_weights" in state:
        result.pop(renamed("master_weights"), None)
        result["master_weights"] = {renamed(key): value for key, value in state["master_weights"].items()}
    return result


def _check_plain_optimizer(inner: Any, state: Mapping[str, Any], path: str) -> None:
    for by_name in inner._accumulators.values():
        for tensor in by_name.values():
            if tensor.name not in state:
                raise CheckpointError(f"{path}: optimizer state {tensor.name} is missing")
            if list(np.shape(state[tensor.name])) != list(tensor.shape):
                raise CheckpointError(
                    f"{path}: {tensor.name}: expected shape {list(tensor.shape)}, "
                    f"got {list(np.shape(state[tensor.name]))}"
                )
