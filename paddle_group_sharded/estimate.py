"""The command ``estimate`` of ``python -m paddle_group_sharded``: memory of a model before there is a machine for it.

With ``--parameters`` it is the formula of the ZeRO paper; with ``module:factory`` the model is made without memory
(``paddle.LazyGuard``) and planned.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from .errors import UsageError
from .sharding.facts import ParamFacts
from .sharding.forecast import formula_bytes
from .sharding.level import Level, Placements
from .tables import aligned, bytes_text, count_text

__all__ = ["register"]

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# States of a parameter's shape that each of paddle.optimizer keeps.
_STATES = {"SGD": 0, "Momentum": 1, "Adagrad": 1, "Adam": 2, "AdamW": 2, "Adamax": 2, "Adadelta": 2, "Lamb": 2}


def register(commands: Any) -> None:
    """Add the command to argparse's sub-parsers."""
    parser = commands.add_parser(
        "estimate",
        help="memory of one rank at every level, for any number of ranks",
        description="Bytes of one rank at every level, before anything runs.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "model", nargs="?", metavar="module:factory", help="a function without arguments that makes the model"
    )
    what.add_argument("--parameters", type=_count, metavar="N", help="number of parameters, such as 7e9")
    parser.add_argument("--ranks", type=int, nargs="+", required=True, help="ranks that share the model")
    parser.add_argument("--optimizer", default="AdamW", metavar="CLASS", help="of paddle.optimizer (default: AdamW)")
    parser.add_argument(
        "--dtype",
        choices=tuple(_ITEMSIZE),
        default="float32",
        help="of the parameters; of 16-bit ones the optimizer holds float32 masters (default: float32)",
    )
    parser.add_argument("--activations", type=_count, metavar="BYTES", help="that a forward pass keeps for backward")
    parser.add_argument("--eager", action="store_true", help="make the model with its values, not under LazyGuard")
    parser.set_defaults(run=_estimate)


def _estimate(args: argparse.Namespace) -> str:
    if any(ranks < 1 for ranks in args.ranks):
        raise UsageError(f"--ranks: expected numbers of ranks, at least 1, got {min(args.ranks)}")
    if args.parameters is not None:
        if args.eager or args.activations is not None:
            raise UsageError("--eager and --activations need module:factory; --parameters is model states alone")
        return _formula(args.parameters, args.ranks, args.optimizer, args.dtype)
    return _planned(args)


# ---------------------------------------------------------------------------------------------------- without a model


def _formula(parameters: int, ranks: Sequence[int], optimizer: str, dtype: str) -> str:
    if optimizer not in _STATES:
        raise UsageError(
            f"the states of {optimizer} are known from a model only; give module:factory, or one of "
            f"{', '.join(_STATES)} as --optimizer"
        )
    itemsize = _ITEMSIZE[dtype]
    per_element = 4 * _STATES[optimizer] + (4 if itemsize < 4 else 0)
    facts = ParamFacts(parameters, itemsize, itemsize, True, True, state_bytes=parameters * per_element)
    kinds = (itemsize, itemsize, per_element)
    levels = [("DataParallel", Placements(False, False, False)), *((level.value, level.placements) for level in Level)]
    rows = [
        [
            name,
            _per_parameter(kinds, placements),
            *(bytes_text(formula_bytes([facts], placements, number)) for number in ranks),
        ]
        for name, placements in levels
    ]
    headings = ["level", "bytes a parameter", *(f"{number} rank{'s' * (number > 1)}" for number in ranks)]
    title = f"{count_text(parameters)} parameters, {optimizer}, {dtype}: parameters, gradients and states of one rank"
    return f"{title}\n{aligned([headings, *rows])}\nActivations, and at p_g_os the layers that compute, come on top."


def _per_parameter(kinds: tuple[int, int, int], placements: Placements) -> str:
    """``"4 + 12/N"``."""
    whole = sum(size for size, sharded in zip(kinds, placements) if not sharded)
    divided = sum(size for size, sharded in zip(kinds, placements) if sharded)
    return " + ".join([str(whole)] * bool(whole) + [f"{divided}/N"] * bool(divided))


# ------------------------------------------------------------------------------------------------------- with a model


def _planned(args: argparse.Namespace) -> str:
    import paddle

    from .plan import plan

    factory = _find(args.model)
    default = paddle.get_default_dtype()
    paddle.set_default_dtype(args.dtype)
    try:
        model = factory() if args.eager else _without_memory(factory, args.model)
    finally:
        paddle.set_default_dtype(default)
    optimizer = _make_optimizer(args.optimizer, model, args.dtype)
    return str(plan(model, optimizer, world_size=args.ranks, activations=args.activations))


def _without_memory(factory: Any, name: str) -> Any:
    import paddle

    try:
        with paddle.LazyGuard():
            return factory()
    except Exception as error:
        raise UsageError(
            f"{name} cannot be made under paddle.LazyGuard ({type(error).__name__}: {error}); pass --eager to make it "
            "with its values"
        ) from error


def _find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"expected module:factory, such as my_models:make_gpt, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"cannot import {module!r}, from the present folder either: {error}") from error
    factory = getattr(found, attribute, None)
    if not callable(factory):
        raise UsageError(f"module {module!r} has no function {attribute!r}")
    return factory


def _make_optimizer(name: str, model: Any, dtype: str) -> Any:
    import paddle

    cls = getattr(paddle.optimizer, name, None)
    if not isinstance(cls, type) or not issubclass(cls, paddle.optimizer.Optimizer):
        raise UsageError(f"--optimizer: paddle.optimizer has no {name!r}")
    options = {"multi_precision": True} if _ITEMSIZE[dtype] < 4 else {}
    try:
        return cls(learning_rate=1e-3, parameters=model.parameters(), **options)
    except TypeError as error:
        raise UsageError(f"--optimizer: {name} cannot be made with its defaults for {dtype}: {error}") from error


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not 0 <= value < 1e18 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 1e18")
    return int(value)
