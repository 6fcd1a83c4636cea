"""A router finds workers by DNS or a list, and forgets them only when their streams are over too."""

import pytest
from typer.testing import CliRunner

from pd_cluster.cli.main import app
from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.rpc.security import Security
from router.discovery import Discovery, DnsSource, StaticSource, check_exposed, parse_source


class Pool:
    def __init__(self) -> None:
        self.workers: list[str] = []
        self.attached: set[str] = set()

    def add_worker(self, address: str) -> None:
        self.workers.append(address)

    def remove_worker(self, address: str) -> None:
        self.workers.remove(address)

    def is_attached(self, address: str) -> bool:
        return address in self.attached


class Source:
    def __init__(self, *addresses: str) -> None:
        self.found: set[str] | None = set(addresses)

    async def addresses(self) -> set[str]:
        if self.found is None:
            raise Unavailable("no such name")
        return self.found


async def test_new_addresses_are_dialled_once() -> None:
    pool, source = Pool(), Source("a:1")
    discovery = Discovery(pool, [source, Source("a:1", "b:1")])
    await discovery.look()
    assert sorted(pool.workers) == ["a:1", "b:1"]
    source.found = {"a:1", "c:1"}
    await discovery.look()
    assert sorted(pool.workers) == ["a:1", "b:1", "c:1"]


async def test_a_worker_that_drains_out_of_dns_stays_until_its_stream_is_over() -> None:
    pool, source = Pool(), Source("a:1", "b:1")
    discovery = Discovery(pool, [source])
    await discovery.look()
    pool.attached = {"a:1", "b:1"}
    source.found = {"b:1"}
    await discovery.look()
    assert sorted(pool.workers) == ["a:1", "b:1"]
    pool.attached = {"b:1"}
    await discovery.look()
    assert pool.workers == ["b:1"]
    source.found = {"a:1", "b:1"}
    await discovery.look()
    assert sorted(pool.workers) == ["a:1", "b:1"], "and may come back"


async def test_what_a_source_said_last_holds_while_it_cannot_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    pool, source, other = Pool(), Source("a:1"), Source()
    discovery = Discovery(pool, [source, other])
    await discovery.look()
    source.found = None
    other.found = {"b:1"}
    for _ in range(3):
        await discovery.look()
    assert sorted(pool.workers) == ["a:1", "b:1"]
    assert len([record for record in caplog.records if record.message == "discovery_failed"]) == 1


async def test_dns_gives_every_address_at_every_port() -> None:
    assert await DnsSource("127.0.0.1", range(7000, 7002)).addresses() == {"127.0.0.1:7000", "127.0.0.1:7001"}
    assert await DnsSource("::1", range(7000, 7001)).addresses() == {"[::1]:7000"}
    with pytest.raises(Unavailable, match=r"cannot resolve nowhere\.invalid"):
        await DnsSource("nowhere.invalid", range(1, 2)).addresses()


async def test_sources_are_written_as_text() -> None:
    assert await parse_source("static:h1:7000,[::1]:7001").addresses() == {"h1:7000", "[::1]:7001"}
    ranged = parse_source("dns:127.0.0.1:7000-7003")
    assert len(await ranged.addresses()) == 4
    assert isinstance(parse_source("static:h:1"), StaticSource)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("h:7000", "discovery is dns:"),
        ("srv:h:7000", "discovery is dns:"),
        ("dns:h", "an address is HOST:PORT"),
        ("dns:h:x", "from 1 to 65535"),
        ("dns:h:70000", "from 1 to 65535"),
        ("dns:h:7003-7000", "no range"),
        ("static:h:1,h", "an address is HOST:PORT"),
    ],
)
def test_a_source_that_is_none_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_source(text)


@pytest.mark.parametrize("source", ["static:127.0.0.1:7000,10.0.0.1:7000", "dns:workers.example:7000"])
def test_a_router_dials_nobody_in_the_clear_over_a_network(source: str) -> None:
    result = CliRunner().invoke(app, ["router", "--discover", source])
    assert result.exit_code == 2
    assert "leaves this machine: give it a certificate and a token" in result.stderr
    check_exposed([parse_source(source)], Security(allow_insecure=True))
    check_exposed([parse_source(source)], Security(root_certificates="ca.pem", token="secret"))


def test_workers_on_this_machine_need_no_certificates() -> None:
    check_exposed([parse_source("static:127.0.0.1:7000,[::1]:7001"), parse_source("dns:localhost:7000")], Security())
