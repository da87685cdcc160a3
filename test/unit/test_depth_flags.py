"""The flags of adaptive width: what they resolve to, and which combinations are refused."""

from __future__ import annotations

import json

import pytest

from sgling.srt.config.depth_table import DepthTable
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs


def resolve(**given) -> ServerArgs:
    return ServerArgs.from_kwargs(device="cpu", **given)


@pytest.fixture
def table(tmp_path) -> str:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(DepthTable("x", {1: (1.0, 2.0, 3.0, 4.0, 5.0)}, {}).to_json()))
    return str(path)


def test_the_default_is_a_fixed_width():
    args = resolve()
    assert (args.spec.depth, args.spec.width, args.to_dict()["speculative_depth"]) == ("fixed", 4, "fixed")
    assert resolve(speculative_algorithm="none").speculative_depth is None


@pytest.mark.parametrize("given", [{"speculative_depth": "auto"}, {"speculative_adaptive": True}])
def test_auto_goes_as_deep_as_is_built(given):
    args = resolve(**given)
    assert (args.spec.depth, args.spec.width, args.spec.depth_table) == ("auto", 8, None)
    assert args.to_dict()["speculative_depth"] == "auto"


def test_auto_goes_as_deep_as_the_table(table):
    spec = resolve(speculative_depth="auto", speculative_depth_table=table).spec
    assert (spec.width, spec.depth_table.source) == (5, "x")
    assert resolve(speculative_depth="auto", speculative_depth_table=table, speculative_num_steps=2).spec.width == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_depth": "auto", "speculative_algorithm": "none"}, "and it is off"),
        ({"speculative_depth": "auto", "speculative_num_steps": 0}, "num-steps of at least 1"),
        ({"speculative_depth": "sometimes"}, "'sometimes' is not one of fixed, auto"),
        ({"speculative_depth_table": "x.json"}, "only with --speculative-depth auto"),
        ({"speculative_depth": "auto", "speculative_depth_table": "/no/such"}, "/no/such"),
    ],
)
def test_contradictions_are_refused(given, message):
    with pytest.raises(ServerArgsError, match=message):
        resolve(**given)


def test_a_table_that_is_too_short_is_refused(table):
    with pytest.raises(ServerArgsError, match="covers widths 1 to 5, and --speculative-num-steps 6 asks for 7"):
        resolve(speculative_depth="auto", speculative_depth_table=table, speculative_num_steps=6)
