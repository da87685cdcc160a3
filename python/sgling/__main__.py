"""``python -m sgling``: the ``sgling`` command."""

from __future__ import annotations

import sys

from sgling.cli import main

sys.exit(main())
