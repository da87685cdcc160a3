"""Losslessness on a GPU: greedy and seeded ids are those of plain decoding without graphs, whatever helps along.

Two models, each with its own drafter, a random one, one that is always wrong and an oracle with planted errors. The
covering design runs every pair of settings; ``-m exhaustive`` runs all combinations (hours).
"""

from __future__ import annotations

import pytest

from gpu.gpu_case import MODELS, PLAIN, Bed, Play, Setup
from gpu.lossless_design import AXES, WIDTHS, covering, everything, name_of

OCCURRENCES = 20  # how often every accept length must occur under the oracle
LONG = 96  # tokens after which plain graphs are compared with plain steps


@pytest.fixture(scope="module", params=MODELS)
def bed(request, tmp_path_factory):
    return Bed(request.param, tmp_path_factory.mktemp("models"), "cuda")


@pytest.mark.parametrize("case", covering(), ids=name_of)
def test_output_is_that_of_plain_decoding(bed, case):
    setup, play = case
    assert bed.run(setup, play)[0] == bed.truth(setup.kernels)


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", AXES["algorithm"])
@pytest.mark.parametrize("width", WIDTHS)
def test_output_is_that_of_plain_decoding_full_product(bed, algorithm, width):
    for setup, play in everything(algorithm, width):
        assert bed.run(setup, play)[0] == bed.truth(setup.kernels), (setup, play)


def oracle_tokens(width: int, occurrences: int = OCCURRENCES) -> int:
    """Output tokens per request (four of them) in which every accept length 1 .. W occurs that often, and a margin."""
    return (occurrences + 2) * width * (width + 1) // 2 // 4 + 2 * width


@pytest.mark.parametrize("width", [width for width in WIDTHS if width > 1])
def test_every_accept_length_occurs_under_the_oracle(bed, width):
    setup = Setup(width=width, rollback="staged" if width % 2 else "replay")
    tokens = oracle_tokens(width)
    ids, accepted = bed.run(setup, Play("oracle", 4), tokens)
    assert ids == bed.truth("cuda", tokens)
    assert sorted(accepted) == list(range(1, width + 1))
    assert min(accepted.values()) >= OCCURRENCES, accepted


def test_long_answers_do_not_depend_on_plain_graphs(bed):
    """Oracles of wide windows know long answers, which plain graphs made."""
    expected = bed.run(PLAIN, Play(), LONG)[0]
    assert {rid: ids[:LONG] for rid, ids in bed.truth("cuda", oracle_tokens(WIDTHS[-1])).items()} == expected


def test_the_trained_drafter_is_accepted_alone_and_in_a_batch(tmp_path):
    """Drafts need no exactness, so only the accept length shows a drafter that reads the wrong rows."""
    bed = Bed("pico", tmp_path, "cuda")
    means = []
    for batch in (1, 4):
        accepted = bed.run(Setup(), Play("own", batch), 96)[1]
        means.append(sum(length * count for length, count in accepted.items()) / accepted.total())
    print("accept length of the trained drafter, alone and four together:", means)
    assert min(means) > 1.5
    assert abs(means[0] - means[1]) < 0.15
