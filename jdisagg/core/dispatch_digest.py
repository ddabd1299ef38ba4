"""A running digest of what a process dispatched, so that the processes of a group can prove that they are in step."""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 8
EVERY = 32  # steps between two comparisons


class RunningDigest:
    """Of everything that was noted so far, in its order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def note(self, text: str) -> None:
        self._hash.update(f"{len(text)}:{text}".encode())

    @property
    def now(self) -> str:
        return self._hash.copy().hexdigest()


class DigestComparison:
    """Digests of the same steps by several processes, in whatever order they come. Only the latest steps are kept."""

    def __init__(self, kept: int = 1024) -> None:
        self._kept = kept
        self._ours: dict[int, str] = {}
        self._early: dict[int, dict[int, str]] = {}  # of ranks that were here first

    def ours(self, step: int, digest: str) -> str | None:
        """Our own after this step; why a process is out of step with us, if one is."""
        self._ours[step] = digest
        if len(self._ours) > self._kept:
            del self._ours[next(iter(self._ours))]
        found = [self._compared(rank, step, other) for rank, other in self._early.pop(step, {}).items()]
        return next((each for each in found if each is not None), None)

    def theirs(self, rank: int, step: int, digest: str) -> str | None:
        """That of another process after this step."""
        if step not in self._ours:
            if len(self._early) < self._kept:
                self._early.setdefault(step, {})[rank] = digest
            return None
        return self._compared(rank, step, digest)

    def _compared(self, rank: int, step: int, digest: str) -> str | None:
        own = self._ours[step]
        if own == digest:
            return None
        return f"member {rank} is out of step: at step {step} its digest of what it dispatched is {digest}, ours {own}"
