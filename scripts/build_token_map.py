"""Build a token map for --speculative-token-map from what the target itself answers.

    python scripts/build_token_map.py ling3-pico --prompts prompts.jsonl --size 8192 --output hot.json

The prompts (one JSON string, or object with "prompt" or "input_ids", per line) are answered by the model; the map holds
the most frequent output tokens. Tokens that end a text belong in it and are counted like all others. Prints how much of
the output the map covers, which bounds how often a draft can be right.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from sgling import Engine


def read_prompts(path: Path) -> list[dict]:
    """One ``generate`` argument per line: {"prompt": text} or {"input_ids": ids}."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        value = json.loads(line)
        value = {"prompt": value} if isinstance(value, str) else value
        found = [key for key in ("prompt", "input_ids") if key in value]
        if not found:
            raise SystemExit(f'{path}:{number}: neither a string nor an object with "prompt" or "input_ids"')
        prompts.append({found[0]: value[found[0]]})
    if not prompts:
        raise SystemExit(f"{path}: no prompts")
    return prompts


def count_outputs(engine: Engine, prompts: list[dict], params: dict) -> Counter[int]:
    """How often each token occurs in the answers."""
    counts: Counter[int] = Counter()
    for prompt in prompts:
        counts.update(engine.generate(**prompt, sampling_params=params)["output_ids"])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True, help="tokens in the map")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON of further server flags")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.size < 1:
        parser.error("--size must be at least 1")
    prompts = read_prompts(args.prompts)
    params = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    with Engine(model_path=args.model, **args.engine_args) as engine:
        counts = count_outputs(engine, prompts, params)
    hot = sorted(counts.most_common(args.size), key=lambda item: item[0])
    args.output.write_text(json.dumps([token for token, _ in hot]) + "\n", encoding="utf-8")
    share = sum(count for _, count in hot) / counts.total()
    print(f"{args.output}: {len(hot)} tokens, {share:.2%} of {counts.total()} output tokens, {len(counts)} distinct")


if __name__ == "__main__":
    main()
