"""The two event loops: the same verbs in two orders. The plain one is the oracle for the overlapped one."""

from __future__ import annotations


def event_loop_normal(scheduler) -> None:
    """Launch a step, wait for it, apply it."""
    while not scheduler.stopped:
        scheduler.receive()
        launched = scheduler.launch_next(in_flight=False)
        if launched is None:
            scheduler.idle()
        else:
            scheduler.process(launched)


def event_loop_overlap(scheduler) -> None:
    """Launch step n+1 before looking at the result of step n, so that host work hides behind the device."""
    pending = None
    while not scheduler.stopped:
        scheduler.receive()
        launched = scheduler.launch_next(in_flight=pending is not None)
        if pending is not None:
            scheduler.process(pending)
        elif launched is None:
            scheduler.idle()
        pending = launched
