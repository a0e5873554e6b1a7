"""Where nodes meet, and by which address a node is reached."""

import pytest

from lockstep.core.errors import UsageError
from lockstep.launch import node_address
from lockstep.launch.node_address import Endpoint, parse_endpoint, parse_nnodes


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0", "node0", 29400),
        ("node0.cluster.local:1234", "node0.cluster.local", 1234),
        ("10.0.0.1:29400", "10.0.0.1", 29400),
        ("[fd00::1]:77", "fd00::1", 77),
        ("[::1]", "::1", 29400),
    ],
)
def test_endpoint(text, host, port):
    assert parse_endpoint(text) == Endpoint(host, port)
    assert parse_endpoint(str(parse_endpoint(text))) == Endpoint(host, port)


@pytest.mark.parametrize(
    "text", ["", ":29400", "node0:", "node0:port", "node0:0", "node0:65536", "a b", "fd00::1", "http://a"]
)
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(UsageError, match="give HOST:PORT"):
        parse_endpoint(text)


def test_numbers_of_nodes():
    assert parse_nnodes("2") == (2, 2)
    assert parse_nnodes("1:4") == (1, 4)


@pytest.mark.parametrize("text", ["0", "4:1", "0:2", "-1", "two", "1:", ":2", "1:2:3", "1.5", ""])
def test_what_is_no_number_of_nodes_is_refused(text):
    with pytest.raises(UsageError, match="is not a number of nodes"):
        parse_nnodes(text)


def test_own_and_foreign_addresses():
    assert node_address.is_own("127.0.0.1")
    assert not node_address.is_own("192.0.2.1")
    assert node_address.is_loopback("127.0.1.1")
    assert node_address.is_loopback("::1")
    assert not node_address.is_loopback("10.0.0.1")


def test_address_of_this_node(monkeypatch):
    assert node_address.own_address("localhost", ["127.0.0.1"]) == "127.0.0.1"
    monkeypatch.setattr(node_address, "_source_for", lambda target: {"10.0.0.9": "10.0.0.2"}.get(target, "10.0.0.3"))
    assert node_address.own_address("node9", ["10.0.0.9"]) == "10.0.0.2"
    # A name that stands for 127.0.1.1 on its own machine, as on Debian: other nodes do not reach this address.
    assert node_address.own_address("node0", ["127.0.1.1"]) == "10.0.0.3"
    monkeypatch.setenv(node_address.ADDRESS, "10.1.1.1")
    assert node_address.own_address("node9", ["10.0.0.9"]) == "10.1.1.1"


def test_an_unknown_name_has_no_address():
    assert node_address.resolve("no-such-host.invalid") == []


def test_interface_of_an_address():
    assert node_address.interface_of("127.0.0.1") == "lo"
    assert node_address.interface_of("203.0.113.5") is None


def test_a_place_to_meet_without_a_number_of_nodes_is_refused():
    # Each node would train alone, and none would say so.
    with pytest.raises(UsageError, match="the number of nodes is missing"):
        node_address.several(None, "node0:29400")
    assert node_address.several(None, None) is None
    assert node_address.several("1", "node0:29400") is None


@pytest.mark.parametrize("text", ["10.0.0.256", "no-such-host.invalid", "10.0.0.1:29400"])
def test_an_address_of_this_node_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv(node_address.ADDRESS, text)
    with pytest.raises(UsageError, match="neither an address nor a name"):
        node_address.own_address("localhost", ["127.0.0.1"])


def test_the_address_of_this_node_may_be_a_name(monkeypatch):
    monkeypatch.setenv(node_address.ADDRESS, "localhost")
    assert node_address.is_loopback(node_address.own_address("node9", ["192.0.2.1"]))
