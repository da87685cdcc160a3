"""Finds the files of a DSPARK drafter and completes the arguments with what its config decides."""

from __future__ import annotations

from pathlib import Path

from sgling.srt.config.acceptance import FILE_NAME
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.config.server_args import ServerArgs

BUNDLED_DIR = "dspark"
_FLAG = "--speculative-draft-model-path"


def drafter_dir(args: ServerArgs) -> Path:
    """Directory of the drafter: ``--speculative-draft-model-path``, else the ``dspark/`` folder of the model.

    Raises :class:`ServerArgsError` when there is neither.
    """
    path = args.speculative_draft_model_path
    if path is not None:
        try:
            return resolve_model_path(path, args.speculative_draft_model_revision, args.download_dir)
        except ServerArgsError as error:
            raise ServerArgsError(f"{_FLAG}: {error}") from error
    bundled = resolve_model_path(args.model_path, args.revision, args.download_dir) / BUNDLED_DIR
    if not (bundled / "config.json").is_file():
        raise ServerArgsError(f"--speculative-algorithm DSPARK: needs {_FLAG} (no {bundled})")
    return bundled


def complete_args(args: ServerArgs) -> ServerArgs:
    """Resolved arguments with every speculative number decided; unchanged unless a DSPARK drafter is still unread.

    Raises :class:`ServerArgsError` when the drafter is absent, cannot be read or does not fit the flags.
    """
    if args.spec.algorithm != "DSPARK" or args.spec.drafter is not None:
        return args
    try:
        drafter = DSparkConfig.from_dir(drafter_dir(args))
    except ModelConfigError as error:
        raise ServerArgsError(f"{draft_source(args)}: {error}") from error
    return args.with_drafter(drafter)


def check_drafter(args: ServerArgs, target: ModelConfig) -> None:
    """Refuse (:class:`ServerArgsError`) a drafter that does not fit the target; nothing to do without one."""
    if args.spec.drafter is None:
        return
    try:
        args.spec.drafter.check_target(target, args.tp_size)
    except ModelConfigError as error:
        raise ServerArgsError(f"{draft_source(args)}: {error}") from error


def draft_source(args: ServerArgs) -> str:
    """Where the drafter comes from, as messages say it: the flag with its value, or the folder in the model."""
    path = args.speculative_draft_model_path
    return f"{_FLAG} {path}" if path is not None else f"{BUNDLED_DIR}/ of {args.model_path}"


def acceptance_dir(args: ServerArgs, model_dir: Path) -> Path:
    """Where the recorded acceptance lies: beside a DSPARK drafter whose training wrote one, else with the model."""
    if args.spec.algorithm == "DSPARK" and args.load_format != "dummy":
        directory = drafter_dir(args)
        if (directory / FILE_NAME).is_file():
            return directory
    return model_dir
