"""`tinsmith keys`: a key is shown once, and limits are read and listed as they were given."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.running import tinsmith_here
from tinsmith.store.keys import find_key, list_keys
from tinsmith.store.records import ApiKey
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")


def keys(data_dir: Path, *arguments: str) -> str:
    ended = tinsmith_here("keys", *arguments, "--data-dir", str(data_dir))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def stored(data_dir: Path) -> dict[str, ApiKey]:
    with closing(Store.open(data_dir)) as store:
        return {key.name: key for key in list_keys(store)}


def test_a_key_has_the_limits_that_were_given(tmp_path: Path) -> None:
    before = time.time()
    text = keys(
        tmp_path,
        *("add", "ci", "--tenant", "team", "--role", "read-only", "--project", "nightly"),
        *("--models", "a", "--models", "b", "--max-models", "3", "--max-parallel", "64", "--expires", "2d"),
        *("--budget-tokens", "2_000_000/day", "--budget-gpu-seconds", "3600/day", "--storage", "1.5GiB"),
        *("--keep-checkpoints", "5", "--checkpoint-ttl", "30d"),
    ).strip()
    found = stored(tmp_path)["ci"]
    assert found.expires_at is not None
    assert before <= found.expires_at - 2 * 86400 <= time.time()
    shown = ("team", "read-only", "nightly", ["a", "b"], 3, 64, 2_000_000, 3600.0, 3 * 2**29, 5, 30 * 86400)
    assert shown == (
        *(found.tenant, found.role, found.project_id, found.models, found.max_models, found.max_parallel),
        *(found.tokens_a_day, found.gpu_seconds_a_day, found.storage_bytes),
        *(found.kept_checkpoints, found.checkpoint_ttl_s),
    )
    assert find_key({found.key_id: found}, text) == found
    listed = keys(tmp_path, "list")
    assert text not in listed
    assert "2,000,000" in listed


def test_a_key_that_is_rotated_or_revoked_ends(tmp_path: Path) -> None:
    first = keys(tmp_path, "add", "a").strip()
    second = keys(tmp_path, "rotate", "a").strip()
    found = stored(tmp_path)["a"]
    assert [find_key({found.key_id: found}, text) for text in (first, second)] == [None, found]
    assert keys(tmp_path, "revoke", "a") == "the key 'a' is revoked\n"
    assert stored(tmp_path)["a"].revoked_at is not None
    assert "revoked 2" in keys(tmp_path, "list")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("add", "a"), "there is a key 'a' already"),
        (("add", "b c"), "NAME='b c' must have"),
        (("add", "b", "--expires", "soon"), "--expires='soon' is no time such as 90d"),
        (("add", "b", "--checkpoint-ttl", "1"), "--checkpoint-ttl='1' is no time such as"),
        (("add", "b", "--storage", "big"), "--storage='big' is no size"),
        (("add", "b", "--expires", "9" * 400 + "d"), "is no time such as 90d, 12h, 30m or 4w, of at most 100 years"),
        (("add", "b", "--storage", "9" * 400), "is no size of at most 1e+18 bytes"),
        (("add", "b", "--budget-tokens", "1e400/day"), "--budget-tokens='1e400/day' is no number a day of at most"),
        (("add", "b", "--budget-gpu-seconds", "1e400"), "--budget-gpu-seconds='1e400' is no number a day of at most"),
        (("add", "b", "--budget-tokens", "1/week"), "--budget-tokens='1/week' is no number a day"),
        (("rotate", "b"), "there is no key 'b'"),
        (("revoke", "b"), "there is no key 'b'"),
        (("rotate", "old"), "the key 'old' is revoked"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], error: str, tmp_path: Path) -> None:
    keys(tmp_path, "add", "a")
    keys(tmp_path, "add", "old")
    keys(tmp_path, "revoke", "old")
    ended = tinsmith_here("keys", *arguments, "--data-dir", str(tmp_path))
    assert ended.returncode == 2
    assert error in ended.stderr
