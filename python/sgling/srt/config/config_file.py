"""Turns a ``--config`` YAML file into command-line arguments."""

from __future__ import annotations

import json
from pathlib import Path

from sgling.srt.config.flags import ServerArgsError, flag_fields, option_name


def config_file_argv(cls: type, path: str) -> list[str]:
    """Arguments equal to the file: keys are flag names with hyphens or underscores, aliases included.

    ``true`` sets a switch, ``false`` leaves it, lists and objects are written as the flag takes them. Raises
    :class:`ServerArgsError` when the file cannot be read, is no mapping, or names an unknown flag.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ServerArgsError(f"--config {path}: {error}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ServerArgsError(f"--config {path}: expected a mapping of flag names to values")
    known = {name for field, spec in flag_fields(cls) for name in (option_name(field.name), *spec.aliases)}
    argv: list[str] = []
    for key, value in content.items():
        option = option_name(str(key).removeprefix("--"))
        if option not in known or option == "--config":
            raise ServerArgsError(f"--config {path}: unknown flag {key!r}")
        argv += _arguments(option, value)
    return argv


def _arguments(option: str, value) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={json.dumps(value) if isinstance(value, dict) else value}"]
