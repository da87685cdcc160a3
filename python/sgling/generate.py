"""``sgling generate``: one prompt through the in-process engine, with the accepted runs visible."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sgling.bench.metrics import accept_length_of, tpot_of
from sgling.srt.config.environ import no_color
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.generate_args import GenerateArgs
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.model_path import resolve_model_path

_COLOURS = ("\x1b[36m", "\x1b[33m")
_RESET = "\x1b[0m"


class Timing(NamedTuple):
    """Seconds from the call to the first and to the last chunk, and the last chunk itself."""

    first: float
    last: float
    chunk: dict


def show_runs(chunks: Iterable[dict], colour: bool) -> Iterator[str]:
    """Pieces of text to print: every chunk's new text is what one step committed.

    Runs alternate in colour on a terminal, and stand in brackets elsewhere.
    """
    shown = runs = 0
    for chunk in chunks:
        piece, shown = chunk["text"][shown:], len(chunk["text"])
        if piece:
            yield f"{_COLOURS[runs % 2]}{piece}{_RESET}" if colour else f"[{piece}]"
            runs += 1


def summary(timing: Timing) -> str:
    """Tokens/s, TPOT and accept length of one answer."""
    meta = timing.chunk["meta_info"]
    tokens = meta["completion_tokens"]
    parts = [f"{tokens} tokens in {timing.last:.2f} s", f"{tokens / timing.last:.1f} tok/s"]
    parts.append(f"TTFT {timing.first * 1000:.1f} ms")
    if tpot := tpot_of(timing.last, timing.first, tokens):
        parts.append(f"TPOT {tpot * 1000:.2f} ms")
    if steps := meta.get("spec_verify_ct"):
        accept = accept_length_of(steps, meta["spec_num_correct_drafts"])
        parts.append(f"accept length {accept:.2f} ({steps} verify steps)")
    lines = [", ".join(parts)]
    if runs := meta.get("spec_accepted_runs"):
        lines.append("accepted runs: " + " ".join(map(str, runs)))
    return "\n".join(lines)


def _timed(chunks: Iterable[dict], timings: list[Timing]) -> Iterator[dict]:
    """Pass chunks on; leaves the timing of the whole stream in ``timings``."""
    begin = time.perf_counter()
    first = None
    for chunk in chunks:
        last = time.perf_counter() - begin
        first = last if first is None else first
        timings[:] = [Timing(first, last, chunk)]
        yield chunk


def chat_prompt_ids(args: GenerateArgs) -> list[int]:
    """Ids of the prompt as a user message, through the tokenizer's chat template."""
    from transformers import AutoTokenizer

    directory = resolve_model_path(args.tokenizer_path or args.model_path, args.revision, args.download_dir)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": args.prompt}]
    options = args.default_chat_template_kwargs or {}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return tokenizer.encode(text, add_special_tokens=False)


def main(argv: Sequence[str]) -> int:
    """Command-line entry. The text goes to stdout, the figures to stderr."""
    args = GenerateArgs.from_argv(argv)
    try:
        source = {"input_ids": chat_prompt_ids(args)} if args.chat else {"prompt": args.prompt}
        from sgling import Engine

        engine = Engine(**args.given())
    except (ServerArgsError, ModelConfigError, RuntimeError) as error:
        print(f"sgling generate: error: {error}", file=sys.stderr)
        return 1
    timings: list[Timing] = []
    try:
        chunks = engine.generate(**source, sampling_params=args.sampling_params(), stream=True)
        for piece in show_runs(_timed(chunks, timings), sys.stdout.isatty() and not no_color()):
            print(piece, end="", flush=True)
        print()
        print(summary(timings[0]), file=sys.stderr)
    finally:
        engine.shutdown()
    return 0
