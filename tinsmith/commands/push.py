"""`tinsmith push-hf`: an export in a repository of a hub."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from tinsmith.errors import ConfigError, printable
from tinsmith.http_client import open_url, why_unanswered

_ANSWER_S = 20.0
"""Seconds that a hub may take to answer."""

_HTTP_ERROR: type[Exception] = next(each for each in HfHubHTTPError.__mro__ if each.__name__ == "HTTPError")
"""Errors of the HTTP client of the hub's library, httpx or its successor, where there is no reply."""


@contextmanager
def _refused(repository: str) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else "no answer"
        remedy = (
            "set HF_TOKEN to a token that may write there" if code in (401, 403, 404) else "see to that and push again"
        )
        said = printable(" ".join((error.server_message or str(error)).split()))
        raise ConfigError(f"{repository}: the hub refuses (HTTP {code}): {said}; {remedy}") from error
    except _HTTP_ERROR as error:
        raise ConfigError(
            f"{repository}: the connection to the hub at {HfApi().endpoint} broke: {error}; push again"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"{repository!r} names no repository: give it as OWNER/NAME") from error


def require_repository(repository: str, public: bool) -> None:
    """Make the repository unless it is there. Raises ConfigError if this user may not write to it."""
    hub = HfApi().endpoint
    try:
        open_url(hub, _ANSWER_S).close()
    except HTTPError as error:  # it is there
        error.close()
    except OSError as error:
        raise ConfigError(
            f"{repository}: the hub at {hub} does not answer: {why_unanswered(error)}; is HF_ENDPOINT right?"
        ) from error
    with _refused(repository):
        HfApi().create_repo(repository, private=not public, exist_ok=True)


def push(data_dir: Path, path: str, repository: str, merge: bool, gguf: bool, base_model: str | None) -> str:
    """Export a checkpoint and upload it as one commit; returns the URL of the commit. Raises as `export_checkpoint`."""
    from tinsmith.commands.exchange import export_checkpoint  # which takes seconds

    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / "export"
        export_checkpoint(data_dir, path, exported, merge, gguf, base_model)
        with _refused(repository):
            commit = HfApi().upload_folder(
                repo_id=repository, folder_path=exported, commit_message=f"Upload {path} with Tinsmith"
            )
    return str(commit.commit_url)
