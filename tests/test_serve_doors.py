"""The risk: who may not ask is answered, or who may is not."""

from __future__ import annotations

import openai
import pytest

from kvring_cli.server.service import ServeSettings
from tests.serving import CHAT, error, served


def test_no_other_site_may_ask(phantom):
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    with served(phantom) as live:
        for response in (live.http.options(CHAT, headers=asked), live.http.get("/v1/models", headers=asked)):
            assert not [name for name in response.headers if name.startswith("access-control")]


def test_no_other_sites_name_leads_to_a_server_without_a_key(phantom):
    with served(phantom, ServeSettings(hosts=("box.lan",))) as live:
        for name in ("127.0.0.1:80", "localhost", "[::1]:8000", "LOCALHOST:1", "chat.localhost", "box.lan:8000"):
            assert live.http.get("/v1/models", headers={"Host": name}).status_code == 200, name
        for name in ("evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "10.0.0.7", "[fe80::1]"):
            refused = live.http.get("/v1/models", headers={"Host": name})
            assert "--allowed-host" in error(refused, 403, "host_not_allowed")["message"], name
    with served(phantom, ServeSettings(api_key="secret")) as live:
        asked = {"Host": "evil.example", "x-api-key": "secret"}
        assert live.http.get("/v1/models", headers=asked).status_code == 200


def test_a_key_is_asked_of_everybody_but_health(phantom):
    with served(phantom, ServeSettings(api_key="schlüssel", model_id="mine")) as live:
        assert live.http.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "schl"}, {"Authorization": "schlüssel"}):
            sent = {name: value.encode() for name, value in headers.items()}
            error(live.http.get("/v1/models", headers=sent), 401, "invalid_api_key")
        for headers in ({"Authorization": "Bearer schlüssel"}, {"x-api-key": "schlüssel"}):
            sent = {name: value.encode() for name, value in headers.items()}
            assert live.http.get("/v1/models", headers=sent).json()["data"][0]["id"] == "mine"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{live.base}/v1", api_key="wrong", max_retries=0).models.list()
