"""Where the weights come from."""

from __future__ import annotations

from dataclasses import dataclass

LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True)
class LoadConfig:
    """``--model-path`` and ``--load-format``.

    Attributes:
        model_path: checkpoint directory; with ``dummy`` only its config.json is needed.
        load_format: ``auto`` and ``safetensors`` read safetensors files; ``dummy`` draws random weights.
    """

    model_path: str
    load_format: str = "auto"

    def __post_init__(self) -> None:
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format={self.load_format!r}: supported are {', '.join(LOAD_FORMATS)}")
