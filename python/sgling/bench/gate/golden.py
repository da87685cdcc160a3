"""Golden answers: prompts as token ids with their greedy answers, recorded with speculation off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from sgling.bench.datasets import Prompt
from sgling.bench.gate.subject import OpenSubject
from sgling.bench.scenarios import SCENARIOS, scenario_prompt, scenario_samples
from sgling.bench.target import BenchError

FORMAT = 1
# Facts an answer depends on besides weights and prompt; a golden of other facts may differ for good reason.
FACTS = ("device", "dtype", "tp_size", "chunked_prefill_size", "quantization")
_SEED = 7


@dataclass(frozen=True)
class GoldenAnswer:
    """One prompt and its greedy answer. ``text`` is what the server returned for ``output_ids``, None if not known."""

    label: str
    input_ids: list[int]
    output_ids: list[int]
    text: str | None

    def prompt(self) -> Prompt:
        """The request: exact ids, exactly as many tokens as the answer has."""
        return Prompt(self.input_ids, None, len(self.output_ids), label=self.label)


@dataclass(frozen=True)
class Golden:
    """A golden file. ``accept_length`` is that of the speculating server over the same answers; None without."""

    model: str
    answers: list[GoldenAnswer]
    accept_length: float | None
    facts: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def first(self, count: int, tokens: int) -> Golden:
        """The first answers, cut to ``tokens`` tokens (their text is left out of the comparison).

        Accept length belongs to the whole and is left out.
        """
        kept = [replace(answer, output_ids=answer.output_ids[:tokens], text=None) for answer in self.answers[:count]]
        return replace(self, answers=kept, accept_length=None)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Golden:
        """Read; raises ValueError for a file that is no golden."""
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"{path}: not a golden file of format {FORMAT}")
        return cls(**{**raw, "answers": [GoldenAnswer(**answer) for answer in raw["answers"]]})


def packaged_file(name: str) -> Path:
    """A data file of the bench. Raises :class:`BenchError` when this installation has none of that name."""
    path = Path(str(resources.files("sgling.bench"))) / "data" / name
    if not path.is_file():
        raise BenchError(f"this installation has no {name}")
    return path


def facts_of(server_info: dict) -> dict[str, Any]:
    """The facts a golden remembers."""
    return {name: server_info.get(name) for name in FACTS}


def golden_prompts(subject: OpenSubject, per_scenario: int, tokens: int) -> list[Prompt]:
    """Built-in prompts as ids: every scenario, held-out samples."""
    template = subject.need_template()
    samples = scenario_samples(SCENARIOS, per_scenario * len(SCENARIOS), _SEED)
    prompts = [scenario_prompt(sample, template, subject.tokenizer, tokens) for sample in samples]
    return [prompt._replace(text=None) for prompt in prompts]


def first_difference(expected: Sequence[int], found: Sequence[int]) -> str | None:
    """Where two answers part, in words; None for equal ones."""
    for position, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return f"token {position} is {right}, not {left}"
    if len(expected) != len(found):
        return f"{len(found)} tokens, not {len(expected)}"
    return None
