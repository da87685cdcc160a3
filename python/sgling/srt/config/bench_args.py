"""Flags of ``sgling bench serving`` (upstream's ``bench_serving``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.flags import build_parser, flag, option_name, parse_flags

BACKENDS = ("sglang", "sglang-native", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat")
DATASETS = ("random", "random-ids", "sharegpt", "custom", "openai", "generated-shared-prefix")
SCENARIO_DATASETS = ("coding", "tool_calling", "long_report", "zh_chat", "scenarios")
DEFAULT_PORT = 30000
CACHE_STATES = ("default", "cold", "warm", "both")

# (prompts, input tokens, output tokens) where the flags do not say: upstream's, and what a CPU does in a minute.
GPU_SCALE = (1000, 1024, 1024)
CPU_SCALE = (16, 128, 64)


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where a running server is."""

    host: str = flag("127.0.0.1", "address of the server")
    port: int | None = flag(DEFAULT_PORT, "port of the server")
    base_url: str | None = flag(None, "address of the server as a URL; replaces host and port")
    header: list[str] | None = flag(None, "headers of every request, NAME=VALUE")
    ready_check_timeout_sec: float = flag(60.0, "seconds to wait for the server")

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return (self.base_url or f"http://{self.host}:{self.port or DEFAULT_PORT}").rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        """``--header`` as a mapping."""
        return dict(entry.split("=", 1) for entry in self.header or ())

    def address_error(self) -> str | None:
        """What is wrong with the address flags."""
        wrong = [entry for entry in self.header or () if not re.fullmatch(r"[^=\s]+=.*", entry)]
        return f"--header must be NAME=VALUE, got {wrong[0]!r}" if wrong else None


@dataclass(frozen=True, kw_only=True)
class BenchServingArgs(ServerAddress):
    """Load a running server and measure it."""

    backend: str = flag("sglang", "dialect: native /generate, OpenAI completions (-oai), OpenAI chat", choices=BACKENDS)
    model: str | None = flag(None, "model name; default: the server's")
    served_model_name: str | None = flag(None, "name sent in OpenAI requests, where it differs from --model")
    tokenizer: str | None = flag(None, "tokenizer directory or hub id; default: the server's")
    dataset_name: str = flag(
        "random",
        "random = text of exact length, random-ids = consecutive ids, sharegpt/custom/openai = a local file, or one of "
        "the built-in scenarios (scenarios = all four in turn)",
        choices=(*DATASETS, *SCENARIO_DATASETS),
    )
    dataset_path: str | None = flag(None, "local file of the data set; random takes its texts from it")
    num_prompts: int | None = flag(None, f"requests to send; default {GPU_SCALE[0]}, on a CPU server {CPU_SCALE[0]}")
    random_input_len: int | None = flag(
        None, f"tokens per prompt, at most; default {GPU_SCALE[1]}, on a CPU server {CPU_SCALE[1]}"
    )
    random_output_len: int | None = flag(
        None, f"tokens per answer, at most; default {GPU_SCALE[2]}, on a CPU server {CPU_SCALE[2]}"
    )
    random_range_ratio: float = flag(0.0, "lengths are uniform from this share of the length; 1.0 = fixed lengths")
    sharegpt_output_len: int | None = flag(None, "tokens per answer of file data sets; default: as in the file")
    sharegpt_context_len: int | None = flag(None, "leave out conversations longer than this")
    scenario_output_len: int = flag(256, "tokens per answer of the built-in scenarios, at most")
    raw_prompts: bool = flag(False, "built-in scenarios without chat template: the user's words alone")
    gsp_num_groups: int = flag(64, "generated-shared-prefix: system prompts")
    gsp_prompts_per_group: int = flag(16, "generated-shared-prefix: prompts per system prompt")
    gsp_system_prompt_len: int = flag(2048, "generated-shared-prefix: tokens per system prompt")
    gsp_question_len: int = flag(128, "generated-shared-prefix: tokens per question")
    gsp_output_len: int = flag(256, "generated-shared-prefix: tokens per answer")
    request_rate: float = flag(float("inf"), "requests per second (Poisson); inf = all at once")
    max_concurrency: int | None = flag(None, "requests in flight, at most")
    seed: int = flag(42, "seed of lengths, prompts and arrival times")
    temperature: float = flag(0.0, "sampling temperature")
    top_p: float = flag(1.0, "nucleus sampling; sent if below 1")
    disable_ignore_eos: bool = flag(False, "let answers end early (built-in scenarios always may)")
    disable_stream: bool = flag(False, "one-shot answers: no TTFT, TPOT and ITL")
    return_logprob: bool = flag(False, "ask for logprobs (native)")
    top_logprobs_num: int = flag(0, "alternatives per token (native)")
    logprob_start_len: int = flag(-1, "first prompt token whose logprob is wanted (native)")
    extra_request_body: dict = flag({}, "JSON object merged into every request; null removes a field")
    apply_chat_template: bool = flag(False, "wrap text prompts as one user message with the tokenizer's template")
    tokenize_prompt: bool = flag(False, "send token ids instead of text (native and completions)")
    flush_cache: bool = flag(False, "flush the server's cache after the warm-up")
    flush_cache_timeout: float = flag(60.0, "seconds the flush may wait for the server to be idle")
    cache_state: str = flag(
        "default",
        "cold = flushed before the run, warm = every prompt was sent once before, both = one run each; "
        "default = as upstream: the first prompt may be cached by the warm-up",
        choices=CACHE_STATES,
    )
    warmup_requests: int = flag(1, "copies of the first request to send before the run")
    profile: bool = flag(False, "have the server profile the run (/start_profile, /stop_profile)")
    disable_tqdm: bool = flag(False, "no progress bar")
    tag: str | None = flag(None, "free text kept in the output file")
    output_file: str | None = flag(None, "JSONL file to append to; default: a name from backend, date and lengths")
    output_details: bool = flag(False, "keep every request in the output file")

    @classmethod
    def from_cli(cls, argv: Sequence[str], prog: str = "sgling bench serving") -> BenchServingArgs:
        """Read a command line; usage errors exit with status 2."""
        parser = build_parser(cls, prog, cls.__doc__.splitlines()[0])
        args = cls(**parse_flags(parser, argv))
        if error := args.error():
            parser.error(error)
        return args

    def error(self) -> str | None:
        """What is wrong with the flags together."""
        counts = ("num_prompts", "random_input_len", "random_output_len", "max_concurrency", "request_rate")
        groups = ("gsp_num_groups", "gsp_prompts_per_group", "gsp_system_prompt_len", "gsp_question_len")
        more = ("gsp_output_len", "scenario_output_len", "sharegpt_output_len", "sharegpt_context_len")
        for name in (*counts, *groups, *more):
            value = getattr(self, name)
            if value is not None and value <= 0:
                return f"{option_name(name)} must be positive, got {value}"
        if not 0 <= self.random_range_ratio <= 1:
            return f"--random-range-ratio must lie in 0 to 1, got {self.random_range_ratio}"
        if self.dataset_name in ("sharegpt", "custom", "openai") and not self.dataset_path:
            return f"--dataset-name {self.dataset_name} needs --dataset-path: nothing is downloaded"
        if self.tokenize_prompt and self.backend.endswith("-chat"):
            return "--tokenize-prompt: chat requests carry messages, not token ids"
        return self.address_error()

    @property
    def is_random(self) -> bool:
        """Whether prompts are made up, so that accept length says little."""
        return self.dataset_name in ("random", "random-ids", "generated-shared-prefix")

    @property
    def is_scenario(self) -> bool:
        """Whether the data set is a built-in scenario."""
        return self.dataset_name in SCENARIO_DATASETS
