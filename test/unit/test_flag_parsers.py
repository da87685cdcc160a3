"""Every group of flags has a parser: a field of a type that no reader knows fails here, not in front of a user."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

import sgling.srt.config
from sgling.srt.config.flags import build_parser, field_types, flag_fields, option_name


def flag_classes() -> dict[str, type]:
    """Dataclasses of the configuration package that have flags, by name."""
    found = {}
    for module in pkgutil.iter_modules(sgling.srt.config.__path__, "sgling.srt.config."):
        for name, cls in inspect.getmembers(importlib.import_module(module.name), dataclasses.is_dataclass):
            if inspect.isclass(cls) and any(True for _ in flag_fields(cls)):
                found[name] = cls
    return found


CLASSES = flag_classes()


def test_the_commands_flags_are_among_the_classes():
    assert {"ServerArgs", "TrainDraftArgs", "AblateArgs"} <= set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_every_flag_is_parsed_to_its_fields_type(name):
    cls = CLASSES[name]
    parser, types = build_parser(cls, "sgling", "test"), field_types(cls)
    texts = {int: "1", float: "0.5", dict: "{}"}
    for field, spec in flag_fields(cls):
        kind = types[field.name]
        value = [] if kind.base is bool else [spec.choices[0] if spec.choices else texts.get(kind.base, "some/text")]
        read = getattr(parser.parse_args([option_name(field.name), *map(str, value)]), field.name)
        assert isinstance(read[0] if kind.is_list else read, kind.base), field.name


def test_help_tells_the_defaults():
    text = " ".join(build_parser(CLASSES["TrainDraftArgs"], "sgling", "test").format_help().split())
    assert "conversations the batched generator answers at a time (default: 256)" in text
    assert "0 = none (default: 2000)" in text
    assert "(default: None)" not in text and "(default: False)" not in text
