"""``python -m sgling.launch_server`` and ``sgling serve``: read the arguments, start the server."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.server_args import ServerArgs

MODULE_PROG = "python -m sgling.launch_server"
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str], prog: str = MODULE_PROG, positional: str | None = None) -> int:
    """Start a server; usage errors exit with status 2, arguments or models that cannot be served with status 1."""
    try:
        server_args = ServerArgs.from_cli(argv, prog, positional)
        from sgling.srt.entrypoints.http_server import launch_server

        launch_server(server_args)
    except (ServerArgsError, ModelConfigError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the server has taken the signal over
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
