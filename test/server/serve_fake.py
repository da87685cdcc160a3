"""``python -m server.serve_fake [flags]``: the real launcher over fake scheduler processes."""

from __future__ import annotations

import sys

from server.fake_scheduler import create_fake_scheduler
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.entrypoints.http_server import launch_server

if __name__ == "__main__":
    launch_server(ServerArgs.from_cli(sys.argv[1:]), create_fake_scheduler, dead_grace_s=1.0)
