# SPDX-License-Identifier: Apache-2.0
"""The dashboard shows metrics that the sync service has, and all of them."""

import json
import re
from typing import Any

from megatron_ext.sync_service.status_page.metrics import metrics_text
from tests.support.distributed import REPOSITORY

DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "examples/grafana/sync_service.json").read_text())
LEFT_OUT: set[str] = set()
"""Metrics that the dashboard does not show, on purpose."""


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_is_shown_and_every_shown_one_exists():
    exposed = set(re.findall(r"^# HELP (\S+)", metrics_text([]), re.MULTILINE))
    shown = {name for text in expressions() for name in re.findall(r"\bmegatron_ext_\w+", text)}
    assert len(exposed) >= 15
    assert shown <= exposed
    assert exposed - shown == LEFT_OUT


def test_panels_are_told_apart_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_every_expression_keeps_to_the_chosen_run_and_data_source():
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "run"}
    assert [text for text in expressions() if '{run=~"$run"}' not in text] == []
