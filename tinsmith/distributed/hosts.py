"""The hosts of the workers: workers on one host share its memory."""

from tinsmith.distributed.process_group import ProcessGroup


def workers_beside(group: ProcessGroup) -> list[int]:
    """Return the number of workers on each worker's host, itself included, by rank. To be called by all at the same time."""
    hosts = group.texts(group.place.host)
    return [hosts.count(host) for host in hosts]
