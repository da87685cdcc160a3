"""The shape of speed on a CPU, as ratios measured side by side in one process.

    OMP_NUM_THREADS=1 python benchmark/cpu_shape.py            # all parts, about three minutes
    python benchmark/cpu_shape.py --part threads               # what a second torch thread does (not part of "all")

Absolute times on a shared machine are noise. Every ratio compares runs that alternate in short segments, in processor
time of the one thread that works (cpu_loop.py), and takes the minimum of each side; a table is printed and
``benchmark/results/cpu/cpu_shape.json`` written. Bounds:

    speculation  best NEXTN width / plain decoding, time per token, coding and tool calls     < 1.0 (goal 0.8)
    scheduler    plain decode loop / bare forward + logits + arg-max                          <= 1.15
    overlap      overlapped loop / plain loop over 256 tokens                                 <= 1.05
    prefill      KDA prefill of 8192 tokens / 4096 tokens                                     <= 2.2
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from cpu_loop import Driver

from sgling.srt.observability.machine import cpu_facts
from sgling.training.data import load_tokenizer
from sgling.training.generator.base import HELD_OUT
from sgling.training.generator.mix import PICO_DIR, draw, render_prompt
from sgling_kernel.kda import KDAParams, kda_prefill
from sgling_kernel.linear import linear, pack_weight

HERE = Path(__file__).parent
SCENARIOS = ("coding", "tool_calling")
MAX_NEW_TOKENS = 160
BOUNDS = {"speculation": 1.0, "scheduler": 1.15, "overlap": 1.05, "prefill": 2.2}


def median(values: list[float]) -> float:
    """Middle value."""
    return sorted(values)[len(values) // 2]


def prompts_of(scenario: str, count: int) -> list[list[int]]:
    """Held-out prompts as token ids."""
    tokenizer = load_tokenizer()
    texts = (render_prompt(draw(scenario, f"cpu_shape:{i}", HELD_OUT)) for i in range(count))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def speculation(options: argparse.Namespace) -> dict:
    """Time per token of each NEXTN width against plain decoding, by scenario."""
    common = {"context_length": 2048, "load_format": options.load_format}
    drivers = {1: Driver(options.model_path, speculative_algorithm="none", **common)}
    for width in options.widths:
        drivers[width] = Driver(
            options.model_path, speculative_algorithm="NEXTN", speculative_num_steps=width - 1, **common
        )
    found = {scenario: _speculation_of(drivers, scenario, options) for scenario in SCENARIOS}
    return {"by_scenario": found, "ratio": max(entry["best"]["ratio"] for entry in found.values())}


def _speculation_of(drivers: dict[int, Driver], scenario: str, options: argparse.Namespace) -> dict:
    """Widths take turns on each prompt; a prompt counts with each width's fastest round, weighted by its tokens."""
    seconds, accepts, tokens = dict.fromkeys(drivers, 0.0), {width: [] for width in drivers}, 0
    for prompt in prompts_of(scenario, options.prompts):
        best, answers = {}, {}
        for _ in range(options.rounds):
            for width, driver in drivers.items():
                run = driver.generate(prompt, MAX_NEW_TOKENS)
                answers[width] = run
                best[width] = min(best.get(width, 1e9), run.tpot())
        if any(run.ids != answers[1].ids for run in answers.values()):
            raise RuntimeError(f"{scenario}: speculation changed an answer")
        weight = len(answers[1].ids) - 1
        tokens += weight
        for width, value in best.items():
            seconds[width] += value * weight
            accepts[width].append((answers[width].accept_length or 1.0, weight))
    widths = {
        width: {
            "tpot_ms": round(seconds[width] / tokens * 1e3, 3),
            "ratio": round(seconds[width] / seconds[1], 3),
            "accept_length": round(sum(a * w for a, w in accepts[width]) / tokens, 3),
        }
        for width in drivers
    }
    chosen = min((width for width in drivers if width > 1), key=lambda width: widths[width]["ratio"])
    return {"tokens": tokens, "widths": widths, "best": {"width": chosen, **widths[chosen]}}


def scheduler(options: argparse.Namespace) -> dict:
    """One step of the plain decode loop against the bare model, alternating in segments of the same context length."""
    driver = Driver(
        options.model_path, speculative_algorithm="none", context_length=2048, load_format=options.load_format
    )
    prompt, count = prompts_of("coding", 1)[0], 48
    loop, bare = [], []
    for _ in range(2 * options.rounds):
        run = driver.generate(prompt, count + 1, loop="normal", ignore_eos=True)
        loop.append([after - before for before, after in zip(run.times, run.times[1:], strict=False)])
        bare.append(driver.bare(len(prompt), count))
    return _compare("loop_ms", loop, "bare_ms", bare)


def overlap(options: argparse.Namespace) -> dict:
    """The overlapped loop against the plain loop, 256 tokens each, without speculation and with it."""
    result = {}
    for name, algorithm in (("plain", "none"), ("nextn", "NEXTN")):
        driver = Driver(
            options.model_path, speculative_algorithm=algorithm, context_length=2048, load_format=options.load_format
        )
        prompt, times = prompts_of("coding", 1)[0], {"normal": [], "overlap": []}
        for _ in range(2 * options.rounds):
            for loop, runs in times.items():
                run = driver.generate(prompt, 257, loop=loop, ignore_eos=True)
                runs.append([after - before for before, after in zip(run.times, run.times[1:], strict=False)])
        result[name] = _compare("overlap_ms", times["overlap"], "normal_ms", times["normal"])
    return {**result, "ratio": max(entry["ratio"] for entry in result.values())}


def _compare(first: str, a: list[list[float]], second: str, b: list[list[float]]) -> dict:
    """Per-step times of two sides over the same steps, each at its fastest round; the rounds' medians beside it."""
    fastest = [sum(map(min, zip(*side, strict=True))) / len(side[0]) for side in (a, b)]
    medians = [median([sum(run) / len(run) for run in side]) for side in (a, b)]
    return {
        first: round(fastest[0] * 1e3, 3),
        second: round(fastest[1] * 1e3, 3),
        "ratio": round(fastest[0] / fastest[1], 3),
        "ratio_of_medians": round(medians[0] / medians[1], 3),
    }


@torch.inference_mode()
def prefill(options: argparse.Namespace) -> dict:
    """KDA prefill of one ``ling3-pico`` layer: cost per token must not grow with the prompt."""
    heads, dim, best = 4, 64, {4096: 1e9, 8192: 1e9}
    params = KDAParams(torch.randn(3 * heads * dim, 4), torch.randn(heads), torch.randn(heads, dim), -5.0)
    rows = [torch.randn(8192, size) for size in (3 * heads * dim, heads * dim, heads)]
    begin = torch.zeros(3, 3 * heads * dim), torch.zeros(heads, dim, dim)
    for _ in range(8 * options.rounds):
        for tokens in best:
            before = time.thread_time()
            kda_prefill(*(part[:tokens] for part in rows), params, *begin)
            best[tokens] = min(best[tokens], time.thread_time() - before)
    return {
        "ms_4096": round(best[4096] * 1e3, 1),
        "ms_8192": round(best[8192] * 1e3, 1),
        "ratio": round(best[8192] / best[4096], 3),
    }


@torch.inference_mode()
def threads(options: argparse.Namespace) -> dict:
    """Products of a prefill chunk and of decode steps with 1, 2 and switched thread counts, ms (minimum, median)."""
    weight, rows = pack_weight(torch.randn(6144, 256)), torch.randn(512, 256)

    def milliseconds(count: int, batch: int) -> float:
        before = time.perf_counter()
        for _ in range(count):
            linear(rows[:batch], weight)
        return (time.perf_counter() - before) * 1e3

    chunk, steps = (10, 512), (30, 1)
    times = {name: ([], []) for name in ("1", "2", "2, then 1")}
    for _ in range(12):
        for name, plan in (("1", (1, 1)), ("2", (2, 2)), ("2, then 1", (2, 1))):
            for side, (work, count) in enumerate(zip((chunk, steps), plan, strict=True)):
                torch.set_num_threads(count)
                times[name][side].append(milliseconds(*work))
    torch.set_num_threads(1)
    return {
        name: {
            kind: [round(min(v), 2), round(median(v), 2)] for kind, v in zip(("chunk", "decode"), sides, strict=True)
        }
        for name, sides in times.items()
    }


PARTS = {"speculation": speculation, "scheduler": scheduler, "overlap": overlap, "prefill": prefill}


def report(results: dict) -> None:
    """Print the table."""
    for scenario, entry in results.get("speculation", {}).get("by_scenario", {}).items():
        print(f"{scenario}: {entry['tokens']} tokens")
        for width, row in entry["widths"].items():
            name = "plain" if width == 1 else f"NEXTN W={width}"
            print(f"  {name:10} {row['tpot_ms']:7.3f} ms/token  x{row['ratio']:.3f}  accept {row['accept_length']:.2f}")
    print(f"{'part':12} {'ratio':>7} {'bound':>7}")
    for part, bound in BOUNDS.items():
        if part in results:
            ratio = results[part]["ratio"]
            print(f"{part:12} {ratio:7.3f} {bound:7.2f}  {'ok' if ratio <= bound else 'MISSED'}")


def main() -> None:
    """Run the parts, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=(*PARTS, "threads", "all"), default="all")
    parser.add_argument("--model-path", default=str(PICO_DIR))
    parser.add_argument("--load-format", default="auto", help="dummy: random weights (no meaningful accept length)")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--prompts", type=int, default=4, help="per scenario")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "cpu" / "cpu_shape.json")
    options = parser.parse_args()
    if options.part == "threads":
        print(json.dumps(threads(options), indent=1))
        return
    torch.set_num_threads(1)
    chosen = PARTS if options.part == "all" else {options.part: PARTS[options.part]}
    results = {name: part(options) for name, part in chosen.items()}
    report(results)
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(describe, cwd=HERE, capture_output=True, text=True, check=False).stdout
    facts = {"commit": commit.strip(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    facts |= {"torch": torch.__version__, "python": platform.python_version(), "machine": dict(cpu_facts())}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**facts, "bounds": BOUNDS, "results": results}, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
