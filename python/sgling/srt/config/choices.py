"""Every choice the engine makes for itself: the value, why, and the flag that overrides it (``sgling doctor``)."""

from __future__ import annotations

from typing import NamedTuple

from sgling.srt.config.flags import option_name
from sgling.srt.config.server_args import ServerArgs

_REQUEST_LIMIT = {True: "every request costs a recurrent state", False: "a step has 160 rows at most"}


class Choice(NamedTuple):
    """One decided setting."""

    name: str
    value: str
    reason: str
    flag: str


def explain_choices(given: ServerArgs, resolved: ServerArgs) -> list[Choice]:
    """Choices of ``resolved``; what the command line ``given`` said itself has that as its reason."""
    on_cpu = resolved.device == "cpu"
    where = "on the CPU" if on_cpu else "on a GPU"
    automatic = [
        ("device", "no GPU is visible" if on_cpu else "a GPU is visible", given.device != "auto"),
        (
            "dtype",
            f"{where}: {'exact and fast enough' if on_cpu else 'the published precision'}",
            given.dtype != "auto",
        ),
        ("max_running_requests", f"default {where}; {_REQUEST_LIMIT[on_cpu]}", None),
        ("chunked_prefill_size", f"default {where}; chunks bound the memory of a prefill", None),
        ("page_size", "default: no slot is wasted", None),
        ("mem_fraction_static", "default; the rest is left to activations and the system", None),
        ("context_length", "from the model's config", None),
        ("linear_rollback", f"default {where}; both are bit-equal, replay takes less memory", None),
    ]
    choices = [_choice(given, resolved, *entry) for entry in automatic]
    return [*choices, *_speculation(given, resolved)]


def _choice(given: ServerArgs, resolved: ServerArgs, name: str, reason: str, was_given: bool | None) -> Choice:
    """``was_given`` None: the flag was given if it is not None."""
    if getattr(given, name) is not None if was_given is None else was_given:
        reason = "as given"
    value = getattr(resolved, name)
    return Choice(name, "the model's" if value is None else str(value), reason, option_name(name))


def _speculation(given: ServerArgs, resolved: ServerArgs) -> list[Choice]:
    spec, flag = resolved.spec, "--speculative-algorithm"
    if not spec.enabled:
        asked = given.speculative_algorithm is not None
        reason = "as given" if asked else "only embedded models speculate without being told to"
        return [Choice("speculation", "off", reason, f"{flag} NEXTN")]
    asked = given.speculative_algorithm is not None
    reason = "as given" if asked else "the embedded model ships a trained drafter"
    found = [Choice("speculation", spec.algorithm, reason, f"{flag} none")]
    if spec.algorithm == "DSPARK":
        return [
            *found,
            Choice("verify width", str(spec.width), "the drafter's block", "--speculative-dspark-block-size"),
        ]
    steps = "as given" if given.speculative_num_steps is not None else "default; sgling sweep depth finds the best"
    if spec.depth == "auto":
        source = "measured at start" if spec.depth_table is None else spec.depth_table.source
        return [
            *found,
            Choice(
                "draft depth", f"auto, at most {spec.num_steps}", f"step times {source}", "--speculative-depth fixed"
            ),
        ]
    return [
        *found,
        Choice("draft depth", f"{spec.num_steps} (verify width {spec.width})", steps, "--speculative-num-steps"),
    ]
