"""Flags: the HTTP surface, chat templates and parsers, logs and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from sgling.srt.config.flags import flag, hint, not_built

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, kw_only=True)
class HttpArgs:
    """Where and for whom the server listens."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "port to listen on")
    api_key: str | None = flag(None, "bearer token that requests must carry")
    admin_api_key: str | None = flag(None, "bearer token of the admin routes")
    served_model_name: str | None = flag(None, "id in /v1/models; default: the model path")
    skip_server_warmup: bool = flag(False, "report healthy without a warm-up request")
    warmups: str | None = not_built(None, "named warm-up functions")
    tokenizer_worker_num: int = not_built(1, "several tokenizer processes")
    skip_tokenizer_init: bool = not_built(False, "serving token ids without a tokenizer")
    drain_timeout: float | None = flag(
        None, "seconds that SIGTERM waits for running requests, then they are aborted; default: until all have ended"
    )
    max_queued_requests: int | None = flag(None, "requests allowed to wait; one more is answered 503")
    allow_auto_truncate: bool = not_built(False, "cutting over-long prompts (they are refused)")


@dataclass(frozen=True, kw_only=True)
class OutputArgs:
    """How answers are streamed and what fills unset request fields."""

    stream_interval: int = flag(1, "tokens between two stream chunks, at least")
    incremental_streaming_output: bool = flag(False, "native streams carry deltas instead of cumulative text")
    stream_response_default_include_usage: bool = flag(False, "OpenAI streams end with usage unless told not to")
    batch_notify_size: int = hint(16, "outputs are handed over once per step")
    enable_cache_report: bool = flag(False, "usage carries prompt_tokens_details.cached_tokens")
    sampling_defaults: str = flag(
        "model", "defaults of chat requests: the model's generation config, or OpenAI's", choices=("model", "openai")
    )
    preferred_sampling_params: dict | None = flag(None, "JSON object of sampling parameters used where unset")
    chat_template: str | None = flag(None, "file or text of a chat template; default: the tokenizer's")
    default_chat_template_kwargs: dict | None = flag(None, "JSON object of chat template arguments used where unset")
    completion_template: str | None = not_built(None, "completion templates")
    reasoning_parser: str | None = flag(None, "split reasoning from answers", choices=("auto", "ling3", "none"))
    tool_call_parser: str | None = flag(None, "find tool calls in answers", choices=("auto", "ling3", "none"))
    enable_strict_thinking: bool = not_built(False, "grammar-enforced thinking")
    strip_thinking_cache: bool = not_built(False, "dropping thinking from cached prefixes")
    enable_custom_logit_processor: bool = not_built(False, "custom logit processors")
    constrained_json_whitespace_pattern: str | None = not_built(None, "structured output")
    constrained_json_disable_any_whitespace: bool = not_built(False, "structured output")
    grammar_backend: str | None = not_built(None, "structured output", neutral=("none",))


@dataclass(frozen=True, kw_only=True)
class LogArgs:
    """Logs, metrics and watchdogs."""

    log_level: str = flag("info", "log level", choices=_LOG_LEVELS)
    log_level_http: str | None = flag(None, "log level of the HTTP server; default: --log-level", choices=_LOG_LEVELS)
    log_requests: bool = flag(False, "log every request")
    log_requests_level: int = flag(2, "0 = metadata, 1 = with sampling parameters, 2 = part of the text, 3 = all of it")
    decode_log_interval: int = flag(40, "decode steps between two decode log lines")
    enable_metrics: bool = flag(False, "serve Prometheus metrics under /metrics")
    bucket_time_to_first_token: list[float] | None = not_built(None, "custom histogram buckets")
    bucket_inter_token_latency: list[float] | None = not_built(None, "custom histogram buckets")
    bucket_e2e_request_latency: list[float] | None = not_built(None, "custom histogram buckets")
    watchdog_timeout: float = hint(300.0, "there is no watchdog yet")
    soft_watchdog_timeout: float | None = not_built(None, "a watchdog that only reports")
    crash_dump_folder: str | None = not_built(None, "crash dumps")
