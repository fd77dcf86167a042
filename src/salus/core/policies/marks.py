"""Fair queueing among the members of one pool: the jobs of a GPU, the jobs of a user, or the users.

Each member has a mark: its service over weight so far. The floor is the smallest mark among the members that compete;
it never sinks. A member that arrives, or comes back after a pause, starts at the floor: it shares from then on, and
neither owes anything for the time before nor gets it back. (Start-time fair queueing; Linux's CFS does the same.)
"""

from __future__ import annotations

from typing import Generic, TypeVar

Member = TypeVar("Member", str, int)


class Marks(Generic[Member]):
    __slots__ = ("_competing", "_floor", "_marks", "_served_last")

    def __init__(self) -> None:
        self._marks: dict[Member, float] = {}
        self._served_last: dict[Member, int] = {}
        """The number of each member's last service; 0: it had none. Of members with equal marks, the one that was
        served last waits for the others: marks are made equal where several were kept out for longer than is owed."""
        self._competing: set[Member] = set()
        self._floor = 0.0

    def __getitem__(self, member: Member) -> float:
        return self._marks[member]

    @property
    def anyone_competes(self) -> bool:
        return bool(self._competing)

    def order(self, member: Member) -> tuple[float, int]:
        return self._marks[member], self._served_last[member]

    def floor(self) -> float:
        """The smallest mark among the members that compete. It never sinks, also when nobody competes."""
        if self._competing:
            self._floor = max(self._floor, min([self._marks[member] for member in self._competing]))
        return self._floor

    def arrive(self, member: Member) -> None:
        """A member that left with a mark ahead of the floor still has that mark."""
        self._marks[member] = max(self._marks.get(member, 0.0), self.floor())
        self._served_last.setdefault(member, 0)

    def come_back(self, member: Member, owed: float = 0.0) -> None:
        """After a pause. What the member fell behind by without a pause, it gets back as far as that is `owed`."""
        self._marks[member] = max(self._marks[member], self.floor() - owed)

    def ahead(self, member: Member) -> float:
        """Of the floor."""
        return max(0.0, self._marks[member] - self.floor())

    def push(self, member: Member, ahead: float) -> None:
        """The member is at least so far ahead of the floor."""
        self._marks[member] = max(self._marks[member], self.floor() + ahead)

    def compete(self, member: Member) -> None:
        self._competing.add(member)

    def rest(self, member: Member) -> None:
        self.floor()
        self._competing.discard(member)

    def serve(self, member: Member, service: float, number: int) -> None:
        self._marks[member] += service
        self._served_last[member] = number

    def forget(self, member: Member) -> None:
        del self._marks[member]
        del self._served_last[member]

    def forget_absent(self, present: set[Member]) -> None:
        """Of members that are gone, only those that are ahead of the floor need be remembered."""
        floor = self.floor()
        for member in [member for member, mark in self._marks.items() if member not in present and mark <= floor]:
            self.forget(member)
