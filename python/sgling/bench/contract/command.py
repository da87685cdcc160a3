"""``sgling gate contract``: measures a contract's cells, judges them, records baselines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sgling import __version__
from sgling.bench.contract.judge import Row, format_rows, judge_contract, load_baseline, save_baseline
from sgling.bench.contract.measure import measure_contract
from sgling.bench.contract.schema import Contract, load_contract
from sgling.bench.gate.correctness import Check, check_all
from sgling.bench.gate.correctness_command import ERRORS
from sgling.bench.gate.golden import Golden, facts_of, packaged_file
from sgling.bench.gate.subject import OpenSubject, open_subject
from sgling.bench.target import BenchError
from sgling.srt.config.gate_args import ContractArgs
from sgling.srt.config.model_path import DEFAULT_MODEL

PACKAGED_CONTRACT = f"{DEFAULT_MODEL}.contract.yaml"


async def _checks(contract: Contract, subject: OpenSubject, short: bool) -> list[Check]:
    if contract.golden is None:
        return []
    golden = Golden.load(contract.golden)
    if short:
        golden = golden.first(contract.short.golden_answers, contract.short.golden_tokens)
    return await check_all(subject.target, golden)


async def run_contract(args: ContractArgs, contract: Contract, subject: OpenSubject) -> list[Row] | None:
    """Rows of the judged contract; None when a baseline was recorded instead."""

    def on_cell(name: str) -> None:
        if not args.disable_tqdm:
            print(f"measuring {name}", file=sys.stderr)

    cells = await measure_contract(contract, subject, on_cell)
    if args.record_baseline:
        if contract.baseline is None:
            raise BenchError(f"{contract.path} names no baseline file")
        facts = {**facts_of(await subject.target.info()), "model": subject.model, "version": __version__}
        save_baseline(contract.baseline, cells, facts)
        return None
    checks = await _checks(contract, subject, args.short)
    return judge_contract(contract, cells, load_baseline(contract.baseline), checks)


def report(contract: Contract, rows: Sequence[Row]) -> dict:
    """The machine-readable report."""
    failed = [f"{row.place} {row.metric}" for row in rows if row.verdict == "fail"]
    return {
        "contract": contract.name,
        "file": str(contract.path),
        "version": __version__,
        "passed": not failed,
        "failed": failed,
        "rows": [row._asdict() for row in rows],
    }


async def _run(args: ContractArgs, contract: Contract) -> list[Row] | None:
    async with open_subject(args) as subject:
        return await run_contract(args, contract, subject)


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 names what failed."""
    args = ContractArgs.read(argv, "sgling gate contract", "contract")
    try:
        contract = load_contract(args.contract or packaged_file(PACKAGED_CONTRACT))
        contract = contract.shortened() if args.short else contract
        rows = asyncio.run(_run(args, contract))
    except ERRORS as error:
        print(f"sgling gate contract: error: {error}", file=sys.stderr)
        return 1
    if rows is None:
        print(f"recorded {contract.baseline}")
        return 0
    print(format_rows(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(report(contract, rows), indent=1) + "\n", encoding="utf-8")
    return int(any(row.verdict == "fail" for row in rows))
