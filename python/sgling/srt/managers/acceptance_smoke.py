"""The acceptance smoke: a few fixed prompts at start, and a loud warning when the drafter accepts too little."""

from __future__ import annotations

import logging
from typing import NamedTuple

from sgling.srt.config.acceptance import MAX_NEW_TOKENS, Acceptance, floor_key
from sgling.srt.config.spec_config import SpecConfig
from sgling.srt.managers.generate_req import GenerateReqInput, RequestError
from sgling.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)


class SmokeResult(NamedTuple):
    """What the smoke found; ``passed`` is None where there is no floor to compare with."""

    accept_length: float
    floor: float | None
    passed: bool | None


def smoke_body(acceptance: Acceptance) -> dict:
    """The request, a greedy batch."""
    params = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}
    return {"text": list(acceptance.prompts), "sampling_params": params}


def judge(answers: list[dict], acceptance: Acceptance, spec: SpecConfig) -> SmokeResult:
    """Compare the accept length of the answers with the floor."""
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    drafts = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    length = (steps + drafts) / steps if steps else 1.0
    floor = acceptance.floor(spec)
    return SmokeResult(length, floor, None if floor is None else length >= floor)


def report(result: SmokeResult, spec: SpecConfig) -> None:
    """Log the result: one line when all is well, a banner when not."""
    if result.passed is False:
        bar = "!" * 100
        logger.warning(
            "\n%s\nACCEPT LENGTH %.2f IS BELOW THE RECORDED FLOOR %.2f (%s).\nAnswers are right, but slower than they "
            "should be: wrong or damaged drafter weights, or a changed\nmodel. sgling doctor shows more; "
            "--speculative-smoke off silences this.\n%s",
            bar,
            result.accept_length,
            result.floor,
            floor_key(spec),
            bar,
        )
        return
    compared = "no floor recorded" if result.floor is None else f"floor {result.floor:.2f}"
    logger.info("Acceptance smoke: accept length %.2f (%s)", result.accept_length, compared)


async def run_smoke(manager: TokenizerManager, acceptance: Acceptance) -> SmokeResult | None:
    """Run, report and return; None when the prompts cannot be served (said in the log)."""
    spec = manager.server_args.spec
    try:
        answers = await manager.generate_once(GenerateReqInput.from_json(smoke_body(acceptance)))
    except RequestError as error:
        logger.warning("Acceptance smoke skipped: %s", error.message)
        return None
    result = judge(answers, acceptance, spec)
    report(result, spec)
    return result
