"""The training-data generator: deterministic, true, distinct, and split between training and held-out."""

from __future__ import annotations

import builtins
import keyword
import random
import re
from itertools import islice

import pytest

from sgling.training import checks, distinct
from sgling.training.generator import arithmetic, coding, mix, tool_calling, zh_chat
from sgling.training.generator.base import (
    HELD_OUT,
    NEW_FAMILY,
    TRAIN,
    UNKNOWN_SHARE,
    Sample,
    Slots,
    is_held_out_prompt,
    is_held_out_value,
)
from sgling.training.generator.coding_values import EASY, HARD, TINY
from sgling.training.generator.pools import CITIES, EN_NAMES, WORDS, ZH_ITEMS, ZH_NAMES


def samples(scenario: str, count: int, split: str = TRAIN) -> list[Sample]:
    return [mix.SCENARIOS[scenario](Slots(random.Random(f"test:{index}"), split)) for index in range(count)]


def answers(sample: Sample) -> list[str]:
    return [
        message.get("reasoning_content", "") + "\n" + message["content"]
        for message in sample.messages
        if message["role"] == "assistant"
    ]


@pytest.mark.parametrize("scenario", mix.SCENARIOS)
def test_same_seed_gives_same_sample(scenario):
    assert samples(scenario, 20) == samples(scenario, 20)
    assert mix.draw(scenario, "a", HELD_OUT) == mix.draw(scenario, "a", HELD_OUT)


@pytest.mark.parametrize(
    ("scenario", "count"),
    [("coding", 5000), ("tool_calling", 10_000), ("long_report", 20_000), ("zh_chat", 20_000), ("arithmetic", 20_000)],
)
def test_samples_are_distinct(scenario, count):
    """The bound of a million, scaled: the share of repeats grows at most in proportion to the number of samples.

    ``python -m sgling.training.distinct`` counts the million itself.
    """
    assert distinct.count_repeats(scenario, count) / count <= (1 - distinct.BOUND) * count / 1_000_000


@pytest.mark.parametrize("scenario", ["arithmetic", "long_report"])
def test_every_equation_is_true(scenario):
    found = 0
    for sample in samples(scenario, 600):
        for text in answers(sample):
            for left, operator, right, result in re.findall(r"(?<![\d.])(\d+) ([-+*/]) (\d+) = (\d+)", text):
                found += 1
                assert arithmetic.compute(int(left), operator, int(right)) == int(result), text
    assert found > 600


def test_last_line_is_the_answer():
    for sample in samples("arithmetic", 300):
        assert answers(sample)[-1].endswith(f"#### {sample.check['value']}")


def test_code_examples_and_asserts_are_true():
    """What the text says a call returns is what the code returns, for each body of each family."""
    rng = random.Random(5)
    for family in coding.families():
        for style in family.bodies:
            draft = coding.make_draft(Slots(rng), family, coding.Wishes(True, True, False), style)
            text = coding.answer_text(draft, zh=False)
            source = checks.CODE_BLOCK.findall(text)[0]
            call, result = re.findall(r"For example, `(.*)` returns `(.*)`\. ", text)[0]
            assert repr(coding.run_source(source, call)) == result
    for sample in samples("coding", 200):
        blocks = [block for text in answers(sample) for block in checks.CODE_BLOCK.findall(text)]
        for block in blocks[1:]:
            if "assert" in block:
                coding.run_source(blocks[0] + "\n" + block.split("\n", 1)[1], "None")


def test_function_names_are_free(monkeypatch):
    """No name hides a builtin or keyword or reads like the code around it; a planted one is drawn again."""
    family = coding.families()[0]
    for split in (TRAIN, HELD_OUT):
        slots = Slots(random.Random(f"names {split}"), split)
        names = {coding.code_name(slots, family) for _ in range(3000)} - set(family.names)
        assert len(names) > 300
        for name in names:
            assert name.isidentifier() and not keyword.iskeyword(name) and not hasattr(builtins, name)
    assert {"range", "append", "index", "result", "numbers", "list", "lambda"} <= coding.taken_names()
    for planted in ("range", "append", "class", "text", "result"):
        drawn = iter((planted, "find_stone"))
        monkeypatch.setattr(coding, "free_name", lambda slots, drawn=drawn: next(drawn))
        monkeypatch.setattr(Slots, "chance", lambda self, probability: False)
        assert coding.code_name(Slots(random.Random(1)), family) == "find_stone"


def test_renamed_functions_still_give_the_same_result():
    found = 0
    for sample in samples("coding", 2500):
        blocks = [block for text in answers(sample) for block in checks.CODE_BLOCK.findall(text)]
        if len(blocks) < 2 or "assert" in blocks[1] or "class " in blocks[0]:
            continue
        found += 1
        (old, new), (call, result) = (re.match(r"def (\w+)", block)[1] for block in blocks), sample.check["run"][0]
        assert old != new
        assert repr(coding.run_source(blocks[1], call.replace(old, new, 1))) == result, blocks[1]
    assert found > 100


def test_stated_results_are_those_of_small_arguments():
    """Examples that the answer computes in its head stay small; only the hidden tests have large arguments."""
    slots = Slots(random.Random(3))
    for family in coding.families():
        for level in (TINY, EASY):
            for value in coding.fresh_args(slots, family, level):
                assert not isinstance(value, list) or len(value) <= 5
                assert not isinstance(value, str) or len(value.split()) <= 2
    assert max(max(coding.fresh_args(slots, coding.families()[0], TINY)[0]) for _ in range(200)) == TINY.top
    assert max(max(coding.fresh_args(slots, coding.families()[0], HARD)[0]) for _ in range(200)) > 90


def test_unknown_words_join_open_pools_in_training_only():
    slots = Slots(random.Random(2))
    for pool in (EN_NAMES, WORDS, ZH_NAMES, CITIES, ZH_ITEMS):
        drawn = [slots.pick(pool) for _ in range(2000)]
        outside = [value for value in drawn if value not in pool]
        assert abs(len(outside) / len(drawn) - UNKNOWN_SHARE) < 0.08 and len(set(outside)) > 0.8 * len(outside)
        held = {part for value in pool if is_held_out_value(value) for part in (value if pool is CITIES else [value])}
        assert held and not held & {part for value in drawn for part in (value if pool is CITIES else [value])}
        unseen = Slots(random.Random(2), HELD_OUT)
        assert {unseen.pick(pool) for _ in range(200)} <= set(pool)
    for value in (slots.pick(ZH_ITEMS) for _ in range(200)):
        assert value[0] in {measure for measure, _ in ZH_ITEMS}
    for value in (slots.pick(CITIES) for _ in range(200)):
        assert value[0][0].isupper() and "\u4e00" <= value[1][0] <= "\u9fff"


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT, NEW_FAMILY])
@pytest.mark.parametrize("scenario", mix.SCENARIOS)
def test_every_draw_of_many_seeds_renders(scenario, split):
    """One bad draw in a worker ends a training run."""
    for sample in samples(scenario, 1500 if split == TRAIN else 300, split):
        assert mix.render_answer(sample)


def test_the_right_answer_passes_its_check():
    for scenario in ("tool_calling", "arithmetic", "zh_chat", "long_report"):
        for sample in samples(scenario, 60):
            answer = mix.render_answer(sample)
            assert all(checks.judge(sample, answer, ended=True).values()), (scenario, answer)


def test_wrong_tool_call_fails_its_check():
    sample = next(s for s in samples("tool_calling", 50) if s.check["calls"] and s.check["calls"][0]["arguments"])
    answer = mix.render_answer(sample)
    assert not checks.judge(sample, answer.replace("<arg_value>", "<arg_value>9", 1), ended=True)["exact"]


def test_splits_share_no_prompt_family_or_held_out_name():
    train = {mix.prompt_key(mix.draw("arithmetic", f"t{i}", TRAIN)) for i in range(300)}
    held = {mix.prompt_key(mix.draw("arithmetic", f"t{i}", HELD_OUT)) for i in range(30)}
    assert not train & held
    assert all(is_held_out_prompt(key) for key in held) and not any(is_held_out_prompt(key) for key in train)
    for module, scenario in ((coding, "coding"), (tool_calling, "tool_calling"), (zh_chat, "zh_chat")):
        assert not {s.family for s in samples(scenario, 300)} & module.HELD_OUT_FAMILIES
        assert {s.family for s in samples(scenario, 30, NEW_FAMILY)} <= module.HELD_OUT_FAMILIES
    assert any(is_held_out_value(name) for name in EN_NAMES)
    names = {
        name for s in samples("arithmetic", 300) for name in EN_NAMES if f"{name} has " in s.messages[-2]["content"]
    }
    assert not any(is_held_out_value(name) for name in names)


def test_document_stream_keeps_the_token_shares():
    counts = dict.fromkeys(mix.TOKEN_SHARES, 0)
    for document in islice(mix.documents("shares", len), 1500):
        counts[document.scenario] += len(document.text)
    total = sum(counts.values())
    for name, share in mix.TOKEN_SHARES.items():
        assert abs(counts[name] / total - share) < 0.01, name


def test_more_than_the_planned_families():
    assert len(coding.families()) >= 40 and len(tool_calling.specs()) >= 60 and len(zh_chat.topics()) >= 60
    assert len(arithmetic.stories(False)) >= 40 and len(arithmetic.stories(True)) >= 20
