"""Keeps the newest finished samples of each tenant for the console, within a size."""

import time
from collections import OrderedDict
from dataclasses import dataclass, replace

from tinsmith.console.samples import KeptSample
from tinsmith.errors import NotFoundError, quoted
from tinsmith.protocol.serving import Sample, SampleDone, SampleFailed


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
        reply, error = (ended.payload, "") if isinstance(ended, SampleDone) else (b"", ended.error)
        seconds = time.time() - found.sample.began_at
        found.sample = replace(found.sample, seconds=seconds, reply=reply, error=error)
        found.is_finished = True
        self._by_tenant[tenant].move_to_end(ended.request_id)
        self._count(tenant, len(reply))
        self._make_room()

    def newest(self, tenant: str | None, most: int) -> list[KeptSample]:
        """The newest finished samples of a tenant, or of all, the newest first."""
        found = list[KeptSample]()
        for name, samples in self._by_tenant.items():
            if tenant in (None, name):
                finished = (each.sample for each in reversed(samples.values()) if each.is_finished)
                found += [sample for _, sample in zip(range(most), finished, strict=False)]
        return sorted(found, key=lambda sample: -sample.began_at)[:most]

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
