"""The part of a file that a request asks for (RFC 9110, section 14): a download that broke off goes on where it was."""

import re
from collections.abc import Mapping

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.IGNORECASE)


def wanted_bytes(headers: Mapping[str, str], size: int) -> range:
    """Return the bytes of a file of `size` bytes to send; empty if the range lies outside of the file.

    The whole file, as the RFC allows, if the header is anything but a single range of bytes, or comes with If-Range: our replies have no
    ETag and no date that it could compare.
    """
    asked = _RANGE.fullmatch(headers.get("range", "").strip())
    if asked is None or "if-range" in headers or asked.group(1, 2) == ("", ""):
        return range(size)
    first, last = asked.groups()
    if not first:
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return range(size)
    return range(min(int(first), size), min(int(last) + 1, size) if last else size)
