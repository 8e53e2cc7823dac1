"""Unfinished uploads: who may use them, until when, and what two requests for one file do to each other."""

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
    for tenant in ("a", None):
        assert Uploads(tmp_path).require(upload.upload_id, tenant) == upload
    for upload_id, tenant in ((upload.upload_id, "b"), (old.upload_id, "a"), ("0" * 32, "a"), ("../x", None)):
        with pytest.raises(NotFoundError, match="does not exist, is finished or has expired"):
            uploads.require(upload_id, tenant)
    uploads.sweep()
    assert [place.name for place in (tmp_path / UPLOADS_DIR).iterdir()] == [upload.upload_id]
    uploads.end(upload)
    with pytest.raises(NotFoundError):
        uploads.require(upload.upload_id)


def test_a_file_is_whole_or_not_there_and_written_by_one(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    upload = begun(uploads)
    file = uploads.directory(upload) / "f"
    with uploads.receiving(upload, "f") as written:
        written.write(b"first")
        assert not file.exists()
        with pytest.raises(BackpressureError, match="another request"), uploads.receiving(upload, "f"):
            pass
    with pytest.raises(ZeroDivisionError), uploads.receiving(upload, "f") as written:
        written.write(b"second" + bytes(1 // 0))
    assert file.read_bytes() == b"first"
    assert len(list(uploads.directory(upload).iterdir())) == 2  # it, and what it is about
    uploads.end(upload)
    with pytest.raises(TinsmithError, match="cannot be written"), uploads.receiving(upload, "f"):
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
