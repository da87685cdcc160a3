"""The recorded acceptance of a model: fixed prompts and the accept length below which something is wrong.

``acceptance.json`` lies in the model's directory; ``sgling doctor --record-floor`` writes it. A drafter that loads but
drafts nonsense leaves every answer right and only slow, so nobody notices without such a floor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.config.spec_config import SpecConfig

FILE_NAME = "acceptance.json"
FLOOR_SHARE = 0.9  # of the measured accept length
MAX_NEW_TOKENS = 48
DEFAULT_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.\n",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "Count from one to thirty: one, two, three, four,",
    "请用三句话介绍一下北京。\n",
)


def floor_key(spec: SpecConfig) -> str:
    """Accept length depends on drafter and width: each pair has its own floor."""
    return f"{spec.algorithm}-{spec.width}"


@dataclass(frozen=True)
class Acceptance:
    """What is known of a model.

    Attributes:
        prompts: texts as they are tokenised, chat template applied.
        accept_lengths: what was measured when the floors were recorded, by :func:`floor_key`.
    """

    prompts: tuple[str, ...]
    accept_lengths: dict[str, float]

    def floor(self, spec: SpecConfig) -> float | None:
        """Smallest accept length that is no alarm; None where none was recorded (depth auto has none)."""
        measured = self.accept_lengths.get(floor_key(spec)) if spec.depth == "fixed" else None
        return None if measured is None else measured * FLOOR_SHARE

    def with_measured(self, spec: SpecConfig, accept_length: float) -> Acceptance:
        """The same with one more floor."""
        return Acceptance(self.prompts, {**self.accept_lengths, floor_key(spec): round(accept_length, 3)})

    def write(self, directory: Path) -> Path:
        """Write the file; returns its path."""
        path = directory / FILE_NAME
        data = {"prompts": list(self.prompts), "accept_lengths": self.accept_lengths}
        path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return path


def read_acceptance(directory: Path) -> Acceptance:
    """A model's file; general prompts without floors where there is none. Raises ServerArgsError for a broken one."""
    path = directory / FILE_NAME
    if not path.is_file():
        return Acceptance(DEFAULT_PROMPTS, {})
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        lengths = {str(key): float(value) for key, value in data["accept_lengths"].items()}
        return Acceptance(tuple(map(str, data["prompts"])), lengths)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerArgsError(f"{path}: no acceptance file ({type(error).__name__}: {error})") from error


def wants_smoke(args: ServerArgs, acceptance: Acceptance) -> bool:
    """Whether the accept length is checked at start (``--speculative-smoke``); random weights have no floor."""
    if not args.spec.enabled or args.speculative_smoke == "off":
        return False
    has_floor = args.load_format != "dummy" and acceptance.floor(args.spec) is not None
    return args.speculative_smoke == "on" or has_floor
