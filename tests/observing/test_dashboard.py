"""The Grafana dashboard asks for what there is.

Invariant: Every query of `docs/grafana.json` names metrics that exist.
"""

import json
import re
from pathlib import Path

from tinsmith.observing.metrics import metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"

UNSHOWN = {
    "tinsmith_build_info",
    "tinsmith_engine_ready",
    "tinsmith_worker_ready",
    "tinsmith_worker_memory_bytes",
    "tinsmith_gpu_memory_bytes",
    "tinsmith_worker_pass_tokens",
    "tinsmith_model_queued_operations",
    "tinsmith_polls_waiting",
    "tinsmith_queued_bytes",
    "tinsmith_passes",
    "tinsmith_graphs",
    "tinsmith_paging",
}
"""Metrics that no panel has."""


def test_every_query_of_the_dashboard_names_metrics_that_exist_and_all_others_are_known() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"tinsmith_\w+", query)}
    known = metrics()
    assert asked - known.keys() == set()
    assert {metric.name for metric in known.values()} - {known[name].name for name in asked} == UNSHOWN
