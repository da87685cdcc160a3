"""What a scheduler is built from, and the one way to run it, in a thread or in a process of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sgling.srt.config.draft_model import check_drafter, complete_args
from sgling.srt.config.environ import force_shutdown, kernel_switches, read_environ
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.config.token_map import read_token_map
from sgling.srt.managers.channel import SchedulerChannel
from sgling.srt.managers.io_struct import SchedulerDied, SchedulerReady
from sgling.srt.managers.request_validator import context_reserve
from sgling.srt.managers.text_codec import TOKENIZER_FILE, find_tokenizer, load_tokenizer
from sgling.srt.sampling.sampling_params import SamplingParams, SamplingParamsError

if TYPE_CHECKING:  # the HTTP process runs without torch
    from sgling.srt.distributed.parallel_state import ParallelState

logger = logging.getLogger(__name__)


class SchedulerLike(Protocol):
    """What a process or thread runs."""

    def start_info(self) -> SchedulerReady:
        """What the scheduler can serve."""

    def run(self) -> None:
        """Serve until a :class:`ShutdownReq`."""


class SchedulerJob(NamedTuple):
    """Everything the processes are started with; picklable.

    Attributes:
        server_args: resolved, and complete (the drafter's config has been read).
        model_dir: checkpoint directory (``server_args.model_path``, resolved).
        tokenizer_dir: directory of tokenizer.json, or None.
    """

    server_args: ServerArgs
    model_config: ModelConfig
    model_dir: Path
    tokenizer_dir: Path | None


MIN_ROOM = 2  # tokens: the shortest prompt and the shortest answer
SchedulerFactory = Callable[[SchedulerJob, SchedulerChannel | None, "ParallelState"], SchedulerLike]


def make_job(server_args: ServerArgs) -> SchedulerJob:
    """Find the files of model and drafter, read their configs; raises ServerArgsError for what cannot be served."""
    _check_environ()
    model_dir = _directory("--model-path", server_args.model_path, server_args.revision, server_args.download_dir)
    server_args = complete_args(server_args)
    model_config = _read_model(server_args, model_dir)
    check_drafter(server_args, model_config)
    _check_limits(server_args, model_config)
    return SchedulerJob(server_args, model_config, model_dir, _find_tokenizer(server_args, model_dir))


def _directory(flag: str, path: str, revision: str | None, download_dir: str | None) -> Path:
    """Directory of a model or tokenizer; errors name the flag."""
    try:
        return resolve_model_path(path, revision, download_dir)
    except ServerArgsError as error:
        raise ServerArgsError(f"{flag}: {error}") from error


def _read_model(args: ServerArgs, model_dir: Path) -> ModelConfig:
    """The model's config, overrides applied; errors name the flag whose value is at fault."""
    overrides = args.json_model_override_args
    try:
        config = ModelConfig.from_dir(model_dir, overrides)
    except ModelConfigError as error:
        given = f" --json-model-override-args {json.dumps(overrides)}" if overrides else ""
        raise ServerArgsError(f"--model-path {args.model_path}{given}: {error}") from error
    try:
        config.check_tp_size(args.tp_size)
    except ModelConfigError as error:
        raise ServerArgsError(f"--tp-size {args.tp_size}: {error}") from error
    for key in overrides:
        if _changes_nothing(key, overrides, model_dir, config):
            logger.warning("--json-model-override-args: %s changes nothing here", key)
    return config


def _changes_nothing(key: str, overrides: dict, model_dir: Path, config: ModelConfig) -> bool:
    """Whether the model is the same without this override: a misspelt key, one nothing reads, or an equal value."""
    try:
        return ModelConfig.from_dir(model_dir, {name: overrides[name] for name in overrides if name != key}) == config
    except ModelConfigError:
        return False


def _find_tokenizer(args: ServerArgs, model_dir: Path) -> Path | None:
    """Directory of tokenizer.json; a model directory may lack it, a directory given for its sake may not."""
    if args.tokenizer_path == args.model_path:
        found = find_tokenizer(model_dir)
        if found is None:
            logger.warning("No tokenizer: only input_ids are served (looked in %s)", model_dir)
        return found
    directory = _directory("--tokenizer-path", args.tokenizer_path, None, args.download_dir)
    if find_tokenizer(directory) is None:
        raise ServerArgsError(f"--tokenizer-path {args.tokenizer_path}: {directory} has no {TOKENIZER_FILE}")
    return directory


def _check_environ() -> None:
    """A variable that cannot be read (ServerArgsError) must not first show in a running server."""
    if not read_environ().health_check_timeout > 0:
        raise ServerArgsError("environment variable SGLANG_HEALTH_CHECK_TIMEOUT must be above 0")
    kernel_switches()
    force_shutdown()


def _check_limits(args: ServerArgs, config: ModelConfig) -> None:
    """Arguments that only the model can judge: what would fail in every request fails here."""
    if args.context_length is not None and args.context_length > config.context_length:
        raise ServerArgsError(f"--context-length {args.context_length}: the model covers {config.context_length}")
    least = MIN_ROOM + context_reserve(args.spec)
    if args.context_length is not None and args.context_length < least:
        raise ServerArgsError(f"--context-length {args.context_length}: must be at least {least}, one token in and out")
    if args.speculative_token_map is not None:
        if args.spec.algorithm != "NEXTN":
            raise ServerArgsError("--speculative-token-map: only the NEXTN layer drafts through a reduced head")
        read_token_map(args.speculative_token_map, config.vocab_size)
    _check_sampling("--preferred-sampling-params", args.preferred_sampling_params or {}, config.vocab_size)
    if args.sampling_defaults == "model":
        _check_sampling("generation_config.json", config.generation.values(), config.vocab_size)


def _check_sampling(source: str, values: dict, vocab_size: int) -> None:
    """Defaults that every request would be refused for."""
    try:
        SamplingParams.from_dict(values).verify(vocab_size)
    except SamplingParamsError as error:
        raise ServerArgsError(f"{source}: {error}") from error


def create_scheduler(job: SchedulerJob, channel: SchedulerChannel | None, parallel: ParallelState) -> SchedulerLike:
    """The model's scheduler. ``channel`` is None on ranks other than 0."""
    from sgling.srt.managers.scheduler import Scheduler

    tokenizer = None if job.tokenizer_dir is None else load_tokenizer(job.tokenizer_dir)
    return Scheduler(job.server_args, job.model_config, channel, parallel, tokenizer)


def serve_scheduler(
    job: SchedulerJob, channel: SchedulerChannel | None, parallel: ParallelState, factory: SchedulerFactory
) -> bool:
    """Build and run a scheduler to its end; returns whether it ended well. A failure is logged and announced."""
    try:
        scheduler = factory(job, channel, parallel)
        info = scheduler.start_info()
        if channel is not None:
            channel.send(info)
        scheduler.run()
        return True
    except Exception as error:
        if isinstance(error, ServerArgsError):  # a refusal of what was asked for, not a fault: the message says it all
            logger.error("%s", error)
        else:
            logger.exception("Scheduler of rank %d failed", parallel.rank)
        if channel is not None:
            channel.send(SchedulerDied(f"{type(error).__name__}: {error}"))
        return False
