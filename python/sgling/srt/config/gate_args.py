"""Flags of ``sgling gate``: what is judged (a running server or an engine) and against what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.bench_args import ServerAddress
from sgling.srt.config.flags import build_parser, flag, parse_flags
from sgling.srt.config.model_path import DEFAULT_MODEL


@dataclass(frozen=True, kw_only=True)
class Subject(ServerAddress):
    """A running server, or an engine started in this process."""

    port: int | None = flag(None, "port of a running server; without it and --base-url an engine is started here")
    model_path: str = flag(DEFAULT_MODEL, "model of the engine that is started", "--model")
    engine_args: dict = flag({}, "JSON object of server flags, underscore names, for that engine")
    tokenizer: str | None = flag(None, "tokenizer directory or hub id; default: the server's")

    @property
    def is_live(self) -> bool:
        """Whether a running server is meant."""
        return self.base_url is not None or self.port is not None

    @classmethod
    def read(cls, argv: Sequence[str], prog: str, positional: str | None = None):
        """Read a command line; usage errors exit with status 2."""
        parser = build_parser(cls, prog, cls.__doc__.splitlines()[0], positional)
        args = cls(**parse_flags(parser, argv))
        if error := args.address_error() or args.error():
            parser.error(error)
        return args

    def error(self) -> str | None:
        """What is wrong with the flags together."""


@dataclass(frozen=True, kw_only=True)
class CorrectnessArgs(Subject):
    """Check that a server's greedy answers are exact: golden bytes, state, speculation, company."""

    golden: str | None = flag(None, "golden file; default: the packaged one of ling3-pico")
    record: bool = flag(False, "write the golden file instead of checking it")
    prompts_per_scenario: int = flag(1, "prompts of a recorded golden")
    tokens: int = flag(256, "tokens per answer of a recorded golden")
    tie_margin: float = flag(
        0.0, "cut recorded answers before a token whose lead is smaller (nats), for goldens that other machines check"
    )
    accept_tolerance: float = flag(0.05, "accept length may differ from the golden's by this much")
    argmax_margin: float = flag(0.1, "a token may score this much (nats) below the target's best, for rounding")
    plain_url: str | None = flag(None, "the same model without speculation, for servers that cannot turn it off")
    json: str | None = flag(None, "file for the machine-readable report")

    def error(self) -> str | None:
        """What is wrong with the flags together."""
        if min(self.tokens, self.prompts_per_scenario) <= 0:
            return "--tokens and --prompts-per-scenario must be positive"
        return "--record needs --golden FILE" if self.record and self.golden is None else None


@dataclass(frozen=True, kw_only=True)
class ContractArgs(Subject):
    """Check a server against a contract of bounds per scenario and concurrency."""

    contract: str | None = flag(None, "contract file; default: the packaged one of ling3-pico")
    short: bool = flag(False, "the short form the contract defines")
    record_baseline: bool = flag(False, "measure and write the baseline file that relative bounds refer to")
    json: str | None = flag(None, "file for the machine-readable report")
    disable_tqdm: bool = flag(False, "no progress lines")
