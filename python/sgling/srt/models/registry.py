"""Model classes by the architecture name of config.json."""

from __future__ import annotations

from typing import NamedTuple

from sgling.srt.models.bailing_moe_v3 import BailingMoeV3ForCausalLM
from sgling.srt.models.bailing_moe_v3_nextn import BailingMoeV3ForCausalLMNextN


class ModelClasses(NamedTuple):
    """The target and the NEXTN drafter of one architecture."""

    target: type[BailingMoeV3ForCausalLM]
    nextn: type[BailingMoeV3ForCausalLMNextN]


_BAILING_V3 = ModelClasses(BailingMoeV3ForCausalLM, BailingMoeV3ForCausalLMNextN)
_REGISTRY = {"BailingMoeV3ForCausalLM": _BAILING_V3, "BailingHybridForCausalLM": _BAILING_V3}


def model_classes(architecture: str) -> ModelClasses:
    """Classes that serve an architecture.

    Raises:
        ValueError: none does; the message lists those that are served.
    """
    if architecture not in _REGISTRY:
        raise ValueError(f"architecture {architecture!r}: supported are {', '.join(_REGISTRY)}")
    return _REGISTRY[architecture]
