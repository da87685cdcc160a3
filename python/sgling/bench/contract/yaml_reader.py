"""Reads YAML with line numbers, so that a mistake in a file is explained where it stands."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

_KINDS = {"map": yaml.MappingNode, "list": yaml.SequenceNode, "value": yaml.ScalarNode}
_NAMES = {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value"}


class SchemaError(ValueError):
    """A file does not follow its schema; the message begins with ``file:line``."""


class Entry:
    """A node of a YAML file with its place: ``file``, ``line`` (from 1) and dotted ``path``."""

    def __init__(self, file: str, node: yaml.Node, path: str = ""):
        self.file, self.node, self.path = file, node, path

    @property
    def line(self) -> int:
        """Line in the file, from 1."""
        return self.node.start_mark.line + 1

    @property
    def is_mapping(self) -> bool:
        """Whether the node has keys."""
        return isinstance(self.node, yaml.MappingNode)

    def error(self, message: str) -> SchemaError:
        """An error at this place, to be raised."""
        return SchemaError(f"{self.file}:{self.line}: {self.path + ': ' if self.path else ''}{message}")

    def _expect(self, kind: str) -> None:
        if not isinstance(self.node, _KINDS[kind]):
            raise self.error(f"must be {_NAMES[_KINDS[kind]]}, is {_NAMES[type(self.node)]}")

    def mapping(self, known: Sequence[str] | None = None, required: Sequence[str] = ()) -> dict[str, Entry]:
        """Children by key. ``known`` None allows any key; unknown, repeated and missing keys are errors."""
        self._expect("map")
        found: dict[str, Entry] = {}
        for key_node, value_node in self.node.value:
            key = str(key_node.value)
            path = f"{self.path}.{key}" if self.path else key
            here = Entry(self.file, key_node, path)
            if key in found:
                raise here.error("is given twice")
            if known is not None and key not in known:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
                raise here.error(f"unknown key; {hint}")
            found[key] = Entry(self.file, value_node, path)
        for key in required:
            if key not in found:
                raise self.error(f"needs the key {key}")
        return found

    def items(self) -> list[Entry]:
        """Children of a list."""
        self._expect("list")
        return [Entry(self.file, node, f"{self.path}[{i}]") for i, node in enumerate(self.node.value)]

    def value(self) -> Any:
        """The plain value: number, text, true/false or null."""
        self._expect("value")
        return yaml.SafeLoader("").construct_object(self.node)

    def text(self, choices: Sequence[str] | None = None) -> str:
        """Text, one of ``choices`` where given."""
        value = self.value()
        if not isinstance(value, str) or (choices is not None and value not in choices):
            raise self.error(f"must be {'one of ' + ', '.join(choices) if choices else 'text'}, is {value!r}")
        return value

    def integer(self, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        value = self.value()
        if type(value) is not int or value < least:
            raise self.error(f"must be a whole number of at least {least}, is {value!r}")
        return value

    def number(self) -> float:
        """A finite number."""
        value = self.value()
        if type(value) not in (int, float) or value != value or abs(value) == float("inf"):
            raise self.error(f"must be a number, is {value!r}")
        return float(value)

    def boolean(self) -> bool:
        """true or false."""
        value = self.value()
        if not isinstance(value, bool):
            raise self.error(f"must be true or false, is {value!r}")
        return value


def read_yaml(path: str | Path) -> Entry:
    """The root of a YAML file. Raises :class:`SchemaError` for text that is no YAML or an empty file."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SchemaError(f"{path}:{line}: not YAML: {error.problem}") from error
    if node is None:
        raise SchemaError(f"{path}:1: the file is empty")
    return Entry(str(path), node)
