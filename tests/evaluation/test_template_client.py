"""Test the connection of a rank to its template, with real templates."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpo.errors import RunError
from hpo.evaluation import template_client
from hpo.evaluation.template_client import TemplateClient, TemplateProcess
from tests.support.in_process_template import load_problem
from tests.support.runs import QUICK


def kill_template(client: TemplateClient) -> None:
    """Kill the template, and wait until the client knows it."""
    assert client._process is not None
    client._process.kill()
    while client.is_open:  # The test has a time limit.
        client.read_messages()
        time.sleep(0.01)


@pytest.mark.slow
def test_second_crash_of_a_slow_template_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(template_client, "_SECONDS_BETWEEN_CRASHES", 2.0)
    script = tmp_path / "slow.py"  # It is loaded in more than these 2 s, as on a slow disk.
    script.write_text(f"import time\n\ntime.sleep(3)\n{QUICK.read_text()}")
    request = ("load", load_problem(script).file.data)
    process = TemplateProcess()
    client = TemplateClient(process.address, process)
    try:
        client.ask(request[0], **request[1])
        client.load_requests = [request]
        kill_template(client)
        client._replace_process()
        kill_template(client)
        with pytest.raises(RunError, match="had run for less than a minute, after another crash"):
            client._replace_process()
        assert client.crash_count == 1
    finally:
        client.close()
