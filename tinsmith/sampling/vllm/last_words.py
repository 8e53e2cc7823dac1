"""What to show of the log of a vLLM server that ended."""

import re

_LOG_TAIL = 2000
"""Bytes of a log that are shown of a server that ended."""
_ERROR_LINE = re.compile(rb"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*)$", re.MULTILINE)
"""The last line of a Python traceback, also behind the prefix of vLLM's logger."""
_MOST_ERRORS = 5


def last_words(content: bytes) -> str:
    """What a log says about the end of a server: its errors, the first of which is most often the reason, and its end."""
    tail = content[-_LOG_TAIL:]
    errors = list(dict.fromkeys(_ERROR_LINE.findall(content[:-_LOG_TAIL])))[:_MOST_ERRORS]
    return b"\n".join([*errors, *([b"..."] if errors else []), tail.strip()]).decode(errors="replace")
