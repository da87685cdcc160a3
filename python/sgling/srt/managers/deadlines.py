"""Time limits of requests: ``SGLANG_REQ_WAITING_TIMEOUT`` and ``SGLANG_REQ_RUNNING_TIMEOUT``.

Rank 0 reads the clock and turns what it sees into abort orders, which reach every rank with its requests; no other
rank looks at a clock, so all ranks end the same requests in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sgling.srt.config.environ import Environ
from sgling.srt.managers.io_struct import AbortReq
from sgling.srt.managers.request import Req

TIMEOUT_STATUS = 503


class RequestDeadlines:
    """Finds requests that are over time.

    ``waiting``: from arrival until a request is admitted, once; ``running``: from then on, time in which it is swapped
    out included. Seconds; 0 or less means no limit.
    """

    def __init__(self, environ: Environ):
        self._waiting_s = environ.req_waiting_timeout
        self._running_s = environ.req_running_timeout

    def overdue(self, live: Callable[[], Iterable[Req]]) -> list[AbortReq]:
        """Abort orders for the requests of ``live()`` that are over time; costs nothing when no limit is set."""
        if self._waiting_s <= 0 and self._running_s <= 0:
            return []
        now = time.monotonic()
        orders = []
        for req in live():
            waits = req.admitted_at is None
            kind, limit = ("waiting", self._waiting_s) if waits else ("running", self._running_s)
            if 0 < limit < now - (req.created_at if waits else req.admitted_at):
                message = f"The request was {kind} for more than {limit:g} s"
                orders.append(AbortReq(rid=req.rid, message=message, status_code=TIMEOUT_STATUS))
        return orders
