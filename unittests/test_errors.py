"""The exceptions, and what their messages have to say: expected, got, what to do, and which rank."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddle_group_sharded
from paddle_group_sharded import errors

PACKAGE = Path(paddle_group_sharded.__file__).parent
OURS = ("UsageError", "StateError", "CommError", "CheckpointError")
# What a reader has to find: what is wanted, or what is the matter, in words and not as a bare name.
SAYS_MORE = (
    *("expected", "must", "; ", ", got", "cannot", "not ", "differ", "already", "damaged", "ended", "no "),
    "has been closed",
)
# Not for users' mistakes: the protocol of attribute access, and arguments that our own code gives.
# StopIteration: what an iterator of micro-batches ends with, as in Paddle.
ALLOWED = {"AttributeError", "ValueError", "NotImplementedError", "SystemExit", "KeyError", "StopIteration"}


def raises() -> Iterator[tuple[str, ast.Raise]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def literal(node: ast.AST) -> str:
    """The text of a message, with ``{}`` where something is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    if isinstance(node, ast.IfExp):
        return literal(node.body)
    return "{}"


def messages() -> Iterator[tuple[str, str, str]]:
    """(place, class, message) of each message that stands where it is raised."""
    for place, node in raises():
        assert isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
        if node.exc.func.id in OURS and node.exc.args:
            text = literal(node.exc.args[0])
            if text != "{}":
                yield place, node.exc.func.id, text


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("UsageError", ValueError),
        ("StateError", RuntimeError),
        ("CommError", RuntimeError),
        ("CheckpointError", RuntimeError),
    ],
)
def test_one_tree_that_travels_between_ranks(name: str, builtin: type) -> None:
    cls = getattr(paddle_group_sharded, name)
    assert cls is getattr(errors, name) and name in errors.__all__
    assert issubclass(cls, errors.GroupShardedError) and issubclass(cls, builtin)
    again = pickle.loads(pickle.dumps(cls("rank 1: what it said")))
    assert type(again) is cls and str(again) == "rank 1: what it said"


def test_messages_are_found() -> None:
    assert len(list(messages())) > 40


def test_messages_say_what_is_expected_or_wrong() -> None:
    poor = [
        f"{place}: {text}"
        for place, _, text in messages()
        if not place.startswith("pipeline") and not any(words in text for words in SAYS_MORE)
    ]
    assert poor == []


def test_messages_are_sentences_of_some_length_without_a_full_stop() -> None:
    short = [f"{place}: {text}" for place, _, text in messages() if len(text.split()) < 5 or text.endswith(".")]
    assert short == []


def test_errors_of_communication_name_ranks() -> None:
    silent = [
        f"{place}: {text}"
        for place, name, text in messages()
        if name == "CommError" and "rank" not in text and "communicator has been closed" not in text
    ]
    assert silent == []


def test_only_our_own_errors_are_raised() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    own = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    allowed = own | ALLOWED
    other = [place for place, node in raises() if node.exc.func.id not in allowed]  # type: ignore[union-attr]
    assert other == []
