"""``ServerArgs``: every argument of a server, parsed, checked and resolved once, then read-only.

Two stages. ``parse`` / ``from_kwargs`` read what was given; ``resolved`` refuses what this build cannot serve and
replaces every "auto" and ``None`` that does not depend on the model's files by its value. Everything else in the engine
sees resolved arguments only.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterator, Sequence

from sgling.srt.config.args_model import ModelArgs
from sgling.srt.config.args_runtime import GraphArgs, KernelArgs, MemoryArgs, ParallelArgs, ScheduleArgs
from sgling.srt.config.args_serving import HttpArgs, LogArgs, OutputArgs
from sgling.srt.config.args_speculative import DSparkArgs, SpeculativeArgs, SpeculativeHintArgs
from sgling.srt.config.config_file import config_file_argv
from sgling.srt.config.dspark_config import MAX_BLOCK_SIZE, DSparkConfig
from sgling.srt.config.environ import read_environ
from sgling.srt.config.flags import (
    Kind,
    ServerArgsError,
    build_parser,
    check_keywords,
    field_default,
    flag,
    flag_fields,
    option_name,
    parse_flags,
)
from sgling.srt.config.model_path import is_embedded
from sgling.srt.config.spec_config import (
    SpecConfig,
    complete_spec_config,
    resolve_spec_config,
    with_default_rollback,
)

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": "bfloat16", "float": "float32", "float32": "float32"}
MAX_PAGE_SIZE = 64
GPU_REQUESTS, INVARIANT_ROWS = 48, 160  # up to that many rows a GPU step gives a row the bits it has alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerArgs(
    SpeculativeHintArgs,
    DSparkArgs,
    SpeculativeArgs,
    ParallelArgs,
    GraphArgs,
    KernelArgs,
    ScheduleArgs,
    MemoryArgs,
    LogArgs,
    OutputArgs,
    HttpArgs,
    ModelArgs,
):
    """Start an OpenAI-compatible server.

    After :meth:`resolved`:
    ``device`` is cpu or cuda; ``dtype`` is float32 or bfloat16; ``random_seed``, ``tokenizer_path``,
    ``served_model_name``, ``page_size``, ``max_running_requests``, ``chunked_prefill_size`` (-1 = off),
    ``cuda_graph_metadata`` and ``mem_fraction_static`` are set; parsers named "none" are None; the speculative flags
    agree with ``spec``.
    """

    config: str | None = flag(None, "YAML file of flags; the command line wins")
    notices: tuple[str, ...] = ()  # what was accepted without effect, for /server_info
    spec: SpecConfig | None = None  # the resolved speculation; None only before resolved()

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str = "sgling serve", positional: str | None = "model_path"):
        """Read a command line without resolving it. Prints usage and exits with status 2 on usage errors."""
        parser = build_parser(cls, prog, cls.__doc__.splitlines()[0], positional)
        given = parse_flags(parser, argv)
        if "config" in given:
            try:
                from_file = config_file_argv(cls, given["config"])
            except ServerArgsError as error:
                parser.error(str(error))
            given = parse_flags(parser, from_file) | given
        return cls(**given)

    @classmethod
    def from_cli(
        cls, argv: Sequence[str], prog: str = "sgling serve", positional: str | None = "model_path"
    ) -> ServerArgs:
        """Read and resolve a command line.

        Usage errors exit with status 2; values this build cannot serve raise :class:`ServerArgsError`.
        """
        return cls.parse(argv, prog, positional).resolved()

    @classmethod
    def from_kwargs(cls, **given) -> ServerArgs:
        """Check and resolve keyword arguments (``Engine``). Unknown names and wrong types raise TypeError."""
        return cls(**check_keywords(cls, given)).resolved()

    def resolved(self) -> ServerArgs:
        """The arguments with every automatic value decided. Logs a notice for each accepted hint."""
        spec = resolve_spec_config(self, is_embedded(self.model_path))
        _refuse_unbuilt(self)
        _check_texts(self)
        _check_ranges(self)
        _check_attention(self, spec)
        device = _resolve_device(self)
        on_cpu = device["device"] == "cpu"
        notices = (*_hint_notices(self), *_graph_notices(self, on_cpu))
        for notice in notices:
            logger.warning("%s", notice)
        spec = with_default_rollback(spec, self, on_cpu)
        values = {**device, **_speculative_fields(spec), "spec": spec, "notices": notices}
        defaults = {
            "tokenizer_path": self.model_path,
            "served_model_name": self.model_path,
            "random_seed": random.SystemRandom().randrange(2**31),
            "page_size": 1,
            "max_running_requests": 16 if on_cpu else _requests_on_a_gpu(spec),
            "chunked_prefill_size": 2048 if on_cpu else 8192,
            "mem_fraction_static": 0.85,
            "cuda_graph_metadata": "glue" if read_environ().enable_metadata_glue_graph else "in_graph",
        }
        values.update((name, value) for name, value in defaults.items() if getattr(self, name) is None)
        values.update((name, None) for name in _PARSERS if getattr(self, name) == "none")
        return dataclasses.replace(self, **values)

    def with_drafter(self, drafter: DSparkConfig) -> ServerArgs:
        """Resolved arguments completed by the drafter's config (DSPARK); see :mod:`sgling.srt.config.draft_model`."""
        spec = complete_spec_config(self, drafter)
        return dataclasses.replace(self, **_speculative_fields(spec), spec=spec)

    def given(self) -> dict:
        """Server flags that differ from their default, as keyword arguments of ``Engine``."""
        values = ((field, getattr(self, field.name)) for field, _ in flag_fields(ServerArgs))
        return {field.name: value for field, value in values if value != field_default(field)}

    def to_dict(self) -> dict:
        """Plain JSON of every argument by underscore name; keys that must not be shown are masked."""
        shown = dataclasses.asdict(self)
        shown.update((name, "***") for name in ("api_key", "admin_api_key") if shown[name] is not None)
        del shown["spec"]
        return {**shown, "notices": list(self.notices)}


_PARSERS = ("reasoning_parser", "tool_call_parser")


def _requests_on_a_gpu(spec: SpecConfig) -> int:
    """As many as keep every step row-invariant; a DSPARK drafter that is not read yet counts with its widest block."""
    return min(GPU_REQUESTS, INVARIANT_ROWS // (spec.width or MAX_BLOCK_SIZE + 1))


def _asks(args: ServerArgs, kind: Kind):
    """Flags of a kind whose value asks for something: (option, value, spec)."""
    for field, spec in flag_fields(ServerArgs):
        value = getattr(args, field.name)
        if spec.kind is kind and value != field_default(field) and value not in spec.neutral:
            yield option_name(field.name), value, spec


def _refuse_unbuilt(args: ServerArgs) -> None:
    for option, value, spec in _asks(args, Kind.NOT_BUILT):
        shown = option if value is True else f"{option} {value}"
        raise ServerArgsError(f"{shown}: not built yet ({spec.help})")


def _hint_notices(args: ServerArgs) -> tuple[str, ...]:
    return tuple(
        f"{option if value is True else f'{option} {value}'} accepted without effect: {spec.help}"
        for option, value, spec in _asks(args, Kind.HINT)
    )


def _graph_notices(args: ServerArgs, on_cpu: bool) -> Iterator[str]:
    """Flags that say what to capture where nothing is captured."""
    reason = "a CPU has no CUDA graphs" if on_cpu else "CUDA graphs are disabled"
    if on_cpu or args.disable_cuda_graph or args.disable_decode_cuda_graph:
        for name in ("cuda_graph_bs_decode", "cuda_graph_max_bs_decode", "cuda_graph_all_widths"):
            if getattr(args, name):
                yield f"{option_name(name)} accepted without effect: {reason}"


def _speculative_fields(spec: SpecConfig) -> dict:
    """Speculative flags after resolution; all None when speculation is off, as upstream reports them."""
    on = spec.enabled
    return {
        "speculative_algorithm": spec.algorithm,
        "speculative_num_steps": spec.num_steps if on else None,
        "speculative_eagle_topk": spec.topk if on else None,
        "speculative_num_draft_tokens": spec.width or None if on else None,
        "speculative_depth": spec.depth if on else None,
        "linear_rollback": spec.rollback,
        "linear_replayssm_cache_len": spec.ring_length or None if spec.rollback == "replay" else None,
    }


def _check_attention(args: ServerArgs, spec: SpecConfig) -> None:
    if args.attention_backend == "flashinfer" and spec.algorithm == "NEXTN":
        raise ServerArgsError("--attention-backend flashinfer: not built for NEXTN, only for DSPARK or no speculation")


# (flag, smallest, largest or None, further accepted values); None always means "not given" and is skipped.
_RANGES = (
    ("port", 0, 65535, ()),
    ("tp_size", 1, None, ()),
    ("context_length", 1, None, ()),
    ("chunked_prefill_size", 1, None, (-1,)),
    ("max_total_tokens", 1, None, ()),
    ("max_running_requests", 1, None, ()),
    ("max_queued_requests", 0, None, ()),
    ("cuda_graph_max_bs_decode", 1, None, ()),
    ("page_size", 1, MAX_PAGE_SIZE, ()),
    ("stream_interval", 1, None, ()),
    ("decode_log_interval", 1, None, ()),
    ("log_requests_level", 0, 3, ()),
    ("random_seed", 0, 2**63 - 1, ()),
)


def _check_texts(args: ServerArgs) -> None:
    """Empty texts are unset shell variables more often than wishes; a key must fit into a header."""
    for field, spec in flag_fields(ServerArgs):
        if spec.kind is Kind.SUPPORTED and getattr(args, field.name) == "":
            raise ServerArgsError(f"{option_name(field.name)}: must not be empty")
    for name in ("api_key", "admin_api_key"):
        key = getattr(args, name)
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ServerArgsError(f"{option_name(name)}: must be printable ASCII without blanks")
    if args.skip_server_warmup and args.speculative_smoke == "on":
        raise ServerArgsError("--speculative-smoke on contradicts --skip-server-warmup: the smoke is part of it")


def _check_ranges(args: ServerArgs) -> None:
    for name, low, high, extra in _RANGES:
        value = getattr(args, name)
        if value is None or value in extra or (value >= low and (high is None or value <= high)):
            continue
        wanted = f"at least {low}" if high is None else f"{low} to {high}"
        raise ServerArgsError(f"{option_name(name)} {value}: must be {wanted}" + "".join(f" or {e}" for e in extra))
    if args.mem_fraction_static is not None and not 0 < args.mem_fraction_static < 1:
        raise ServerArgsError(f"--mem-fraction-static {args.mem_fraction_static}: must lie between 0 and 1")
    if any(size < 1 for size in args.cuda_graph_bs_decode or ()):
        shown = " ".join(map(str, args.cuda_graph_bs_decode))
        raise ServerArgsError(f"--cuda-graph-bs-decode {shown}: batch sizes must be at least 1")
    if args.drain_timeout is not None and not args.drain_timeout >= 0:
        raise ServerArgsError(f"--drain-timeout {args.drain_timeout}: must be at least 0")
    if not args.watchdog_timeout > 0:
        raise ServerArgsError(f"--watchdog-timeout {args.watchdog_timeout}: must be positive")


def _resolve_device(args: ServerArgs) -> dict:
    """``device`` and ``dtype`` by name."""
    device = args.device
    if device != "cpu":
        import torch  # here, so that --help and usage errors do not wait for it

        if device == "cuda" and not torch.cuda.is_available():
            raise ServerArgsError("--device cuda: no GPU is visible")
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.dtype == "auto":
        return {"device": device, "dtype": "float32" if device == "cpu" else "bfloat16"}
    if args.dtype not in _DTYPES:
        raise ServerArgsError(f"--dtype {args.dtype}: float16 is not built yet; use bfloat16 or float32")
    return {"device": device, "dtype": _DTYPES[args.dtype]}
