"""Unfinished uploads: who may use them, until when, and what two requests for one file do to each other."""

import os
import time
from pathlib import Path

import pytest

from tinsmith.errors import BackpressureError, NotFoundError, TinsmithError
from tinsmith.store.uploads import UPLOADS_DIR, Upload, Uploads


def begun(uploads: Uploads, tenant: str = "a", lasts_s: int = 1000) -> Upload:
    return uploads.begin(tenant, "tiny", {"rank": 4}, None, int(time.time()) + lasts_s)


def test_an_upload_is_its_tenants_until_it_expires_or_ends(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    upload, old = begun(uploads), begun(uploads, lasts_s=-1)
    older = begun(uploads, lasts_s=-3700)
    for tenant in ("a", None):
        assert Uploads(tmp_path).require(upload.upload_id, tenant) == upload
    for upload_id, tenant in (
        *((upload.upload_id, "b"), (old.upload_id, "a"), (older.upload_id, "a")),
        *(("0" * 32, "a"), ("../x", None), ("room.lock", None)),
    ):
        with pytest.raises(NotFoundError, match="does not exist, is finished or has expired"):
            uploads.require(upload_id, tenant)
    uploads.sweep()
    kept = {place.name for place in (tmp_path / UPLOADS_DIR).iterdir() if place.is_dir()}
    assert kept == {upload.upload_id, old.upload_id}  # a request that began in time may still use the other's files
    uploads.end(upload)
    with pytest.raises(NotFoundError):
        uploads.require(upload.upload_id)


def test_a_file_is_whole_or_not_there_and_written_by_one(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    upload = begun(uploads)
    file = uploads.directory(upload) / "f"
    with uploads.receiving(upload, "f", 5) as written:
        written.write(b"first")
        assert not file.exists()
        with pytest.raises(BackpressureError, match="another request"), uploads.receiving(upload, "f", 5):
            pass
    with pytest.raises(ZeroDivisionError), uploads.receiving(upload, "f", 7) as written:
        written.write(b"second" + bytes(1 // 0))
    assert file.read_bytes() == b"first"
    assert len(list(uploads.directory(upload).iterdir())) == 2  # it, and what it is about
    uploads.end(upload)
    with pytest.raises(TinsmithError, match="cannot be written"), uploads.receiving(upload, "f", 1):
        pass


def test_the_disk_is_taken_before_a_body_arrives_and_never_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, size = Uploads(tmp_path), 2**24
    upload = begun(uploads)
    with uploads.receiving(upload, "f", size) as written:
        assert os.fstat(written.fileno()).st_blocks * 512 >= size  # another request finds the disk without it
        written.write(bytes(size))
    monkeypatch.setattr("tinsmith.store.uploads._LEFT_BYTES", 2**62)
    with pytest.raises(BackpressureError, match="the disk has no room for g"), uploads.receiving(upload, "g", 1):
        pass
    assert sorted(path.name for path in uploads.directory(upload).iterdir()) == ["f", "upload.json"]


def test_unfinished_uploads_have_no_more_than_a_tenants_key_allows(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    first, second = (
        uploads.begin("a", "tiny", {"rank": 4}, None, int(time.time()) + 1000, allowed_bytes=2000) for _ in range(2)
    )
    with uploads.receiving(first, "f", 1500) as written:
        written.write(bytes(1500))
        with pytest.raises(BackpressureError, match="the key allows 2,000"), uploads.receiving(second, "f", 1500):
            pass
    with uploads.receiving(first, "f", 1500) as written:  # takes the place of the other
        written.write(bytes(1500))
    other = begun(uploads, "b")
    with uploads.receiving(other, "f", 5000) as written:
        written.write(bytes(5000))


def test_one_upload_at_a_time_becomes_a_checkpoint_whichever_process_makes_it(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    begun(uploads)
    with (
        uploads.importing(),
        pytest.raises(BackpressureError, match="another upload is being finished"),
        Uploads(tmp_path).importing(),
    ):
        pass
    with Uploads(tmp_path).importing():
        pass


def test_a_tenant_begins_few_and_all_together_not_many(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    for _ in range(8):
        begun(uploads)
    with pytest.raises(BackpressureError, match="8 uploads of this tenant and 8 in all"):
        begun(uploads)
    for tenant in "bcdefgh":
        for _ in range(8):
            begun(uploads, tenant)
    with pytest.raises(BackpressureError, match="0 uploads of this tenant and 64 in all"):
        begun(uploads, "i")
