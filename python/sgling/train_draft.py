"""``sgling train-draft``: train a drafter on what its target says, export it, check it as the server does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from sgling.srt.config.acceptance import DEFAULT_PROMPTS, Acceptance, floor_key, read_acceptance
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.config.train_draft_args import AblateArgs, TrainDraftArgs
from sgling.srt.managers.acceptance_smoke import SmokeResult, judge, smoke_body
from sgling.srt.model_loader.errors import ModelLoadError
from sgling.training.draft.ablation import ablate
from sgling.training.draft.run import train
from sgling.training.draft.split_serve import train_split

ERRORS = (ServerArgsError, ModelConfigError, ModelLoadError, OSError, RuntimeError, ValueError)


def acceptance_check(kind: str, target: str, folder: Path) -> tuple[SmokeResult, Path]:
    """Serve the exported drafter on the target's fixed prompts; its accept length becomes the floor beside it.

    The server makes the same check at every start (``--speculative-smoke``).
    """
    from sgling import Engine

    known = read_acceptance(resolve_model_path(target))
    acceptance = Acceptance(known.prompts or DEFAULT_PROMPTS, {})
    flags = {"model_path": target, "speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(folder)}
    if kind == "nextn":
        flags = {"model_path": str(folder), "speculative_algorithm": "NEXTN"}
    with Engine(**flags, log_level="warning") as engine:
        spec = engine.server_args.spec
        body = smoke_body(acceptance)
        result = judge(engine.generate(body["text"], body["sampling_params"]), acceptance, spec)
    path = acceptance.with_measured(spec, result.accept_length).write(folder)
    print(f"acceptance check: accept length {result.accept_length:.2f} ({floor_key(spec)}), recorded in {path}")
    if result.accept_length < 1.1:
        raise RuntimeError(f"the exported drafter is not accepted: accept length {result.accept_length:.2f}")
    return result, path


def _train(kind: str, argv: Sequence[str]) -> int:
    args = TrainDraftArgs.read(argv, kind)
    run = train if args.split() is None else train_split
    folder = run(kind, args)
    if not args.no_acceptance_check:
        acceptance_check(kind, args.target, folder)
    print(f"drafter: {folder}")
    return 0


def _ablate(argv: Sequence[str]) -> int:
    print(ablate(AblateArgs.read(argv)))
    return 0


def main(argv: Sequence[str], kind: str) -> int:
    """Command-line entry; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return _ablate(argv) if kind == "ablate" else _train(kind, argv)
    except ERRORS as error:
        print(f"sgling train-draft {kind}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
