"""The options of train_gpt.py: defaults, checks, and those that a resumed run inherits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from help_format import HelpFormatter
from zero_formula import LEVELS

__all__ = ["STATE_FILE", "parse", "read_state"]

STATE_FILE = "train_gpt.json"  # beside model.pdmodel and model.pdopt: the step, and the options of the run
# They describe the saved weights and the order of the data: a resumed run cannot have others.
FIXED = ("layers", "width", "heads", "seq", "data", "batch", "seed", "amp", "amp_dtype")
# They belong to one launch and are not inherited.
OWN = ("save", "resume", "stop_at", "checkpoint")
# bf16: weights, gradients and what is sent are bfloat16; the optimizer steps float32 masters of its pieces.
AMP = ("none", "O1", "O2", "bf16")


def parse(arguments: Optional[Sequence[str]], ranks: int) -> argparse.Namespace:
    """Options from the command line, over those of the resumed run if there is one; ends the process on a bad value."""
    parser = _parser()
    resume = parser.parse_args(arguments).resume
    saved: dict[str, Any] = {}
    if resume is not None:
        try:
            saved = read_state(resume)["options"]
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--resume {resume}: no readable {STATE_FILE} there ({error}); give a folder of --save")
        parser.set_defaults(**{name: value for name, value in saved.items() if name not in OWN})
    options = parser.parse_args(arguments)
    for name in FIXED:
        if name in saved and getattr(options, name) != saved[name]:
            parser.error(f"{_flag(name)} {getattr(options, name)}: the run in {resume} has {saved[name]}; leave it out")
    if options.level is None:
        options.level = "p_g_os" if options.stages == 1 else "none"
    if options.accumulate is None:
        options.accumulate = _micro_batches(options, ranks)
    _check(parser, options, ranks)
    return options


def _micro_batches(options: argparse.Namespace, ranks: int) -> int:
    """1, or for a pipeline the largest number up to twice its stages that divides the batch of a replica."""
    if options.stages < 2:
        return 1
    windows = max(1, options.batch // max(1, ranks // options.stages))
    return next(count for count in range(2 * options.stages, 0, -1) if windows % count == 0)


def read_state(folder: str) -> dict[str, Any]:
    """What ``--save`` wrote beside the weights; OSError or ValueError where it is missing or damaged."""
    state = json.loads((Path(folder) / STATE_FILE).read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError("not an object")
    return state


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: int) -> None:
    """Bounds and divisibility, each with what is allowed."""
    least = {"layers": 1, "width": 1, "heads": 1, "seq": 2, "batch": 1, "steps": 1, "accumulate": 1, "warmup": 0}
    least.update({"eval_every": 0, "save_every": 0, "seed": 0, "sample": 0, "stop_at": 1, "stages": 1})
    least["checkpoint_every"] = 1
    for name, bound in least.items():
        if getattr(options, name) is not None and getattr(options, name) < bound:
            parser.error(f"{_flag(name)} {getattr(options, name)}: expected {bound} or more")
    for name in ("lr", "temperature"):
        if not getattr(options, name) > 0:
            parser.error(f"{_flag(name)} {getattr(options, name)}: expected more than 0")
    for name in ("weight_decay", "clip"):
        if not getattr(options, name) >= 0:
            parser.error(f"{_flag(name)} {getattr(options, name)}: expected 0 (off) or more")
    if not 0 <= options.min_lr <= options.lr:
        parser.error(f"--min-lr {options.min_lr}: expected 0 to the value of --lr, {options.lr}")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout {options.dropout}: expected 0 or more, and less than 1")
    if options.width % options.heads:
        parser.error(f"--width {options.width}: expected a multiple of --heads, {options.heads}")
    if options.amp == "bf16" and options.level == "none":
        parser.error("--amp bf16: plain Paddle cannot step bfloat16 weights; expected --level os, os_g or p_g_os")
    if options.stages > 1:
        _check_pipeline(parser, options, ranks)
    replicas = ranks // options.stages
    pieces = replicas * options.accumulate
    if options.batch % pieces:
        near = options.batch + pieces - options.batch % pieces
        what = "ranks" if options.stages == 1 else "replicas"
        parser.error(
            f"--batch {options.batch}: expected a multiple of {replicas} {what} x --accumulate {options.accumulate}; "
            f"for example {near}"
        )


def _check_pipeline(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: int) -> None:
    if ranks % options.stages:
        parser.error(
            f"--stages {options.stages}: expected a divisor of the {ranks} ranks of this launch; fleetrun "
            "--nproc_per_node starts more"
        )
    if options.level != "none":
        parser.error(f"--level {options.level}: stages of a pipeline are not sharded; leave it out with --stages")
    if options.amp != "none":
        parser.error(f"--amp {options.amp}: not with --stages")
    if options.resume is not None:
        parser.error("--resume: a pipeline saves its weights only, which is not enough to continue from")
    if options.save_every:
        parser.error(f"--save-every {options.save_every}: a pipeline saves at the end")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a byte-level GPT on real text, in one process or under fleetrun, at any sharding level.",
        epilog="--amp bf16 keeps weights and gradients in bfloat16 and steps float32 masters, on CPU too.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--level", choices=LEVELS, help="what is sharded; none: paddle.DataParallel; without it p_g_os, if one stage")
    add("--stages", type=int, default=1, help="ranks of a pipeline; with 1 there is none")
    add("--schedule", default="1f1b", help="of the pipeline: 1f1b, zb_h1, gpipe, or a file with a plan")
    add("--data", metavar="FILE", help="text to train on, instead of the source of Python's standard library")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--width", type=int, default=128, help="features of a token")
    add("--heads", type=int, default=4, help="attention heads")
    add("--seq", type=int, default=64, help="bytes in a window")
    add("--batch", type=int, default=8, help="windows in a step, over all ranks and micro-batches")
    add("--steps", type=int, default=600, help="optimizer steps")
    add("--accumulate", type=int, help="micro-batches in a step (default: 1, of a pipeline twice its stages)")
    add("--amp", choices=AMP, default="none", help="O1, O2: auto_cast, on accelerators only; bf16: see below")
    add("--amp-dtype", choices=("bfloat16", "float16"), default="bfloat16", help="float16 adds a GradScaler")
    add("--dropout", type=float, default=0.0, help="chance that a feature is dropped")
    add("--lr", type=float, default=5e-3, help="highest learning rate")
    add("--min-lr", type=float, default=2.5e-4, help="learning rate at the end of the cosine")
    add("--warmup", type=int, default=40, help="steps until the learning rate is at its highest")
    add("--weight-decay", type=float, default=0.1, help="of matrices; norms and biases never decay")
    add("--clip", type=float, default=1.0, help="global norm of the gradients at most; 0: no clipping")
    add("--seed", type=int, default=1, help="of weights, data and dropout")
    add("--eval-every", type=int, default=200, help="steps between two validations; 0: only at the end")
    add("--save", metavar="DIR", default="output/gpt", help="folder of the trained model")
    add("--save-every", type=int, default=0, help="steps between two savings; 0: only at the end")
    add("--resume", metavar="DIR", help="continue the run saved there: its options are the defaults")
    add("--checkpoint", metavar="DIR", help="save the run there, and go on with what is there: survives a kill")
    add("--checkpoint-every", type=int, default=50, help="steps between two checkpoints")
    add("--stop-at", type=int, metavar="STEP", help="save and end there, however many --steps are planned")
    add("--sample", type=int, default=300, help="bytes of text that the trained model writes")
    add("--temperature", type=float, default=0.7, help="of the sample; lower: less surprising")
    return parser
