"""Who may speak to a service besides the user who runs it: named users, members of named groups, or everybody."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass

from salus.errors import RequestRejected

ROOT = 0


@dataclass(frozen=True)
class Access:
    everybody: bool = False
    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    @property
    def for_others(self) -> bool:
        return self.everybody or bool(self.users or self.groups)

    def lets_in(self, uid: int) -> bool:
        """Groups are looked up each time: whoever joins one is let in without a restart of the service."""
        if uid in (os.getuid(), ROOT) or self.everybody or uid in self.users:
            return True
        return bool(self.groups) and not self.groups.isdisjoint(groups_of(uid))


NOBODY_ELSE = Access()


def access_of(names: Iterable[str]) -> Access:
    """Of names as an administrator writes them: `alice`, `1001`, `@students`, `all`."""
    users, groups, everybody = set(), set(), False
    for name in names:
        if name == "all":
            everybody = True
        elif name.startswith("@"):
            groups.add(_group(name[1:]))
        else:
            users.add(_user(name))
    return Access(everybody, frozenset(users), frozenset(groups))


def groups_of(uid: int) -> list[int]:
    """The groups of a user, by number; none of a user that the machine does not know."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return []
    return os.getgrouplist(user.pw_name, user.pw_gid)


def _user(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise RequestRejected(
            f"there is no user {name!r} here; write names separated by commas, @NAME for a group, or all"
        ) from None


def _group(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise RequestRejected(f"there is no group {name!r} here; write groups as @NAME, users as NAME") from None
