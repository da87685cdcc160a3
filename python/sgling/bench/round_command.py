"""``sgling bench round``: runs ``benchmark/round.py`` of a source tree where there is a GPU, else says why not."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "benchmark" / "round.py"


def why_not() -> str | None:
    """Reason why the round cannot be timed here, or None."""
    if not SCRIPT.is_file():
        return f"there is no {SCRIPT}: the rank-shaped benchmark is part of a source tree, not of an installation"
    import torch

    if not torch.cuda.is_available():
        return "no GPU is visible: a round is timed on the GPU it runs on (sgling trace works on a CPU)"
    return None


def main(argv: Sequence[str]) -> int:
    """Command-line entry; the flags are the script's."""
    reason = why_not()
    if reason is not None:
        print(f"sgling bench round: error: {reason}", file=sys.stderr)
        return 1
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return 0
