"""Plain text stays at home, proxies are used as on any machine, and certificates are read at each handshake."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.transport.credentials import (
    is_loopback,
    open_blocking_plaintext_channel,
    open_plaintext_channel,
    require_loopback,
    server_options,
    tls_options,
)
from atoll.wire.errors import ConfigError

FAR = "isles.example:7443"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"])
def test_loopback(address: str) -> None:
    require_loopback(address)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", FAR, "localhost.example:1", "127.0.0.1.example:1", "", ":1", "127.0.0.1"],
)
def test_beyond_loopback_plain_text_is_refused(address: str) -> None:
    assert not is_loopback(address)
    with pytest.raises(ConfigError, match="remove the plaintext flag") as caught:
        require_loopback(address)
    assert caught.value.key == "plaintext"
    for open_it in (open_plaintext_channel, open_blocking_plaintext_channel):
        with pytest.raises(ConfigError):
            open_it(address, name="alpha", role="site")


class TestProxy:
    def options(self, address: str, environment: dict[str, str]) -> dict[str, Any]:
        return dict(tls_options(address, environment))

    def test_none(self) -> None:
        options = self.options(FAR, {})
        assert options["grpc.ssl_target_name_override"] == "server.atoll"
        assert "grpc.http_proxy" not in options
        assert "grpc.enable_http_proxy" not in options

    @pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy"])
    def test_lower_case_names_are_read_by_grpc_itself(self, name: str) -> None:
        assert "grpc.http_proxy" not in self.options(FAR, {name: "http://a:1", "HTTPS_PROXY": "http://b:1"})

    def test_upper_case(self) -> None:
        assert self.options(FAR, {"HTTPS_PROXY": "http://proxy:3128"})["grpc.http_proxy"] == "http://proxy:3128"

    @pytest.mark.parametrize("direct", ["isles.example", ".example", "example", "a.b, isles.example ", "*"])
    def test_exceptions(self, direct: str) -> None:
        assert "grpc.http_proxy" not in self.options(FAR, {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": direct})

    @pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY"])
    def test_exceptions_in_upper_case_hold_whatever_case_the_proxy_has(self, name: str) -> None:
        environment = {name: "http://proxy:3128", "NO_PROXY": "isles.example"}
        assert self.options(FAR, environment)["grpc.enable_http_proxy"] == 0
        assert "grpc.enable_http_proxy" not in self.options(FAR, environment | {"NO_PROXY": "other.example"})

    @pytest.mark.parametrize("name", ["no_grpc_proxy", "no_proxy"])
    def test_exceptions_in_lower_case_are_read_by_grpc_itself(self, name: str) -> None:
        options = self.options(FAR, {"HTTPS_PROXY": "http://a:1", name: "other.example", "NO_PROXY": "isles.example"})
        assert options["grpc.http_proxy"] == "http://a:1"
        assert "grpc.enable_http_proxy" not in options

    @pytest.mark.parametrize("direct", ["", ",", "les.example", "other.example"])
    def test_no_exception(self, direct: str) -> None:
        assert "grpc.http_proxy" in self.options(FAR, {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": direct})

    def test_never_on_this_machine(self) -> None:
        options = self.options("127.0.0.1:7443", {"HTTPS_PROXY": "http://proxy:3128", "https_proxy": "http://p:1"})
        assert options["grpc.enable_http_proxy"] == 0
        assert "grpc.http_proxy" not in options


def test_a_port_is_not_shared() -> None:
    """Linux would let a second server take half of the connections."""
    assert dict(server_options())["grpc.so_reuseport"] == 0
