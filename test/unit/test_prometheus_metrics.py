"""Server metrics carry upstream's names and count what they are fed."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgling.srt.observability.metrics import FinishedRequest, ServerMetrics


def samples(metrics: ServerMetrics) -> dict[str, float]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "m"
            if "le" not in sample.labels:
                found[sample.name.removeprefix("sglang:")] = sample.value
    return found


def test_requests_and_tokens():
    metrics = ServerMetrics({"model_name": "m", "tp_rank": "0"})
    metrics.observe_inter_token(0.03, 3)
    metrics.observe_request(FinishedRequest(10, 4, 2, 0.5, 0.6))
    metrics.observe_request(FinishedRequest(5, 0, 0, None, 0.1, aborted=True))
    found = samples(metrics)
    assert (found["prompt_tokens_total"], found["generation_tokens_total"], found["cached_tokens_total"]) == (15, 4, 2)
    assert (found["num_requests_total"], found["num_aborted_requests_total"]) == (2, 1)
    assert (found["time_to_first_token_seconds_count"], found["e2e_request_latency_seconds_count"]) == (1, 2)
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.03)


def test_gauges_follow_the_scheduler_state():
    metrics = ServerMetrics({"model_name": "m"})
    state = {"num_running_reqs": 2, "num_queue_reqs": 1, "last_gen_throughput": 50.5, "avg_spec_accept_length": 3.1}
    metrics.update_from_state(state)
    metrics.update_from_state({"num_running_reqs": None})
    found = samples(metrics)
    assert (found["num_running_reqs"], found["num_queue_reqs"]) == (2, 1)
    assert (found["gen_throughput"], found["spec_accept_length"]) == (50.5, 3.1)


def test_two_servers_in_one_process_do_not_mix():
    first, second = ServerMetrics({"model_name": "m"}), ServerMetrics({"model_name": "m"})
    first.observe_request(FinishedRequest(1, 1, 0, 0.1, 0.1))
    assert samples(second)["num_requests_total"] == 0
