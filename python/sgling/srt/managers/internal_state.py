"""What a scheduler tells about itself: ``/server_info``, ``/metrics`` and the decode log line."""

from __future__ import annotations

import logging

from sgling.srt.managers.scheduler_core import SchedulerCore
from sgling.srt.model_executor.device_clock import DeviceClock
from sgling.srt.model_executor.graph_runner import GraphRunner
from sgling.srt.observability.step_clock import StepClock
from sgling_kernel.dispatch import refused_fast_paths

logger = logging.getLogger(__name__)


def static_info(core: SchedulerCore, graphs: GraphRunner | None) -> dict:
    """Facts that never change after start-up."""
    runner, plan = core.runner, core.runner.plan
    return {
        "device": runner.device,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "needs_cpu_seq_lens": runner.needs_cpu_seq_lens,
        "pinning_backends": list(runner.pinning_backends),
        "load_s": runner.load_report.seconds,
        "ignored_tensors": list(runner.load_report.ignored),
        "memory_plan": plan._asdict(),
        "cuda_graphs": graphs.describe() if graphs else None,
    }


def snapshot(core: SchedulerCore) -> dict:
    """Current figures, plain JSON; host arithmetic only, so it costs no device time."""
    stats, resources, plan = core.stats, core.resources, core.runner.plan
    waiting, running = core.prefill.live(), [req for req in core.decode.running if not req.finished]
    return {
        "avg_spec_accept_length": stats.avg_accept_length,
        "spec_accept_rate": stats.accept_rate,
        "spec_verify_ct": stats.verify_ct,
        "spec_depth": core.depth.describe(),
        "refused_fast_paths": refused_fast_paths(),
        **_device_figures(core.runner.device_clock, core.clock),
        "last_gen_throughput": stats.last_gen_throughput,
        "memory_usage": {
            "weight": plan.weight_bytes / 1e9,
            "kvcache": plan.max_total_tokens * plan.kv_bytes_per_token / 1e9,
            "state": plan.state_bytes / 1e9,
            "graph": core.graph_bytes / 1e9,
        },
        "effective_max_running_requests_per_dp": plan.max_running_requests,
        "num_running_reqs": len(running),
        "num_queue_reqs": len(waiting),
        "num_retracted_reqs": core.decode.num_retracted,
        "generated_tokens": stats.generated_tokens,
        "decode_steps": core.decode_steps,
        "decode_steps_width1": core.decode_steps_width1,
        "decode_steps_eager": core.decode_steps_eager,
        "decode_steps_fallback": core.decode_steps_fallback,
        "max_total_num_tokens": resources.kv.total,
        "kv_available_tokens": resources.kv.available,
        "kv_used_tokens": resources.kv.used,
        "req_slots_available": resources.rows.available,
        "state_slots_available": resources.state_slots.available,
        "token_usage": resources.kv.used / resources.kv.total,
    }


def _device_figures(gpu: DeviceClock | None, loop: StepClock) -> dict:
    """Busy time, time with something to serve, and idle share; of a GPU also run-ahead and launch time.

    On the CPU the steps run inside the loop, which is their clock.
    """
    if gpu is None:
        busy_s, serving_s, run_ahead, launch_us = loop.busy_s, loop.serving_s, None, None
    else:
        busy_s, serving_s = gpu.busy_ms / 1000, (gpu.busy_ms + gpu.idle_ms) / 1000
        run_ahead, launch_us = gpu.run_ahead, gpu.launch_us
    return {
        "device_busy_s": busy_s,
        "serving_s": serving_s,
        "device_idle_share": 1 - busy_s / serving_s if serving_s else 0.0,
        "device_run_ahead": run_ahead,
        "device_launch_us": launch_us,
    }


def log_decode(core: SchedulerCore, batch_size: int, in_graph: bool) -> None:
    """Upstream's decode log line; ``in_graph``: whether the step just launched is a replay of captured graphs."""
    throughput, accept_length, accept_rate = core.stats.take_interval()
    used, total = core.resources.kv.used, core.resources.kv.total
    spec = f"accept len: {accept_length:.2f}, accept rate: {accept_rate:.2f}, " if core.args.spec.enabled else ""
    logger.info(
        "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %scuda graph: %s, "
        "gen throughput (token/s): %.2f, #queue-req: %d",
        batch_size,
        used,
        used / total,
        spec,
        in_graph,
        throughput,
        len(core.prefill.live()),
    )
