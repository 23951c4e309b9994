"""The risk: the served OpenAPI document allows a request that the server answers with an error of its own."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvring_cli.server.service import ServeSettings
from tests.serving import served

schemathesis = pytest.importorskip("schemathesis", reason="the Python package schemathesis is not here")
MOST = 4  # tokens of an answer


@pytest.fixture(scope="module")
def live(phantom):
    with served(phantom, ServeSettings(default_max_tokens=2)) as live:
        yield live


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_that_the_document_leads_to_is_a_server_error(live, mode):
    schema = schemathesis.openapi.from_url(f"{live.base}/openapi.json")
    generation = schemathesis.GenerationMode(mode)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/messages", "/tokenize"}
    cases = st.one_of([operation.as_strategy(generation_mode=generation) for operation in operations])
    seen = set()

    @settings(max_examples=80, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases)
    def ask(case):
        if isinstance(case.body, dict):
            for name in ("max_tokens", "max_completion_tokens"):
                if type(case.body.get(name)) is int:  # a boolean is to stay what it is
                    case.body[name] = min(case.body[name], MOST)
        response = case.call(timeout=60)
        seen.add(response.status_code)
        assert response.status_code < 500, (case.method, case.path, case.body, response.text)

    ask()
    assert seen & ({200} if mode == "positive" else {400, 404})
    live.wait(live.idle)
