"""Keeps the newest finished samples of each tenant for the console, within a size, and its last errors."""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

from tinsmith.console.samples import KeptSample
from tinsmith.errors import NotFoundError, quoted
from tinsmith.protocol.serving import Sample, SampleDone, SampleFailed

CANCELLED, LEFT = "it was cancelled by its client", "its client went away"
"""Ends of samples that are no errors."""
_KEPT_ERRORS = 8
"""Of each tenant."""


@dataclass
class _Kept:
    sample: KeptSample
    run: int
    is_finished: bool = False


class KeptSamples:
    """Samples by request id: those that run, and the newest that have finished."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._by_tenant: dict[str, OrderedDict[str, _Kept]] = {}
        """Oldest first."""
        self._sizes: dict[str, int] = {}
        self._failed: dict[str, deque[KeptSample]] = {}
        """The last that failed, by tenant, without what was asked."""
        self._running: dict[str, str] = {}
        """Tenants of those that run, by request id."""

    def begin(self, sample: Sample) -> None:
        """Note a sample that starts. One that is larger than all that is kept is passed over."""
        kept = KeptSample(
            sample.request_id,
            sample.tenant,
            sample.base_model,
            sample.weights_id,
            began_at=time.time(),
            seconds=0.0,
            body=sample.payload,
            reply=b"",
        )
        if kept.size > self._most_bytes:
            return
        self._forget(sample.tenant, sample.request_id)
        self._by_tenant.setdefault(sample.tenant, OrderedDict())[sample.request_id] = _Kept(kept, sample.run)
        self._running[sample.request_id] = sample.tenant
        self._count(sample.tenant, kept.size)
        self._make_room()

    def end(self, ended: SampleDone | SampleFailed) -> None:
        """Note how a sample has ended, if it is kept."""
        tenant = self._running.get(ended.request_id, "")
        samples = self._by_tenant.get(tenant)
        found = None if samples is None else samples.get(ended.request_id)
        if found is None or found.is_finished or found.run != ended.run:
            return
        del self._running[ended.request_id]
        if isinstance(ended, SampleDone):
            reply, error, category = ended.payload, "", ""
        else:
            reply, error, category = b"", ended.error, ended.category
        seconds = time.time() - found.sample.began_at
        found.sample = replace(found.sample, seconds=seconds, reply=reply, error=error, category=category)
        if error not in ("", CANCELLED, LEFT):
            self._failed.setdefault(tenant, deque(maxlen=_KEPT_ERRORS)).append(replace(found.sample, body=b""))
        found.is_finished = True
        self._by_tenant[tenant].move_to_end(ended.request_id)
        self._count(tenant, len(reply))
        self._make_room()

    def newest(self, tenant: str | None, most: int, most_bytes: int) -> list[KeptSample]:
        """The newest finished samples of a tenant, or of all, the newest first; so many, and of this size together."""
        found = list[KeptSample]()
        for name, samples in self._by_tenant.items():
            if tenant in (None, name):
                finished = (each.sample for each in reversed(samples.values()) if each.is_finished)
                found += [sample for _, sample in zip(range(most), finished, strict=False)]
        chosen = list[KeptSample]()
        for sample in sorted(found, key=lambda sample: -sample.began_at)[:most]:
            if sample.size <= most_bytes:  # one that is too large hides no others
                chosen.append(sample)
                most_bytes -= sample.size
        return chosen

    def failed(self, tenant: str | None) -> list[KeptSample]:
        """The samples of a tenant, or of all, that failed last, without bodies; the newest first."""
        found = [sample for name, samples in self._failed.items() if tenant in (None, name) for sample in samples]
        return sorted(found, key=lambda sample: -sample.ended_at)[:_KEPT_ERRORS]

    def find(self, tenant: str | None, request_id: str) -> KeptSample:
        """One of them. Raises NotFoundError."""
        for name, samples in self._by_tenant.items():
            found = samples.get(request_id) if tenant in (None, name) else None
            if found is not None and found.is_finished:
                return found.sample
        raise NotFoundError(
            f"sample {quoted(request_id)} is not kept: it is unknown, runs still, or newer ones have taken its place"
        )

    def _forget(self, tenant: str, request_id: str) -> None:
        samples = self._by_tenant.get(tenant)
        gone = None if samples is None else samples.pop(request_id, None)
        if gone is not None:
            self._running.pop(request_id, None)
            self._count(tenant, -gone.sample.size)

    def _count(self, tenant: str, size: int) -> None:
        self._bytes += size
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size

    def _make_room(self) -> None:
        """Forget the oldest of the tenant that has the most."""
        while self._bytes > self._most_bytes:
            tenant = max(self._sizes, key=lambda name: self._sizes[name])
            self._forget(tenant, next(iter(self._by_tenant[tenant])))
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant], self._sizes[tenant]
