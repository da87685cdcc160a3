"""What a scheduler is built from, and the one way to run it, in a thread or in a process of its own."""

from __future__ import annotations

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
from sgling.srt.managers.text_codec import find_tokenizer, load_tokenizer
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


SchedulerFactory = Callable[[SchedulerJob, SchedulerChannel | None, "ParallelState"], SchedulerLike]


def make_job(server_args: ServerArgs) -> SchedulerJob:
    """Find the files of model and drafter, read their configs; raises ServerArgsError for what cannot be served."""
    _check_environ()
    model_dir = resolve_model_path(server_args.model_path, server_args.revision, server_args.download_dir)
    tokenizer_dir = model_dir
    if server_args.tokenizer_path != server_args.model_path:
        tokenizer_dir = resolve_model_path(server_args.tokenizer_path, None, server_args.download_dir)
    try:
        server_args = complete_args(server_args)
        model_config = ModelConfig.from_dir(model_dir, server_args.json_model_override_args)
        model_config.check_tp_size(server_args.tp_size)
    except ModelConfigError as error:
        raise ServerArgsError(str(error)) from error
    check_drafter(server_args, model_config)
    _check_limits(server_args, model_config)
    tokenizer = None if server_args.skip_tokenizer_init else find_tokenizer(tokenizer_dir)
    if tokenizer is None:
        logger.warning("No tokenizer: only input_ids are served (looked in %s)", tokenizer_dir)
    return SchedulerJob(server_args, model_config, model_dir, tokenizer)


def _check_environ() -> None:
    """A variable that cannot be read (ServerArgsError) must not first show in a running server."""
    read_environ()
    kernel_switches()
    force_shutdown()


def _check_limits(args: ServerArgs, config: ModelConfig) -> None:
    """Arguments that only the model can judge: what would fail in every request fails here."""
    if args.context_length is not None and args.context_length > config.context_length:
        raise ServerArgsError(f"--context-length {args.context_length}: the model covers {config.context_length}")
    if args.speculative_token_map is not None:
        if args.spec.algorithm != "NEXTN":
            raise ServerArgsError("--speculative-token-map: only the NEXTN layer drafts through a reduced head")
        read_token_map(args.speculative_token_map, config.vocab_size)
    try:
        SamplingParams.from_dict(args.preferred_sampling_params or {}).verify(config.vocab_size)
    except SamplingParamsError as error:
        raise ServerArgsError(f"--preferred-sampling-params: {error}") from error


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
