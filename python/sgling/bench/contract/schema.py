"""The contract file: scenarios x concurrency x cache state with bounds, and checks of the whole server.

See docs/gates.md for the format in words.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sgling.bench.contract.bounds import METRICS, Bound, read_bounds
from sgling.bench.contract.yaml_reader import Entry, read_yaml
from sgling.srt.config.bench_args import SCENARIO_DATASETS

FORMAT = 1
DATASETS = (*SCENARIO_DATASETS, "arithmetic", "random")
_ROOT = ("format", "name", "baseline", "golden", "short", "scenarios", "rollback")
_SCENARIO = ("dataset", "requests", "input_len", "output_len", "concurrency", "runs", "temperature", "seed", "bounds")
_TOOL_METRICS, _JUDGED = ("tool_calling", "scenarios"), (*SCENARIO_DATASETS, "arithmetic")


class Scenario(NamedTuple):
    """One workload of the contract; it is measured at every concurrency and in every cache state of ``runs``."""

    name: str
    dataset: str
    requests: int
    input_len: int
    output_len: int
    concurrency: tuple[int, ...]
    runs: tuple[str, ...]
    temperature: float
    seed: int
    bounds: list[Bound]


class Short(NamedTuple):
    """What ``--short`` reduces every scenario to.

    Attributes:
        golden_answers, golden_tokens: how much of the golden is checked.
        skip: metrics that so few requests say nothing about; their bounds are not judged.
    """

    requests: int
    concurrency: tuple[int, ...]
    runs: tuple[str, ...]
    golden_answers: int
    golden_tokens: int
    skip: tuple[str, ...]


class Contract(NamedTuple):
    """A contract file. Paths are resolved against its directory; None where the file names none.

    Attributes:
        rollback: bounds of the run with speculation off, or None when it is not asked for.
    """

    path: Path
    name: str
    baseline: Path | None
    golden: Path | None
    short: Short
    scenarios: list[Scenario]
    rollback: list[Bound] | None

    def shortened(self) -> Contract:
        """The short form."""
        short = self.short
        scenarios = [
            scenario._replace(
                requests=min(scenario.requests, short.requests),
                concurrency=short.concurrency,
                runs=short.runs,
                bounds=[bound for bound in scenario.bounds if bound.metric not in short.skip],
            )
            for scenario in self.scenarios
        ]
        return self._replace(scenarios=scenarios)


def load_contract(path: str | Path) -> Contract:
    """Read a contract. Raises SchemaError that explains the first mistake by line."""
    root = read_yaml(path)
    fields = root.mapping(_ROOT, required=("format", "scenarios"))
    if fields["format"].integer() != FORMAT:
        raise fields["format"].error(f"this build reads format {FORMAT}")
    scenarios = [_scenario(name, entry) for name, entry in fields["scenarios"].mapping().items()]
    if not scenarios:
        raise fields["scenarios"].error("has no scenario")
    contract = Contract(
        path=Path(path),
        name=fields["name"].text() if "name" in fields else Path(path).stem,
        baseline=_file(path, fields.get("baseline")),
        golden=_file(path, fields.get("golden")),
        short=_short(fields.get("short")),
        scenarios=scenarios,
        rollback=_rollback(fields.get("rollback")),
    )
    relative = [bound for scenario in scenarios for bound in scenario.bounds if bound.operator]
    if contract.baseline is None and relative:
        line = relative[0].line
        raise Entry(str(path), root.node).error(f"line {line} refers to a baseline, but no baseline file is named")
    return contract


def _file(path: str | Path, entry: Entry | None) -> Path | None:
    return None if entry is None else Path(path).parent / entry.text()


def _integers(entry: Entry | None, default: tuple[int, ...]) -> tuple[int, ...]:
    if entry is None:
        return default
    found = tuple(item.integer() for item in entry.items())
    if not found:
        raise entry.error("is empty")
    return found


def _runs(entry: Entry | None) -> tuple[str, ...]:
    if entry is None:
        return ("cold",)
    found = tuple(item.text(("cold", "warm")) for item in entry.items())
    if not found:
        raise entry.error("is empty")
    return found


def _short(entry: Entry | None) -> Short:
    fields = (
        {}
        if entry is None
        else entry.mapping(("requests", "concurrency", "runs", "golden_answers", "golden_tokens", "skip"))
    )
    return Short(
        fields["requests"].integer() if "requests" in fields else 2,
        _integers(fields.get("concurrency"), (1,)),
        _runs(fields.get("runs")),
        fields["golden_answers"].integer() if "golden_answers" in fields else 1,
        fields["golden_tokens"].integer() if "golden_tokens" in fields else 64,
        tuple(item.text(tuple(METRICS)) for item in fields["skip"].items()) if "skip" in fields else (),
    )


def _scenario(name: str, entry: Entry) -> Scenario:
    fields = entry.mapping(_SCENARIO, required=("dataset", "bounds"))
    dataset = fields["dataset"].text(DATASETS)
    bounds = read_bounds(fields["bounds"])
    places = fields["bounds"].mapping(tuple(METRICS))
    if "invalid_tool_calls" in places and dataset not in _TOOL_METRICS:
        raise places["invalid_tool_calls"].error(f"data set {dataset} offers no tools")
    if "task_success" in places and dataset not in _JUDGED:
        raise places["task_success"].error(f"answers of data set {dataset} cannot be judged")
    if "input_len" in fields and dataset != "random":
        raise fields["input_len"].error("only random prompts have a length that can be asked for")

    def integer(key: str, default: int, least: int = 1) -> int:
        return fields[key].integer(least) if key in fields else default

    return Scenario(
        name=name,
        dataset=dataset,
        requests=integer("requests", 8),
        input_len=integer("input_len", 128),
        output_len=integer("output_len", 256),
        concurrency=_integers(fields.get("concurrency"), (1,)),
        runs=_runs(fields.get("runs")),
        temperature=fields["temperature"].number() if "temperature" in fields else 0.0,
        seed=integer("seed", 1, 0),
        bounds=bounds,
    )


def _rollback(entry: Entry | None) -> list[Bound] | None:
    if entry is None:
        return None
    bounds = read_bounds(entry)
    for bound in bounds:
        if not bound.metric.endswith("_ms") and bound.metric != "failed_requests":
            raise entry.error(f"{bound.metric} has no meaning with speculation off; bound times and failed_requests")
    return bounds
