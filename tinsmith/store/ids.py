"""The ids that clients see.

The SDK builds model ids itself, so their form is part of the protocol; the others are built the same way.

session            SESSION
model              SESSION:train:N
training operation SESSION:train:N/SEQ_ID      (create_model is 0)
sampling session   SESSION:sample:N
sample             SESSION:sample:N/SEQ_ID     (client k of a sampling session counts from k · 10**9)
sampled sequence   SESSION:sample:N/SEQ_ID/INDEX
answer             SESSION:answer:0/N          (to an application; the session is one of the server's own)
"""

_TRAIN = ":train:"
_SAMPLE = ":sample:"
_ANSWER = ":answer:"
_INFLIGHT = "/inflight"
_MAX_NUMBER = 2**63 - 1
_CLONE = 10**9


def model_id(session_id: str, model_seq_id: int) -> str:
    """The id of the `model_seq_id`-th model of a session."""
    return f"{session_id}{_TRAIN}{model_seq_id}"


def sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    """Base-model sessions and ephemeral snapshots share one counter."""
    return f"{session_id}{_SAMPLE}{sampling_session_seq_id}"


def answers_id(session_id: str) -> str:
    """The id of what the answers to applications belong to that are metered under one session."""
    return f"{session_id}{_ANSWER}0"


def inflight_id(model_id: str) -> str:
    """The id of a model's newest weights, for its inflight sampling sessions."""
    return f"{model_id}{_INFLIGHT}"


def is_inflight(weights_id: str) -> bool:
    """Whether `inflight_id` made this id."""
    return weights_id.endswith(_INFLIGHT)


def clone_of(seq_id: int) -> int:
    """The number of the client that sent a sample, within its sampling session."""
    return seq_id // _CLONE


def session_of(owned_id: str) -> str:
    """The session of a model, a sampling session, or what belongs to one."""
    for mark in (_TRAIN, _SAMPLE, _ANSWER):
        session_id, found, _ = owned_id.rpartition(mark)
        if found:
            return session_id
    return ""


def request_id(owner_id: str, seq_id: int) -> str:
    """The id of an operation, or of a sample."""
    return f"{owner_id}/{seq_id}"


def sequence_id(sample: str, index: int) -> str:
    """The id of a sampled sequence."""
    return f"{sample}/{index}"


def parse_request_id(text: str) -> tuple[str, int] | None:
    """(owner id, seq_id) of a request id; None for other texts."""
    owner_id, found, number = text.rpartition("/")
    if not found or not (number.isascii() and number.isdigit()) or len(number) > len(str(_MAX_NUMBER)):
        return None
    seq_id = int(number)
    return (owner_id, seq_id) if seq_id <= _MAX_NUMBER and str(seq_id) == number else None


def is_sample(text: str) -> bool:
    """Whether a request id is that of a sample."""
    return _SAMPLE in text
