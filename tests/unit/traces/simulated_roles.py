"""A simulated trainer and its servers. Each millisecond of waiting is assigned to the awaited peer's activity."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from engine_job import MAIN, PID, write_events

from profdeck.base.identity import Identity

UNIX_NS = 1_700_000_000 * 10**9
Label = tuple[str, str]
"""Awaited role and that role's activity."""
_MIN_IDLE, _MAX_TICKS, _NEVER = 8, 600, 10**9
SYNC = "update_weights"


class Burst(NamedTuple):
    """Uninterrupted work. Times are in milliseconds."""

    ticks: list[str]
    """Activity during each millisecond."""
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.ticks)


class Roles(NamedTuple):
    """Bursts of the trainer and of each server, sorted by time."""

    trainer: list[Burst]
    servers: list[list[Burst]]
    critic: list[Burst] = []  # noqa: RUF012 - never changed
    """Bursts of another trainer."""
    dead: frozenset[int] = frozenset()
    """Servers whose recordings end with their last burst."""


def simulate(seed: int, *, servers: int) -> Roles:
    """Simulate a job in which servers mostly work while the trainer is idle, but sometimes also while it works."""
    choice = random.Random(seed)  # noqa: S311 - reproducible jobs
    roles = Roles([], [[] for _ in range(servers)])
    now, ends = 0, set[int]()
    while now < _MAX_TICKS:
        work = choice.randint(3, 30)
        roles.trainer.append(Burst(["work"] * work, now))
        now += work
        idle = choice.randint(_MIN_IDLE, 120)
        for bursts in roles.servers:
            begin = now + choice.randint(-4 if choice.random() < 0.15 else 0, idle // 2)
            while begin < now + idle and choice.random() < 0.8:
                limit = now + idle + (10 if choice.random() < 0.15 else 0)
                begin = max(begin, bursts[-1].end + _MIN_IDLE if bursts else 0)
                ticks = _iterations(choice)[: max(0, limit - begin)]
                # If several servers finish at the same time, none of them counts as the last.
                while ticks and begin + len(ticks) in ends:
                    ticks.pop()
                if not ticks:
                    break
                ends.add(begin + len(ticks))
                bursts.append(Burst(ticks, begin))
                begin += len(ticks) + choice.randint(_MIN_IDLE, 20)
        now += idle
    roles.trainer.append(Burst(["work"] * 20, now))
    return roles


def simulate_many_roles(seed: int, *, servers: int) -> Roles:
    """Simulate a job with a second trainer, weight syncs, servers that die, and servers without any work."""
    choice = random.Random(seed)  # noqa: S311 - reproducible jobs
    roles = simulate(seed, servers=servers)
    ends = {burst.end for bursts in (roles.trainer, *roles.servers) for burst in bursts}
    critic: list[Burst] = []
    now = 0
    while now < _MAX_TICKS:
        now += choice.randint(_MIN_IDLE, 90)
        ticks = choice.randint(2, 40)
        if now + ticks not in ends:
            critic.append(Burst(["work"] * ticks, now))
            now += ticks
    for bursts in roles.servers:
        if choice.random() < 0.2:
            bursts.clear()
        for burst in bursts[1:-1]:
            if choice.random() < 0.4:  # a sync before, during or instead of the batches
                first = choice.choice((0, len(burst.ticks) // 2))
                # Without a prefill, the server would already have had the decode's requests during the preceding pause.
                last = choice.choice((first + 1, len(burst.ticks))) if first else len(burst.ticks)
                burst.ticks[first:last] = [SYNC] * (last - first)
    dead = frozenset(replica for replica, bursts in enumerate(roles.servers) if bursts and choice.random() < 0.2)
    for replica in dead:
        bursts = roles.servers[replica]
        del bursts[choice.randint(max(1, len(bursts) // 2), len(bursts)) :]
        while len(bursts) > 1 and {*bursts[-1].ticks} == {SYNC}:  # the account ends with the last batch
            bursts.pop()
    return roles._replace(critic=critic if choice.random() < 0.8 else [], dead=dead)


def simulate_disaggregated(seed: int, *, prefill_servers: int) -> Roles:
    """Simulate prefill servers, with one iteration per burst, and a decode server, which is last in the list."""
    choice = random.Random(seed)  # noqa: S311 - reproducible jobs
    roles = Roles([], [[] for _ in range(prefill_servers + 1)])
    ends = set[int]()
    for bursts in roles.servers[:-1]:
        now = choice.randint(0, 50)
        while now < _MAX_TICKS:
            length = choice.randint(1, 60)
            while now + length in ends:
                length += 1
            ends.add(now + length)
            bursts.append(Burst(["prefill"] * length, now))
            now += length + choice.choice((0, 0, 3, 40))
    now = choice.randint(0, 50)
    while now < _MAX_TICKS:
        roles.servers[-1].append(Burst(_iterations(choice), now))
        now = roles.servers[-1][-1].end + choice.randint(_MIN_IDLE, 90)
    return roles


def _iterations(choice: random.Random) -> list[str]:
    """Return a prefill iteration followed by the iterations that decode its requests."""
    ticks = ["prefill"] * choice.randint(1, 4)
    requests = choice.randint(1, 40)
    while requests > 0 and len(ticks) < 40:
        ticks += [f"decode {requests}"] * choice.randint(1, 5)
        requests -= choice.randint(1, 20)
    return ticks


def write(roles: Roles, run: Path) -> Path:
    """Write one trace per role, each with a different time origin."""
    for replica, bursts in enumerate(roles.servers):
        kind = None if roles.trainer else "prefill" if replica < len(roles.servers) - 1 else "decode"
        identity = Identity(role="rollout", replica=replica, worker_type=kind)
        events = [] if bursts else [("user_annotation", "idle", 0, 1)]
        for burst in bursts:
            first = 0
            for index, label in enumerate([*burst.ticks[1:], None], 1):
                if label != burst.ticks[first]:
                    requests = burst.ticks[first].removeprefix("decode ")
                    name = "execute_context_1(9)_generation_0(0)"
                    if requests.isdigit():
                        name = f"execute_context_0(0)_generation_{requests}({requests})"
                    elif requests == SYNC:
                        name = SYNC
                    begin, end = burst.begin + first, burst.begin + index
                    events += [("user_annotation", name, begin, end), ("cpu_op", "aten::mm", begin, end)]
                    first = index
        directory = run / f"step_000000/rollout/replica_{replica:03d}"
        _write(directory, events, identity, 7 * (replica + 1))
        if replica in roles.dead:
            (manifest,) = directory.glob("rank_*.json")
            content = json.loads(manifest.read_text())
            content["artifacts"][0]["anchors"].pop()
            manifest.write_text(json.dumps(content))
    if roles.critic:
        _write(run / "step_000000/critic", _trainer_events(roles.critic), Identity(role="critic"), 5)
    if not roles.trainer:
        return run
    _write(run / "step_000000/trainer", _trainer_events(roles.trainer), Identity(role="trainer"), 3)
    return run


def _trainer_events(bursts: list[Burst]) -> list[tuple[str, str, int, int]]:
    # Some steps start while the trainer is idle.
    borders = [burst.begin + (-3 if number % 3 == 2 else 0) for number, burst in enumerate(bursts)]
    steps = zip(borders, [*borders[1:], bursts[-1].end], strict=True)
    events = [("user_annotation", f"ProfilerStep#{number}", *step) for number, step in enumerate(steps)]
    return events + [("cpu_op", "aten::mm", burst.begin, burst.end) for burst in bursts]


def _write(directory: Path, rows: list[tuple[str, str, int, int]], identity: Identity, shift: int) -> None:
    """Write a trace whose clock is `shift` milliseconds ahead."""
    events = [
        {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": PID,
            "tid": MAIN,
            "ts": (begin + shift) * 1000.0,
            "dur": (end - begin) * 1000.0,
            "args": {},
        }
        for category, name, begin, end in rows
    ]
    write_events(directory, events, identity, UNIX_NS - shift * 1_000_000)


def waits_of_trainer(roles: Roles) -> Counter[Label]:
    """Return the trainer's waits in milliseconds."""
    labelled = {f"rollout/{replica}": bursts for replica, bursts in enumerate(roles.servers)}
    until = min((roles.servers[replica][-1].end for replica in roles.dead), default=_NEVER)
    return _waits(roles.trainer, labelled | {"critic": roles.critic}, gap="no batch", until=until)


def waits_of_server(roles: Roles, replica: int) -> Counter[Label]:
    """Return a server's waits in milliseconds."""
    peers = {"trainer": roles.trainer, "critic": roles.critic}
    return _waits(roles.servers[replica], peers, gap=None)


def waits_of_decode_server(roles: Roles) -> Counter[Label]:
    """Return how long the decode server waits for the prefill servers, in milliseconds."""
    waits: Counter[Label] = Counter()
    *prefill_servers, own = roles.servers
    for before, after in itertools.pairwise(own):
        ended = [
            (burst.end, replica, burst)
            for replica, bursts in enumerate(prefill_servers)
            for burst in bursts
            if before.end < burst.end <= after.begin
        ]
        for _, replica, burst in ended:
            if replica == max(ended)[1]:
                waits[f"rollout/{replica}", "prefill"] += burst.end - max(burst.begin, before.end)
    return +waits


def _waits(own: list[Burst], peers: dict[str, list[Burst]], gap: str | None, until: int = _NEVER) -> Counter[Label]:
    """Return the waits between bursts. Waits that end after `until` are unknown."""
    waits: Counter[Label] = Counter()
    for before, after in itertools.pairwise(own):
        if after.begin > until:
            continue
        idle = range(before.end, after.begin)
        busy = {tick: _busy(peers, tick) for tick in range(before.end - 1, after.begin + 1)}
        if any(_is_same_burst(busy, border, border + 1) for border in (idle.start - 1, idle.stop - 1)):
            continue  # a peer worked across the border
        follower: str | None = None
        current: tuple[str, Burst] | None = None
        for tick in reversed(idle):
            working = busy[tick]
            if current not in working:
                current = max(working, key=lambda item: item[1].end, default=None)
            if current is not None:
                follower = current[0]
                waits[follower, _name(current[1].ticks[tick - current[1].begin])] += 1
            elif gap and (follower or "").startswith("rollout") and any(map(busy.get, range(idle.start, tick))):
                waits[str(follower), gap] += 1
    return waits


def _busy(peers: dict[str, list[Burst]], tick: int) -> list[tuple[str, Burst]]:
    return [(name, burst) for name, bursts in peers.items() for burst in bursts if burst.begin <= tick < burst.end]


def _is_same_burst(busy: dict[int, list[tuple[str, Burst]]], first: int, second: int) -> bool:
    return any(item in busy[second] for item in busy[first])


def _name(activity: str) -> str:
    """Return the activity's name and its request count, as a range between powers of two."""
    stage, _, requests = activity.partition(" ")
    if not requests:
        return stage
    low = next(low for low in (32, 16, 8, 4, 2, 1) if low <= int(requests))
    return f"decode batch of {low}" + (f" to {2 * low - 1}" if low > 1 else "")
