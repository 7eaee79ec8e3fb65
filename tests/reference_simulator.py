"""A plain simulator of one step, to check the fast one against.

Written from the rules alone (the docstrings of pptune.executors), as a discrete-event simulation:
ranks are programs of small instructions, messages and links are objects, and a heap of events moves
the clock. It shares no code with pptune.simulator beyond the cost and order values it is given.
"""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pptune.executors import Executor
from pptune.schedules import Action, Order, Work
from pptune.simulator import Costs

Name = tuple[str, int, int]
"""A message: "F" or "B", the stage that produces it, the micro-batch."""


class Deadlock(Exception):
    """Nothing can happen any more, but ranks have not finished."""


@dataclass
class Message:
    sender: int
    receiver: int
    latency: float
    wire: float
    produced: float | None = None
    send_posted: bool = False
    receive_posted: bool = False
    started: bool = False
    arrived: float | None = None
    waiting: list[int] = field(default_factory=list)


@dataclass
class RankResult:
    busy: float = 0.0
    bubble: float = 0.0
    exposed: float = 0.0
    overhead: float = 0.0
    finish: float = 0.0


@dataclass
class Result:
    step: float
    ranks: list[RankResult]
    start: dict[tuple[int, Action], float]
    end: dict[tuple[int, Action], float]
    arrived: dict[tuple[int, int, Work, int], float]
    """By the rank and action that used the message."""

    @property
    def longest_span(self) -> float:
        spans = defaultdict(list)
        for rank, action in self.start:
            spans[rank] += [self.start[rank, action], self.end[rank, action]]
        return max(max(times) - min(times) for times in spans.values())


def simulate(order: Order, costs: Costs, executor: Executor) -> Result:
    """Play `order`; raises Deadlock."""
    return Step(order, costs, executor).run()


def direction(action: Action) -> str:
    return "F" if action.work == Work.FORWARD else "B"


class Step:
    def __init__(self, order: Order, costs: Costs, executor: Executor) -> None:
        self.lists = [order.actions(rank) for rank in range(order.num_ranks)]
        pairs = order.pairs.tolist()
        self.pairs = [
            pairs[int(order.offsets[rank]) : int(order.offsets[rank + 1])]
            for rank in range(order.num_ranks)
        ]
        self.num_stages = order.num_stages
        self.home = {
            action.stage: rank for rank, actions in enumerate(self.lists) for action in actions
        }
        self.costs = costs
        self.executor = executor
        self.messages: dict[Name, Message] = {}
        self.links: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = itertools.count()
        self.now = 0.0
        for actions in self.lists:
            for action in actions:
                self._make_message(action)
        if executor is Executor.IDEAL:
            for message in self.messages.values():
                message.receive_posted = True
        self.programs = {
            Executor.IDEAL: self._ideal,
            Executor.TORCH_RUNTIME: self._torch_runtime,
            Executor.TORCH_RUNTIME_SERIAL: self._torch_runtime,
            Executor.TORCH_1F1B: self._torch_1f1b,
            Executor.MEGATRON_EXPOSED: self._megatron_exposed,
            Executor.MEGATRON_OVERLAP: self._megatron_overlap,
        }[executor]()
        self.streams: dict[int, list[Message]] = defaultdict(list)
        if executor is Executor.TORCH_RUNTIME_SERIAL:
            for rank, program in enumerate(self.programs):
                for kind, *values in program:
                    if kind in ("send", "receive"):
                        self.streams[rank].append(self.messages[values[0]])
        self.counters = [0] * len(self.lists)
        self.since = [0.0] * len(self.lists)
        self.results = [RankResult() for _ in self.lists]
        self.start: dict[tuple[int, Action], float] = {}
        self.end: dict[tuple[int, Action], float] = {}

    # Messages.

    def _target(self, action: Action) -> int | None:
        """The stage that takes this action's output, on another rank."""
        if action.work == Work.BACKWARD_WEIGHT:
            return None
        target = action.stage + (1 if action.work == Work.FORWARD else -1)
        if not 0 <= target < self.num_stages or self.home[target] == self.home[action.stage]:
            return None
        return target

    def output(self, action: Action) -> Name | None:
        if self._target(action) is None:
            return None
        return direction(action), action.stage, action.microbatch

    def needed(self, action: Action) -> Name | None:
        if action.work == Work.BACKWARD_WEIGHT:
            return None
        source = action.stage - (1 if action.work == Work.FORWARD else -1)
        name = direction(action), source, action.microbatch
        return name if name in self.messages else None

    def _hops(self, name: Name):
        kind, stage, _ = name
        boundary = stage if kind == "F" else stage - 1
        hops = self.costs.forward_hops if kind == "F" else self.costs.backward_hops
        return hops, boundary

    def _make_message(self, action: Action) -> None:
        target = self._target(action)
        if target is None:
            return
        name = direction(action), action.stage, action.microbatch
        hops, boundary = self._hops(name)
        self.messages[name] = Message(
            sender=self.home[action.stage],
            receiver=self.home[target],
            latency=float(hops.latency_s[boundary]),
            wire=float(hops.wire_s[boundary]),
        )

    def _try_link(self, link: tuple[int, int]) -> None:
        """Start the first message of a link's queue once both ends have posted it."""
        if self.executor is Executor.TORCH_RUNTIME_SERIAL:
            self._try_streams()
            return
        queue = self.links[link]
        if not queue or not queue[0].receive_posted:
            return
        if self.link_free[link] > self.now:
            self._at(self.link_free[link], lambda: self._try_link(link))
            return
        message = queue.pop(0)
        self.link_free[link] = self.now + message.wire
        self._at(self.now + message.wire + message.latency, lambda: self._arrive(message))
        self._try_link(link)

    def _try_streams(self) -> None:
        """Start every message that is next for both its ranks and posted by both."""
        for rank in range(len(self.lists)):
            if not self.streams[rank]:
                continue
            message = self.streams[rank][0]
            peer = message.receiver if message.sender == rank else message.sender
            ready = message.send_posted and message.receive_posted and not message.started
            if ready and self.streams[peer][0] is message:
                message.started = True
                arrival = self.now + (message.wire + message.latency)
                self._at(arrival, lambda message=message: self._arrive(message))

    def _arrive(self, message: Message) -> None:
        message.arrived = self.now
        if message.started:
            for rank in (message.sender, message.receiver):
                self.streams[rank].pop(0)
            self._try_streams()
        waiting, message.waiting = message.waiting, []
        for rank in waiting:
            self._go_on(rank)

    # Programs: one list of instructions per rank.

    def _work(self, rank: int, at: int) -> list[tuple]:
        """The instructions of an action whose input is there."""
        action = self.lists[rank][at]
        needed = self.needed(action)
        return ([("occupied", needed)] if needed else []) + [("work", action)]

    def _ideal(self) -> list[list[tuple]]:
        programs = []
        for rank, actions in enumerate(self.lists):
            program = []
            for at, action in enumerate(actions):
                if needed := self.needed(action):
                    program.append(("wait", needed, None))
                program += self._work(rank, at)
                if output := self.output(action):
                    program.append(("send", output))
            programs.append(program)
        return programs

    def _torch_runtime(self) -> list[list[tuple]]:
        """Receives where torch's lowering puts them; sends after their producer, for a pair after
        both; the step's end waits for no send."""
        programs = []
        for rank, entries in enumerate(self.lowered()):
            program = []
            for kind, value in entries:
                if kind != "work":
                    program.append((kind, value))
                    continue
                if needed := self.needed(self.lists[rank][value]):
                    program.append(("wait", needed, None))
                program += self._work(rank, value)
            programs.append(program)
        return programs

    def lowered(self) -> list[list[tuple]]:
        """What torch's lowering makes of the order, walked tick by tick as torch does."""
        entries = [deque(self._with_extras(rank)) for rank in range(len(self.lists))]
        lowered: list[list[tuple]] = [[] for _ in self.lists]
        posted: list[set[Name]] = [set() for _ in self.lists]
        while any(entries):
            progress = False
            for rank, waiting in enumerate(entries):
                if not waiting:
                    continue
                group = waiting[0]
                actions = [self.lists[rank][at] for at in group]
                if any(self.needed(a) and self.needed(a) not in posted[rank] for a in actions):
                    continue
                lowered[rank] += [("work", at) for at in group]
                for action in actions:
                    if output := self.output(action):
                        receiver = self.messages[output].receiver
                        lowered[rank].append(("send", output))
                        lowered[receiver].append(("receive", output))
                        posted[receiver].add(output)
                waiting.popleft()
                progress = True
            if not progress:
                raise Deadlock
        return lowered

    def _with_extras(self, rank: int) -> list[list[int]]:
        """Groups of positions: an action, a pair, or nothing for an entry that torch adds."""
        actions = self.lists[rank]
        groups: list[list[int]] = []
        at = 0
        while at < len(actions):
            size = 2 if self.pairs[rank][at] else 1
            groups.append(list(range(at, at + size)))
            at += size
        # How many stages a list still has from each group on, so as not to look for more.
        num_left: list[int] = []
        seen: set[int] = set()
        for group in reversed(groups):
            seen |= {actions[at].stage for at in group}
            num_left.append(len(seen))
        num_left.reverse()
        with_shards: list[list[int]] = []
        active: set[int] = set()
        for index, group in enumerate(groups):
            upcoming: list[int] = []
            for later in range(index, len(groups)):
                for stage in (actions[at].stage for at in groups[later]):
                    if stage not in upcoming:
                        upcoming.append(stage)
                if len(upcoming) >= min(3, num_left[index]):
                    break
            with_shards += [[]] * (len(active - set(upcoming)) + len(set(upcoming) - active))
            active = set(upcoming)
            with_shards.append(group)
        num_microbatches = 1 + max(action.microbatch for action in actions)
        done: dict[int, int] = defaultdict(int)
        result = []
        for group in with_shards:
            result.append(group)
            for action in (actions[at] for at in group):
                if action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
                    done[action.stage] += 1
                    if done[action.stage] == num_microbatches:
                        result.append([])
        return result

    def _torch_1f1b(self) -> list[list[tuple]]:
        """Schedule1F1B: exchange with the other direction and wait for both; between two actions of
        one direction send, go on, and wait for the send after the next action."""
        programs = []
        for rank, actions in enumerate(self.lists):
            program: list[tuple] = []
            unfinished: Name | None = None
            fused: Name | None = None
            for at, action in enumerate(actions):
                needed = self.needed(action)
                if needed:
                    program.append(("receive", needed))
                program.append(("wait", needed, fused))
                program += self._work(rank, at)
                if unfinished:
                    program.append(("wait", None, unfinished))
                unfinished = fused = None
                if output := self.output(action):
                    program.append(("send", output))
                    last = at + 1 == len(actions)
                    if not last and direction(actions[at + 1]) != direction(action):
                        fused = output
                    else:
                        unfinished = output
            program.append(("wait", None, unfinished))
            programs.append(program)
        return programs

    def _megatron_exposed(self) -> list[list[tuple]]:
        """Blocking exchanges: with the other direction both at once, else send and then receive."""
        programs = []
        for rank, actions in enumerate(self.lists):
            program: list[tuple] = []
            fused: Name | None = None
            for at, action in enumerate(actions):
                needed = self.needed(action)
                if needed:
                    program.append(("receive", needed))
                program.append(("wait", needed, fused))
                program += self._work(rank, at)
                fused = None
                if output := self.output(action):
                    program.append(("send", output))
                    last = at + 1 == len(actions)
                    if not last and direction(actions[at + 1]) != direction(action):
                        fused = output
                    else:
                        program.append(("wait", None, output))
            programs.append(program)
        return programs

    def _megatron_overlap(self) -> list[list[tuple]]:
        """Exchanges overlap with the next action from a rank's last warmup forward to its last
        forward: sends are not waited for, and each posts the receive of the next action of its own
        direction. Outside of that an exchange blocks until both messages are there."""
        programs = []
        for rank, actions in enumerate(self.lists):
            directions = [direction(action) for action in actions]
            first_backward = directions.index("B")
            last_forward = max(at for at, kind in enumerate(directions) if kind == "F")
            steady = range(first_backward - 1, last_forward + 1)
            posts: dict[int, list[Name]] = defaultdict(list)
            previous: dict[str, int] = {"B": first_backward - 2}
            for at, action in enumerate(actions):
                if action.work == Work.BACKWARD_WEIGHT:
                    continue
                early = previous.get(directions[at], -1)
                is_early = early in steady or (at == first_backward and early >= -1)
                if needed := self.needed(action):
                    posts[early if is_early else at - 1].append(needed)
                previous[directions[at]] = at
            program: list[tuple] = [("receive", name) for name in posts[-1]]
            fused: Name | None = None
            for at, action in enumerate(actions):
                program.append(("wait", self.needed(action), fused))
                program += self._work(rank, at)
                fused = None
                if output := self.output(action):
                    program.append(("send", output))
                    if at not in steady:
                        fused = output
                program += [("receive", name) for name in posts[at]]
            program.append(("wait", None, fused))
            programs.append(program)
        return programs

    # The event loop.

    def _at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.sequence), call))

    def run(self) -> Result:
        for rank in range(len(self.lists)):
            self._at(0.0, lambda rank=rank: self._go_on(rank))
        while self.events:
            self.now, _, call = heapq.heappop(self.events)
            call()
        if any(
            counter < len(program)
            for counter, program in zip(self.counters, self.programs, strict=True)
        ):
            raise Deadlock
        step = max(result.finish for result in self.results)
        for result in self.results:
            result.bubble += step - result.finish
        arrived = {
            (rank, *action): self.messages[needed].arrived
            for rank, actions in enumerate(self.lists)
            for action in actions
            if (needed := self.needed(action))
        }
        return Result(step, self.results, self.start, self.end, arrived)

    def _go_on(self, rank: int) -> None:
        """Run a rank's program until it needs time to pass or a message to arrive."""
        program, result = self.programs[rank], self.results[rank]
        while self.counters[rank] < len(program):
            kind, *values = program[self.counters[rank]]
            if kind == "receive":
                message = self.messages[values[0]]
                message.receive_posted = True
                self.counters[rank] += 1
                self._try_link((message.sender, message.receiver))
            elif kind == "wait":
                if not self._waited(rank, *values):
                    return
                self.counters[rank] += 1
                self.since[rank] = self.now
            else:
                self._begin(rank, kind, values[0])
                return
        result.finish = self.now

    def _begin(self, rank: int, kind: str, value: object) -> None:
        """Let an instruction that takes the rank's time begin."""
        result = self.results[rank]
        if kind == "work":
            stage, work, _ = value
            seconds = self._seconds(work)[stage]
            overhead = float(self.costs.overhead_s[work])
            self.start[rank, value] = self.now
            result.busy += seconds
            result.overhead += overhead
            self._at(self.now + seconds + overhead, lambda: self._end_work(rank, value))
            return
        hops, boundary = self._hops(value)
        part = hops.send_occupied_s if kind == "send" else hops.receive_occupied_s
        seconds = float(part[boundary])
        result.exposed += seconds
        self._at(self.now + seconds, lambda: self._end_occupied(rank, kind, value))

    def _seconds(self, work: Work) -> list[float]:
        costs = self.costs
        return {
            Work.FORWARD: costs.forward_s,
            Work.BACKWARD: costs.backward_s,
            Work.BACKWARD_INPUT: costs.backward_input_s,
            Work.BACKWARD_WEIGHT: costs.backward_weight_s,
        }[work]

    def _end_work(self, rank: int, action: Action) -> None:
        self.end[rank, action] = self.now
        if output := self.output(action):
            self.messages[output].produced = self.now
        self._next(rank)

    def _end_occupied(self, rank: int, kind: str, name: Name) -> None:
        if kind == "send":
            message = self.messages[name]
            message.send_posted = True
            self.links[message.sender, message.receiver].append(message)
            self._try_link((message.sender, message.receiver))
        self._next(rank)

    def _next(self, rank: int) -> None:
        self.counters[rank] += 1
        self.since[rank] = self.now
        self._go_on(rank)

    def _waited(self, rank: int, needed: Name | None, sent: Name | None) -> bool:
        """Whether both messages are there; counts the time since the rank began to wait."""
        names = [name for name in (needed, sent) if name is not None]
        for name in names:
            message = self.messages[name]
            if message.arrived is None:
                if rank not in message.waiting:
                    message.waiting.append(rank)
                return False
        begun = self.since[rank]
        produced = begun
        if needed is not None:
            produced = min(max(begun, self.messages[needed].produced), self.now)
        self.results[rank].bubble += produced - begun
        self.results[rank].exposed += self.now - produced
        return True
