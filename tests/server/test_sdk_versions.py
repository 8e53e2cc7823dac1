import pytest

from tests.server.serving import Served


@pytest.mark.parametrize("version", ["0.22.3", "0.22.10", "0.30", "0.38.0", "0.38.0rc1", "", "main", "٣.٤"])
async def test_a_client_that_works_or_names_no_version_is_told_nothing(server: Served, version: str) -> None:
    reply = (await server.post("create_session", {"sdk_version": version})).json()
    assert reply.keys() == {"type", "session_id"}


@pytest.mark.parametrize(
    ("version", "fault"), [("0.22.2", "too old"), ("0.9.0", "too old"), ("0.38.1", "newer"), ("0.100.0", "newer"), ("1.0", "newer")]
)
async def test_other_clients_are_told_which_versions_work(server: Served, version: str, fault: str) -> None:
    told = (await server.post("create_session", {"sdk_version": version})).json()["error_message"]
    assert told.startswith(f"tinker {version} is {fault}")
    assert told.endswith("It works with 0.22.3 to 0.38.0; pip install tinker==0.38.0")
