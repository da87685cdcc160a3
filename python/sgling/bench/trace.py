"""``sgling trace``: runs a prompt without and with recording, writes the Perfetto trace and the picture of a round."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgling.bench.datasets import Prompt
from sgling.bench.scenarios import ALL_SCENARIOS, SCENARIOS, scenario_prompt, scenario_samples
from sgling.bench.target import BenchError
from sgling.bench.tokenizer import FastTokenizer
from sgling.bench.workload import load_template
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.config.trace_args import TraceArgs
from sgling.srt.observability.round_picture import Calibration, figures_text, round_page
from sgling.srt.observability.rounds import Round, find_rounds
from sgling.srt.observability.step_trace import read_trace


def one_prompt(args: TraceArgs) -> Prompt:
    """A held-out prompt of a built-in scenario."""
    directory = resolve_model_path(args.tokenizer_path or args.model_path, args.revision, args.download_dir)
    names = SCENARIOS if args.scenario == ALL_SCENARIOS else (args.scenario,)
    sample = scenario_samples(names, 1, args.seed)[0]
    return scenario_prompt(sample, load_template(directory), FastTokenizer(directory), args.output_len)


def round_ms(engine: Any, prompt: Prompt) -> float:
    """Milliseconds per decode step of one run, first chunk to last."""
    params = {"temperature": 0.0, "max_new_tokens": prompt.output_len, "ignore_eos": True}
    chunks = engine.generate(input_ids=prompt.ids, sampling_params=params, stream=True)
    arrivals = [(time.perf_counter(), chunk["meta_info"]) for chunk in chunks]
    (first, _), (last, meta) = arrivals[0], arrivals[-1]
    return 1000 * (last - first) / (meta.get("spec_verify_ct") or meta["completion_tokens"] - 1)


def record(engine: Any, prompt: Prompt, args: TraceArgs) -> tuple[list[str], Calibration]:
    """Runs in turn without and with recording; (files of the last recording, what recording costs at best)."""
    round_ms(engine, prompt)  # warm-up
    plain, profiled, files = [], [], []
    activities = ["CPU", "GPU"] if args.torch_profiler else []
    for _ in range(args.repeats):
        plain.append(round_ms(engine, prompt))
        engine.start_profile(output_dir=args.output_dir, activities=activities)
        profiled.append(round_ms(engine, prompt))
        files = engine.stop_profile()
    return files, Calibration(min(plain), min(profiled))


def write_picture(files: Sequence[str], calibration: Calibration, args: TraceArgs) -> tuple[Path, list[Round]]:
    """The page beside the trace."""
    spans, facts = read_trace(Path(files[0]))
    rounds = find_rounds(spans)
    if not rounds:
        raise BenchError("no two decode steps follow each other in the trace; raise --output-len")
    predicted = json.loads(Path(args.predicted).read_text(encoding="utf-8")) if args.predicted else {}
    path = Path(args.output_dir) / "round.html"
    path.write_text(round_page(rounds, facts, calibration, predicted), encoding="utf-8")
    return path, rounds


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 when nothing could be recorded."""
    args = TraceArgs.from_argv(argv)
    try:
        prompt = one_prompt(args)
        from sgling import Engine

        with Engine(**args.given()) as engine:
            files, calibration = record(engine, prompt, args)
        page, rounds = write_picture(files, calibration, args)
    except Exception as error:  # the engine's own error types included
        print(f"sgling trace: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(figures_text(rounds, calibration)))
    print(f"trace (open in ui.perfetto.dev or chrome://tracing): {', '.join(files)}\npicture of one round: {page}")
    return 0
