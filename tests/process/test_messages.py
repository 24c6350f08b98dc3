"""Test the contents of messages between ranks and trainers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpo.process.messages import EvaluationRequest, GroupTicket, ObjectiveEnd

TICKET = GroupTicket(
    "group", 0, 2, 1, "gloo", [0], "/proc/1/fd/3", ["127.0.0.1", 0], 600.0, {"RANK": "0"}
)
REQUEST = EvaluationRequest(
    {"lr": 0.1}, 7, 3, "trials/3", TICKET, 0, None, "parent.safetensors", False, False
)


@pytest.mark.parametrize("request_sent", [REQUEST, replace(REQUEST, ticket=None)])
def test_evaluation_request_survives_json(request_sent: EvaluationRequest) -> None:
    assert EvaluationRequest.decode(json.loads(json.dumps(request_sent.encode()))) == request_sent


def test_objective_end_without_failure_survives_json() -> None:
    end = ObjectiveEnd(has_resumed=True)
    assert ObjectiveEnd(**json.loads(json.dumps(vars(end)))) == end
