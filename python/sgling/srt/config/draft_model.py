"""Finds the files of a DSPARK drafter and completes the arguments with what its config decides."""

from __future__ import annotations

from pathlib import Path

from sgling.srt.config.acceptance import FILE_NAME
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.config.server_args import ServerArgs

BUNDLED_DIR = "dspark"


def drafter_dir(args: ServerArgs) -> Path:
    """Directory of the drafter: ``--speculative-draft-model-path``, else the ``dspark/`` folder of the model.

    Raises :class:`ServerArgsError` when there is neither.
    """
    path = args.speculative_draft_model_path
    if path is not None:
        return resolve_model_path(path, args.speculative_draft_model_revision, args.download_dir)
    bundled = resolve_model_path(args.model_path, args.revision, args.download_dir) / BUNDLED_DIR
    if not (bundled / "config.json").is_file():
        raise ServerArgsError(f"--speculative-algorithm DSPARK: needs --speculative-draft-model-path (no {bundled})")
    return bundled


def complete_args(args: ServerArgs) -> ServerArgs:
    """Resolved arguments with every speculative number decided; unchanged unless a DSPARK drafter is still unread.

    Raises :class:`ServerArgsError` or ``ModelConfigError`` when the drafter is absent or does not fit the flags.
    """
    if args.spec.algorithm != "DSPARK" or args.spec.drafter is not None:
        return args
    return args.with_drafter(DSparkConfig.from_dir(drafter_dir(args)))


def acceptance_dir(args: ServerArgs, model_dir: Path) -> Path:
    """Where the recorded acceptance lies: beside a DSPARK drafter whose training wrote one, else with the model."""
    if args.spec.algorithm == "DSPARK" and args.load_format != "dummy":
        directory = drafter_dir(args)
        if (directory / FILE_NAME).is_file():
            return directory
    return model_dir
