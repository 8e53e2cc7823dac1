"""Recent samples for the console: bounded, in order, and of each tenant alone."""

from pathlib import Path

import pytest

from tests.server.serving import served
from tinsmith.console.samples import KeptSample
from tinsmith.errors import NotFoundError
from tinsmith.protocol.serving import Sample, SampleDone, SampleFailed
from tinsmith.server.kept_samples import CANCELLED, LEFT, KeptSamples


def sample(number: int, tenant: str, size: int = 100, run: int = 1) -> Sample:
    return Sample(f"s:sample:0/{number}", run, "base", None, 1, stream=False, payload=bytes(size), tenant=tenant)


def newest(kept: KeptSamples, tenant: str | None, most: int = 100) -> list[KeptSample]:
    return kept.newest(tenant, most, 2**20)


def test_samples_are_kept_once_they_have_finished_for_their_tenant() -> None:
    kept = KeptSamples(10_000)
    for number, tenant in ((1, "a"), (2, "b"), (3, "a")):
        kept.begin(sample(number, tenant))
    assert newest(kept, None) == []
    kept.end(SampleDone("s:sample:0/1", 1, b"reply"))
    kept.end(SampleFailed("s:sample:0/2", 1, "why", "user", gone=False))
    kept.end(SampleDone("s:sample:0/3", 9, b"of another run"))
    kept.end(SampleDone("s:sample:0/4", 1, b"of nobody"))
    assert [each.request_id[-1] for each in newest(kept, None)] == ["2", "1"]
    assert [(each.reply, each.error) for each in newest(kept, "b")] == [(b"", "why")]
    assert kept.find("a", "s:sample:0/1").reply == b"reply"
    for tenant, number in (("b", 1), ("a", 3), ("a", 9)):
        with pytest.raises(NotFoundError):
            kept.find(tenant, f"s:sample:0/{number}")


def test_the_tenant_that_keeps_the_most_makes_room() -> None:
    kept = KeptSamples(8_000)
    kept.begin(sample(0, "small"))
    kept.end(SampleDone("s:sample:0/0", 1, bytes(50)))
    for number in range(1, 40):
        kept.begin(sample(number, "large"))
        kept.end(SampleDone(f"s:sample:0/{number}", 1, bytes(50)))
        assert sum(each.size for each in newest(kept, None)) <= 8_000
    assert len(newest(kept, "small")) == 1
    assert [each.request_id for each in newest(kept, "large", 2)] == ["s:sample:0/39", "s:sample:0/38"]
    assert len(newest(kept, "large")) == 5


def test_what_is_too_large_or_was_sent_again_takes_no_room() -> None:
    kept = KeptSamples(8_000)
    kept.begin(sample(1, "a", size=9_000))
    kept.end(SampleDone("s:sample:0/1", 1, b""))
    assert newest(kept, None) == []
    for run in range(1, 30):
        kept.begin(sample(2, "a", size=400, run=run))
    kept.end(SampleFailed("s:sample:0/2", 28, "cancelled", "user", gone=False))
    kept.end(SampleDone("s:sample:0/2", 29, b"the last"))
    assert [each.reply for each in newest(kept, None)] == [b"the last"]
    KeptSamples(0).begin(sample(1, "a"))


def test_what_one_page_takes_is_bounded() -> None:
    kept = KeptSamples(100_000)
    for number in range(20):
        kept.begin(sample(number, "a", size=1_000))
        kept.end(SampleDone(f"s:sample:0/{number}", 1, bytes(1_000)))
    kept.begin(sample(20, "a", size=12_000))
    kept.end(SampleDone("s:sample:0/20", 1, b""))
    found = kept.newest("a", 100, 10_000)
    assert [each.request_id for each in found] == [f"s:sample:0/{number}" for number in (19, 18, 17)]
    assert sum(each.size for each in found) <= 10_000


def test_the_last_errors_of_a_tenant_stay_without_what_was_asked() -> None:
    kept = KeptSamples(8_000)
    for number in range(1, 21):
        kept.begin(sample(number, "a"))
        kept.end(SampleFailed(f"s:sample:0/{number}", 1, f"why {number}", "server", gone=False))
    for number, reason in ((30, CANCELLED), (31, LEFT)):
        kept.begin(sample(number, "a"))
        kept.end(SampleFailed(f"s:sample:0/{number}", 1, reason, "user", gone=False))
    failed = kept.failed("a")
    assert [(each.error, each.category, each.body) for each in failed] == [
        (f"why {number}", "server", b"") for number in range(20, 12, -1)
    ]
    assert kept.failed("b") == []
    assert kept.failed(None) == failed


async def test_last_errors_say_where_samples_are_not_kept(tmp_path: Path) -> None:
    for mib, told in ((0, "No operation has failed."), (1, "No operation and no recent sample has failed.")):
        async with served(tmp_path / str(mib), kept_sample_mib=mib) as server:
            reply = await server.client.get("/", headers={"Accept": "text/html"})
            assert told in reply.text
            assert ("Samples that fail are not listed" in reply.text) == (mib == 0)
