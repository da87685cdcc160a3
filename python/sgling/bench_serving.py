"""``python -m sgling.bench_serving``: upstream's module name of ``sgling bench serving``."""

from __future__ import annotations

import sys

from sgling.bench.serving import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
