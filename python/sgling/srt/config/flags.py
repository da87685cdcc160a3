"""Declarative command-line flags: a dataclass field carries everything known about its flag.

A group of flags is a frozen keyword-only dataclass whose fields are made by :func:`flag`, :func:`hint` or
:func:`not_built`. The flag name (``tp_size`` -> ``--tp-size``), the parser, the keyword interface and the report of
``/server_info`` follow from the fields, so a flag is written down once.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


class ServerArgsError(ValueError):
    """A flag has a value this build cannot serve. The message names the flag and the reason."""


class Kind(enum.Enum):
    """What a flag does in this build."""

    SUPPORTED = "supported"
    HINT = "hint"  # accepted with a notice: it cannot change an answer
    NOT_BUILT = "not_built"  # a start-up error when set to a value that asks for something


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """Everything about a flag but its name, type and default, which the dataclass field has.

    Attributes:
        help: shown by ``--help``; for hints the reason it has no effect, for missing features the feature.
        aliases: further option strings.
        choices: accepted values, None = any.
        neutral: values besides the default that ask for nothing (hints and missing features).
    """

    help: str
    aliases: tuple[str, ...] = ()
    kind: Kind = Kind.SUPPORTED
    choices: tuple | None = None
    neutral: tuple = ()


def _field(default, spec: FlagSpec):
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={"flag": spec})
    return dataclasses.field(default=default, metadata={"flag": spec})


def flag(default, help: str, *aliases: str, choices: tuple | None = None):
    """A flag that does what it says."""
    return _field(default, FlagSpec(help, aliases, choices=choices))


def hint(default, reason: str, *aliases: str, choices: tuple | None = None, neutral: tuple = ()):
    """A flag accepted for compatibility; ``reason`` says why it changes nothing here."""
    return _field(default, FlagSpec(reason, aliases, Kind.HINT, choices, neutral))


def not_built(default, feature: str, *aliases: str, neutral: tuple = ()):
    """A flag whose feature does not exist yet; any value but the default and ``neutral`` is a start-up error."""
    return _field(default, FlagSpec(feature, aliases, Kind.NOT_BUILT, None, neutral))


def option_name(field_name: str) -> str:
    """``tp_size`` -> ``--tp-size``."""
    return "--" + field_name.replace("_", "-")


def flag_fields(cls: type) -> Iterator[tuple[dataclasses.Field, FlagSpec]]:
    """Every flag of a dataclass, in declaration order."""
    for field in dataclasses.fields(cls):
        if "flag" in field.metadata:
            yield field, field.metadata["flag"]


def field_default(field: dataclasses.Field):
    """The default of a field, whichever way it is declared."""
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_int(text: str) -> int:
    """Read an integer with an optional suffix: k, m, g are powers of 1000 (``4k`` = 4000), K, M, G of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", text.strip())
    if match is None:
        return int(text)
    value = float(match.group(1)) * _SUFFIXES[match.group(2)]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def parse_json_object(text: str) -> dict:
    """Read a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text!r}")
    return value


class FieldType(typing.NamedTuple):
    """A field's annotation, taken apart: ``list[int] | None`` -> (int, is_list, optional)."""

    base: type
    is_list: bool
    optional: bool


def field_types(cls: type) -> dict[str, FieldType]:
    """The types of a dataclass' fields by name."""
    found = {}
    for name, annotation in typing.get_type_hints(cls).items():
        alternatives = [arm for arm in typing.get_args(annotation) if arm is not type(None)]
        optional = typing.get_origin(annotation) is not list and type(None) in typing.get_args(annotation)
        inner = alternatives[0] if optional else annotation
        is_list = typing.get_origin(inner) is list
        found[name] = FieldType(typing.get_args(inner)[0] if is_list else inner, is_list, optional)
    return found


_READERS: dict[type, tuple[Callable, str]] = {
    int: (parse_int, "an integer"),
    float: (float, "a number"),
    dict: (parse_json_object, "a JSON object"),
    str: (str, "text"),
    Path: (Path, "a path"),
}


def _argument_reader(kind: type) -> Callable[[str], object]:
    """What argparse calls; its errors say what was wanted."""
    reader, wanted = _READERS[kind]

    def read(text: str):
        try:
            return reader(text)
        except (ValueError, RecursionError):
            shown = repr(text) if len(text) <= 80 else f"{text[:80]!r}..."
            raise argparse.ArgumentTypeError(f"{shown} is not {wanted}") from None

    return read


def _default_text(field: dataclasses.Field, spec: FlagSpec) -> str:
    """What ``--help`` adds to a flag whose default is a value and is not told by its own words."""
    default = field_default(field)
    told = default is None or default is False or default in ("", [], {}) or "default" in spec.help
    return "" if told or spec.kind is not Kind.SUPPORTED else f" (default: {default})"


def _add_argument(parser: argparse.ArgumentParser, field: dataclasses.Field, spec: FlagSpec, kind: FieldType) -> None:
    names = (option_name(field.name), *spec.aliases)
    shown = f"{spec.help}{_default_text(field, spec)}"
    options: dict = {"dest": field.name, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
    if spec.kind is not Kind.SUPPORTED:
        options["help"] = f"[{spec.kind.value.replace('_', ' ')}] {options['help']}"
    if kind.base is bool:
        options["action"] = "store_true"
    else:
        options.update(type=_argument_reader(kind.base), choices=spec.choices, metavar=kind.base.__name__.upper())
        if spec.choices:
            options.pop("metavar")
        if kind.is_list:
            options["nargs"] = "+"
    parser.add_argument(*names, **options)


def build_parser(cls: type, prog: str, description: str, positional: str | None = None) -> argparse.ArgumentParser:
    """Parser of a flag dataclass: prefix abbreviations, exit status 2 with usage on unknown or ambiguous flags.

    ``positional`` names a field that may also be given as the one bare argument.
    """
    types = field_types(cls)
    bare = f"[{positional.upper()}] " if positional else ""
    usage = f"{prog} {bare}[--flag VALUE ...]  (--help lists the flags)"
    parser = argparse.ArgumentParser(prog=prog, usage=usage, description=description, allow_abbrev=True)
    for field, spec in flag_fields(cls):
        _add_argument(parser, field, spec, types[field.name])
        if field.name == positional:
            parser.add_argument("positional", nargs="?", metavar=positional.upper(), help=spec.help)
    parser.set_defaults(positional_name=positional)
    return parser


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict:
    """Run the parser; returns only what was given, by field name."""
    given = vars(parser.parse_args(list(argv)))
    name, value = given.pop("positional_name"), given.pop("positional", None)
    if value is not None:
        if name in given:
            parser.error(f"{option_name(name)} is given twice: {value!r} and {given[name]!r}")
        given[name] = value
    return given


def check_keywords(cls: type, given: dict) -> dict:
    """Check keyword arguments against the fields: unknown names and wrong types are TypeErrors that name them."""
    types = field_types(cls)
    specs = {field.name: spec for field, spec in flag_fields(cls)}
    checked = {}
    for name, value in given.items():
        if name not in specs:
            raise TypeError(f"unknown argument {name!r}")
        checked[name] = _check_value(name, value, types[name])
        choices = specs[name].choices
        if choices and value is not None and value not in choices:
            raise ServerArgsError(f"{option_name(name)}: {value!r} is not one of {', '.join(map(str, choices))}")
    return checked


def _check_value(name: str, value, kind: FieldType):
    if value is None:
        if kind.optional:
            return None
        raise TypeError(f"argument {name!r} must not be None")
    if kind.base is dict and isinstance(value, str):
        return parse_json_object(value)
    if kind.base is float and type(value) is int:
        return float(value)
    items = value if kind.is_list and isinstance(value, (list, tuple)) else [value]
    if (kind.is_list and items is not value) or any(type(item) is not kind.base for item in items):
        wanted = f"list of {kind.base.__name__}" if kind.is_list else kind.base.__name__
        raise TypeError(f"argument {name!r} must be {wanted}, got {value!r}")
    return list(items) if kind.is_list else value
