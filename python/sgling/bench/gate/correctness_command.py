"""``sgling gate correctness``: checks a server or an engine against a golden, or records the golden."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sgling.bench.connect import authorized
from sgling.bench.gate.correctness import Check, Limits, check_all, record
from sgling.bench.gate.golden import Golden, golden_prompts, packaged_file
from sgling.bench.gate.subject import open_subject
from sgling.bench.http_stream import HttpStatusError
from sgling.bench.target import BenchError, HttpTarget
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.gate_args import CorrectnessArgs
from sgling.srt.config.model_path import DEFAULT_MODEL

PACKAGED_GOLDEN = f"{DEFAULT_MODEL}.golden.json"
ERRORS = (BenchError, HttpStatusError, OSError, ValueError, ServerArgsError, RuntimeError)


async def run_checks(args: CorrectnessArgs) -> list[Check]:
    """Every check of the gate."""
    plain = HttpTarget(args.plain_url.rstrip("/"), headers=authorized(args.headers)) if args.plain_url else None
    async with open_subject(args, with_tokenizer=False) as subject:
        if args.golden is None and subject.model != DEFAULT_MODEL:
            raise BenchError(f"the packaged golden is {DEFAULT_MODEL}'s; give --golden FILE for {subject.model}")
        golden = Golden.load(args.golden or packaged_file(PACKAGED_GOLDEN))
        return await check_all(subject.target, golden, plain, Limits(args.accept_tolerance, args.argmax_margin))


async def run_record(args: CorrectnessArgs) -> Golden:
    """Record and save."""
    async with open_subject(args) as subject:
        prompts = golden_prompts(subject, args.prompts_per_scenario, args.tokens)
        golden = await record(subject.target, subject.model, prompts, args.tie_margin)
    golden.save(args.golden)
    return golden


def format_checks(checks: Sequence[Check]) -> str:
    """One line per check, and which failed."""
    lines = [f"{check.status.upper():5} {check.name:14} {check.detail}" for check in checks]
    failed = [check.name for check in checks if check.status == "fail"]
    return "\n".join([*lines, f"FAILED: {', '.join(failed)}" if failed else "all checks passed"])


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 when a check fails or could not run."""
    args = CorrectnessArgs.read(argv, "sgling gate correctness")
    try:
        if args.record:
            golden = asyncio.run(run_record(args))
            lengths = [len(answer.output_ids) for answer in golden.answers]
            print(f"recorded {args.golden}: answers of {lengths} tokens, accept length {golden.accept_length}")
            return 0
        checks = asyncio.run(run_checks(args))
    except ERRORS as error:
        print(f"sgling gate correctness: error: {error}", file=sys.stderr)
        return 1
    print(format_checks(checks))
    if args.json:
        report = {"passed": all(check.status != "fail" for check in checks), "checks": [c._asdict() for c in checks]}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(check.status == "fail" for check in checks))
