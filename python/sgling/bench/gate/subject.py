"""Opens what a gate or an evaluation judges: a running server, or an engine that is started here and stopped after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from sgling.bench.connect import authorized, load_tokenizer, wait_until_ready
from sgling.bench.target import BenchError, EngineTarget, HttpTarget, Target
from sgling.bench.tokenizer import BenchTokenizer, FastTokenizer
from sgling.bench.workload import load_template
from sgling.srt.config.gate_args import Subject
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.parser.chat_template import ChatTemplate


class OpenSubject(NamedTuple):
    """What is judged, and the client's side of it; ``tokenizer`` is None where nobody asked for one."""

    target: Target
    model: str
    tokenizer: BenchTokenizer | None
    template: ChatTemplate | None

    def need_template(self) -> ChatTemplate:
        """The chat template; raises :class:`BenchError` when the model has none."""
        if self.template is None:
            raise BenchError("the model has no chat template, which built-in prompts need")
        return self.template


@asynccontextmanager
async def open_subject(
    args: Subject, backend: str = "sglang", with_tokenizer: bool = True
) -> AsyncIterator[OpenSubject]:
    """The server of the address flags, else an engine of ``--model-path``.

    ``with_tokenizer`` False serves callers that send token ids: a remote model's tokenizer need not be at hand.
    """
    if args.is_live:
        headers = authorized(args.headers)
        model = await wait_until_ready(args.url, headers, args.ready_check_timeout_sec)
        tokenizer = template = None
        if with_tokenizer:
            tokenizer, directory = await load_tokenizer(args.tokenizer, args.url, headers)
            template = load_template(directory)
        yield OpenSubject(HttpTarget(args.url, backend, headers, tokenizer), model, tokenizer, template)
        return
    if backend not in ("sglang", "sglang-native"):
        raise BenchError(f"--backend {backend} needs a running server (--base-url or --port)")
    tokenizer = template = None
    if with_tokenizer:
        directory = resolve_model_path(args.tokenizer or args.model_path)
        tokenizer, template = FastTokenizer(directory), load_template(directory)
    from sgling import Engine

    engine = Engine(**{"model_path": args.model_path, "log_level": "warning", **args.engine_args})
    try:
        yield OpenSubject(EngineTarget(engine), args.model_path, tokenizer, template)
    finally:
        engine.shutdown()
