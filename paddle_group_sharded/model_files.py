"""``model.pdmodel`` and ``model.pdopt``: one file each, as plain Paddle writes and reads them.

The files hold what ``paddle.save(model.state_dict())`` and ``paddle.save(optimizer.state_dict())`` of an unsharded run
would: right for models that fit on one host.  Rank 0 writes, one group at a time passes through the ranks' memory, and
the files appear under their names only when they are complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, Optional

from paddle import nn

from .comm.agreement import agree
from .errors import CheckpointError, GroupShardedError, UsageError
from .paddle_compat import unwrapped_layer
from .paddle_files import FileSet, read_file
from .plain_optimizer import prepare_plain_optimizer
from .sharding.engine import Engine
from .sharding.loading import set_whole
from .sharding.matching import MASTER_SUFFIX, split_key
from .sharding.model import ShardedModel
from .sharding.optimizer import ShardedOptimizer
from .sharding.whole import as_tensor, plain_state, state_problems, whole_params

__all__ = [
    "MODEL_FILE",
    "NAME_TABLE",
    "OPTIMIZER_FILE",
    "load_group_sharded_model",
    "optimizer_entries",
    "save_group_sharded_model",
]

MODEL_FILE = "model.pdmodel"
OPTIMIZER_FILE = "model.pdopt"

NAME_TABLE = "StructuredToParameterName@@"  # paddle.save keeps under it what each entry's tensor is called
_SAVE = "save_group_sharded_model"
_LOAD = "load_group_sharded_model"


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
        CommError: on every rank, where only some of them call.

    Training goes on as if nothing had happened.  Group rank 0 needs host memory for one copy of what it writes.
    """
    if not isinstance(model, ShardedModel):
        raise UsageError(f"model must be one that group_sharded_parallel returned, got {type(model).__name__}")
    engine = model._engine
    writes = engine.comm.rank == 0 and engine.dp_comm.rank == 0
    _together(engine, lambda: _check_save(model, output, optimizer))
    files = FileSet(output)
    try:
        _together(engine, lambda: os.makedirs(output, exist_ok=True) if writes else None)
        entries = _model_entries(model, writes)
        _together(engine, lambda: files.write(MODEL_FILE, entries) if writes else None)
        entries.clear()
        if optimizer is not None:
            state = optimizer._states.whole(keep=writes, as_arrays=True) if engine.dp_comm.rank == 0 else {}
            _together(engine, lambda: files.write(OPTIMIZER_FILE, optimizer_entries(state)) if writes else None)
        _together(engine, lambda: files.publish() if writes else None)
    finally:
        files.discard()


def _check_save(model: ShardedModel, output: Any, optimizer: Any) -> None:
    if optimizer is not None:
        _check_pair(model, optimizer)
    if not isinstance(output, (str, os.PathLike)):
        raise UsageError(f"output must be the path of a folder, got {type(output).__name__}")
    if os.path.isfile(output):
        raise UsageError(f"output must be a folder, but {str(output)!r} is a file")


def _check_pair(model: ShardedModel, optimizer: Any) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        raise UsageError(f"optimizer must be one that group_sharded_parallel returned, got {type(optimizer).__name__}")
    if optimizer._engine is not model._engine:
        raise UsageError("optimizer belongs to another model; pass the one that was returned beside this model")


def _together(engine: Engine, action: Callable[[], None]) -> None:
    """Run ``action``; every rank returns after all have run it, or raises what one has raised."""
    problem: Optional[GroupShardedError] = None
    try:
        action()
    except GroupShardedError as error:
        problem = error
    except Exception as error:  # a full disk, a folder that may not be written, a value that cannot be pickled
        problem = CheckpointError(f"cannot write: {error}; files of an earlier save are as they were")
    agree((engine.comm, engine.dp_comm), _SAVE, problem)


def _model_entries(model: ShardedModel, keep: bool) -> dict[str, Any]:
    """The model's entries as arrays, under every name; empty on the ranks that do not write.  Collective."""
    arrays = {}
    if model._engine.dp_comm.rank == 0:
        for tensor, copy in whole_params(model._engine.groups, keep):
            arrays[id(tensor)] = copy.numpy()
            del copy  # before the next group is there
    if not keep:
        return {}
    state = plain_state(model._names_root)
    entries: dict[str, Any] = {
        name: arrays[id(tensor)] if id(tensor) in arrays else tensor.numpy() for name, tensor in state.items()
    }
    entries[NAME_TABLE] = {name: tensor.name for name, tensor in state.items()}
    return entries


def optimizer_entries(state: dict[str, Any]) -> dict[str, Any]:
    """In the form that Paddle reads as tensors: with masters, pairs of name and array; without, a table of names."""
    special = ("LR_Scheduler", "master_weights")
    if "master_weights" not in state:
        return {**state, NAME_TABLE: {name: name for name in state if name not in special}}
    masters = {name: (f"{name}{MASTER_SUFFIX}", array) for name, array in state["master_weights"].items()}
    pairs = {name: value if name in special else (name, value) for name, value in state.items()}
    return {**pairs, "master_weights": masters}


# --------------------------------------------------------------------------------------------------------------- load


def load_group_sharded_model(model: nn.Layer, path: str, optimizer: Optional[Any] = None) -> None:
    """Read what :func:`save_group_sharded_model`, or plain ``paddle.save``, has written.

    Args:
        model: a plain layer or a wrapped model, at any level and any number of ranks.
        path: a folder with ``model.pdmodel`` (and ``model.pdopt``); or plain Paddle files, given as ``NAME.pdparams``
            or as ``NAME``, beside ``NAME.pdopt``.
        optimizer: a plain or a wrapped optimizer over the parameters of ``model``; None reads weights only.

    Raises:
        UsageError: on every rank, where ``model`` and ``optimizer`` do not go together.
        CheckpointError: on every rank, naming the entry: a file that is missing, truncated or foreign, an entry that is
            missing or unexpected, another shape.  Nothing has been changed then.

    Collective where ``model`` is wrapped: call it on all ranks, each of which reads the files.  Parameters are matched
    by their structured names, so a second model of the same process, whose automatic names differ, loads as well.
    States of parameters that ``optimizer`` does not have (a frozen base under an adapter) are left out; parameters of
    ``optimizer`` that were never stepped before the save begin afresh, which is logged.
    """
    engine = model._engine if isinstance(model, ShardedModel) else None
    problem: Optional[GroupShardedError] = None
    actions: list[Callable[[], None]] = []
    checksums: list[int] = []
    try:
        actions, checksums = _prepare(model, path, optimizer)
    except GroupShardedError as error:
        problem = error
    if engine is not None:
        agree((engine.comm, engine.dp_comm), _LOAD, problem, checksums, _differ)
    elif problem is not None:
        raise problem
    for action in actions:
        action()


def _differ(rank: int, checksums: list[int], other: int, other_checksums: list[int]) -> GroupShardedError:
    return CheckpointError(
        f"rank {rank} and rank {other} read different files (their checksums are {checksums} and {other_checksums}); "
        "give every rank the same ones"
    )


def _prepare(model: Any, path: Any, optimizer: Optional[Any]) -> tuple[list[Callable[[], None]], list[int]]:
    """Read and check everything; the calls that are returned change things and do not fail.  Also the checksums."""
    _check_load(model, path, optimizer)
    model_path, optimizer_path = _find_files(os.fspath(path))
    file = read_file(model_path)
    entries = file.entries
    file_names = entries.pop(NAME_TABLE, {})
    root = model._names_root if isinstance(model, ShardedModel) else unwrapped_layer(model)
    targets = plain_state(root)
    _check_entries(entries, targets, model_path)
    if isinstance(model, ShardedModel):
        actions = [lambda: set_whole(model._engine, targets, entries)]
    else:
        actions = [lambda: _set_plain(targets, entries)]
    if optimizer is None:
        return actions, [file.checksum]
    if not os.path.exists(optimizer_path):
        raise CheckpointError(f"{optimizer_path} does not exist; pass optimizer=None to read the weights only")
    optimizer_file = read_file(optimizer_path)
    if file.save is not None and optimizer_file.save is not None and file.save != optimizer_file.save:
        raise CheckpointError(
            f"{optimizer_path} was written by another save than {model_path}; "
            "pass optimizer=None to read the weights only"
        )
    new_names = {file_names[name]: tensor.name for name, tensor in targets.items() if name in file_names}
    state = _rename(optimizer_file.entries, new_names)
    if isinstance(optimizer, ShardedOptimizer):
        actions.append(optimizer._states.prepare(state, optimizer_path))
    else:
        actions.append(prepare_plain_optimizer(optimizer, state, optimizer_path))
    return actions, [file.checksum, optimizer_file.checksum]


def _check_load(model: Any, path: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Layer):
        raise UsageError(f"model must be a paddle.nn.Layer, got {type(model).__name__}")
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"path must be a folder or the path of a Paddle file, got {type(path).__name__}")
    if isinstance(model, ShardedModel) and optimizer is not None:
        _check_pair(model, optimizer)
    elif isinstance(optimizer, ShardedOptimizer):
        raise UsageError("optimizer has been through group_sharded_parallel but model has not; pass the wrapped model")


def _find_files(path: str) -> tuple[str, str]:
    if os.path.isdir(path):
        return os.path.join(path, MODEL_FILE), os.path.join(path, OPTIMIZER_FILE)
    stem = path[: -len(".pdparams")] if path.endswith(".pdparams") else path
    return f"{stem}.pdparams", f"{stem}.pdopt"


def _check_entries(entries: Mapping[str, Any], targets: Mapping[str, Any], path: str) -> None:
    missing = [f"missing: {name}" for name in targets if name not in entries]
    unexpected = [f"unexpected: {name}" for name in entries if name not in targets]
    problems = missing + unexpected + state_problems(targets, entries)
    if problems:
        raise CheckpointError(f"{path} does not fit the model; " + "; ".join(problems))


def _set_plain(targets: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    for name, target in targets.items():
        target.set_value(as_tensor(entries[name]).astype(target.dtype))


def _rename(state: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """``state`` with the parameter names of the process that wrote it replaced by those of this one."""

    def renamed(key: str) -> str:
        parts = split_key(key, new_names)
        return key if parts is None else new_names[parts[0]] + parts[1]

    special = ("LR_Scheduler", "master_weights", NAME_TABLE)
    result = {renamed(key): value for key, value in state.items() if key not in special}
    if "LR_Scheduler" in state:
        result["LR_Scheduler"] = state["LR_Scheduler"]
    masters = state.get("master_weights")
    if masters is not None:
        is_table = isinstance(masters, Mapping)
        result["master_weights"] = {renamed(key): value for key, value in masters.items()} if is_table else masters
    return result
