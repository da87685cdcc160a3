"""Flags of ``sgling bench serving`` (upstream's ``bench_serving``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.flags import build_parser, flag, option_name, parse_flags


@dataclass(frozen=True, kw_only=True)
class BenchServingArgs:
    """Load a running server and measure it."""

    backend: str = flag("sglang", "what is spoken: the native /generate route", choices=("sglang", "sglang-native"))
    host: str = flag("127.0.0.1", "address of the server")
    port: int = flag(30000, "port of the server")
    base_url: str | None = flag(None, "address of the server as a URL; replaces host and port")
    ready_check_timeout_sec: float = flag(60.0, "seconds to wait for the server")
    model: str | None = flag(None, "model name; default: the server's")
    tokenizer: str | None = flag(None, "tokenizer directory or hub id; default: the server's")
    dataset_name: str = flag(
        "random", "random = text of exact length, random-ids = consecutive ids", choices=("random", "random-ids")
    )
    dataset_path: str | None = flag(None, "texts for random: a ShareGPT JSON file; default: the packaged text")
    num_prompts: int = flag(1000, "requests to send")
    random_input_len: int = flag(1024, "tokens per prompt, at most")
    random_output_len: int = flag(1024, "tokens per answer, at most")
    random_range_ratio: float = flag(0.0, "lengths are uniform from this share of the length; 1.0 = fixed lengths")
    request_rate: float = flag(float("inf"), "requests per second (Poisson); inf = all at once")
    max_concurrency: int | None = flag(None, "requests in flight, at most")
    seed: int = flag(42, "seed of lengths, prompts and arrival times")
    temperature: float = flag(0.0, "sampling temperature")
    top_p: float = flag(1.0, "nucleus sampling; sent if below 1")
    disable_ignore_eos: bool = flag(False, "let answers end early")
    extra_request_body: dict = flag({}, "JSON object merged into every request")
    tokenize_prompt: bool = flag(False, "send token ids instead of text")
    flush_cache: bool = flag(False, "flush the server's cache after the warm-up")
    flush_cache_timeout: float = flag(60.0, "seconds the flush may wait for the server to be idle")
    warmup_requests: int = flag(1, "copies of the first request to send before the run")
    tag: str | None = flag(None, "free text kept in the output file")
    output_file: str | None = flag(None, "JSONL file to append to; default: a name from backend, date and lengths")
    output_details: bool = flag(False, "keep every request in the output file")

    @classmethod
    def from_cli(cls, argv: Sequence[str], prog: str = "sgling bench serving") -> BenchServingArgs:
        """Read a command line; usage errors exit with status 2."""
        parser = build_parser(cls, prog, cls.__doc__.splitlines()[0])
        args = cls(**parse_flags(parser, argv))
        for name in ("num_prompts", "random_input_len", "random_output_len", "max_concurrency", "request_rate"):
            value = getattr(args, name)
            if value is not None and value <= 0:
                parser.error(f"{option_name(name)} must be positive, got {value}")
        if not 0 <= args.random_range_ratio <= 1:
            parser.error(f"--random-range-ratio must lie in 0 to 1, got {args.random_range_ratio}")
        return args

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")
