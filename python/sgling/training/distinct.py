"""Counts distinct generated samples: ``python -m sgling.training.distinct``; a million each take half an hour."""

from __future__ import annotations

import hashlib
import random
import time

from sgling.srt.config.train_args import DistinctOptions

from .generator.base import TRAIN, Sample, Slots
from .generator.mix import SCENARIOS

BOUND = 0.97
"""Least distinct share of a million samples of a scenario. Small talk is left out: it has few things to say."""


def fingerprint(sample: Sample) -> bytes:
    """64-bit hash of a conversation and its tools; the system prompt does not make a sample a new one."""
    messages = [message for message in sample.messages if message["role"] != "system"]
    text = repr((messages, sample.tools, sample.enable_thinking))
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


def count_repeats(scenario: str, samples: int) -> int:
    """How many of that many training samples were drawn before."""
    draws = (SCENARIOS[scenario](Slots(random.Random(f"distinct:{index}"), TRAIN)) for index in range(samples))
    return samples - len({fingerprint(sample) for sample in draws})


def main() -> None:
    """Prints one line per scenario."""
    options = DistinctOptions.parse("sgling.training.distinct")
    for scenario in options.scenario or [name for name in SCENARIOS if name != "small_talk"]:
        begin = time.monotonic()
        share = 1 - count_repeats(scenario, options.samples) / options.samples
        verdict = "reached" if share >= BOUND else "MISSED"
        seconds = time.monotonic() - begin
        print(f"{scenario:13} {share:.4%} of {options.samples} distinct ({verdict}), {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
