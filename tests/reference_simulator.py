"""A plain simulator of one step, to check the fast one against.

Written from the rules alone (the docstrings of pptune.executors), as a discrete-event simulation:
ranks are programs of small instructions, messages and links are objects, and a heap of events moves
the clock. It shares no code with pptune.simulator beyond the cost and order values it is given.
"""

import gc
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


@dataclass(slots=True, eq=False)
class Message:
    name: Name
    sender: int
    receiver: int
    latency: float
    wire: float
    send_occupied: float
    receive_occupied: float
    produced: float | None = None
    send_posted: bool = False
    receive_posted: bool = False
    started: bool = False
    arrived: float | None = None
    waiting: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Task:
    """An action in its rank's list, what it takes and when it ran."""

    action: Action
    direction: str
    seconds: float
    overhead: float
    input: Message | None = None
    """The message it needs."""
    output: Message | None = None
    """The message it makes."""
    start: float = 0.0
    end: float = 0.0


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
    lists: list[list[Task]]
    """Every rank's actions, with their times."""

    @property
    def longest_span(self) -> float:
        return max(
            max(task.end for task in tasks) - min(task.start for task in tasks)
            for tasks in self.lists
        )


def simulate(order: Order, costs: Costs, executor: Executor) -> Result:
    """Play `order`; raises Deadlock."""
    gc.disable()  # It would look through every message and task again and again.
    try:
        return Player(order, costs, executor).run()
    finally:
        gc.enable()


class Player:
    def __init__(self, order: Order, costs: Costs, executor: Executor) -> None:
        self.lists = tasks_of(order, costs)
        pairs = order.pairs.tolist()
        self.pairs = [
            pairs[int(order.offsets[rank]) : int(order.offsets[rank + 1])]
            for rank in range(order.num_ranks)
        ]
        self.executor = executor
        self.links: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = itertools.count()
        self.now = 0.0
        self.programs = {
            Executor.IDEAL: self._ideal,
            Executor.TORCH_RUNTIME: self._torch_runtime,
            Executor.TORCH_RUNTIME_SERIAL: self._torch_runtime,
            Executor.TORCH_1F1B: self._torch_1f1b,
            Executor.MEGATRON_EXPOSED: self._megatron_exposed,
            Executor.MEGATRON_OVERLAP: self._megatron_overlap,
        }[executor]()
        self.streams: dict[int, deque[Message]] = defaultdict(deque)
        if executor is Executor.TORCH_RUNTIME_SERIAL:
            for rank, program in enumerate(self.programs):
                self.streams[rank].extend(
                    values[0] for kind, *values in program if kind in ("send", "receive")
                )
        self.counters = [0] * len(self.lists)
        self.since = [0.0] * len(self.lists)
        self.results = [RankResult() for _ in self.lists]

    # Messages.

    def _try_link(self, link: tuple[int, int]) -> None:
        """Start the first message of a link's queue once both ends have posted it."""
        if self.executor is Executor.TORCH_RUNTIME_SERIAL:
            self._try_streams(link)
            return
        queue = self.links[link]
        if not queue or not queue[0].receive_posted:
            return
        if self.link_free[link] > self.now:
            self._at(self.link_free[link], lambda: self._try_link(link))
            return
        message = queue.popleft()
        self.link_free[link] = self.now + message.wire
        self._at(self.now + message.wire + message.latency, lambda: self._arrive(message))
        self._try_link(link)

    def _try_streams(self, ranks: tuple[int, int]) -> None:
        """Start the message that is next for one of `ranks`, where it is next for its peer too and
        posted by both."""
        for rank in ranks:
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
            ends = (message.sender, message.receiver)
            for rank in ends:
                self.streams[rank].popleft()
            self._try_streams(ends)
        waiting, message.waiting = message.waiting, []
        for rank in waiting:
            self._go_on(rank)

    # Programs: one list of instructions per rank.

    @staticmethod
    def _work(task: Task) -> list[tuple]:
        """The instructions of an action whose input is there."""
        occupied = [("occupied", task.input)] if task.input else []
        return [*occupied, ("work", task)]

    def _ideal(self) -> list[list[tuple]]:
        programs = []
        for tasks in self.lists:
            program = []
            for task in tasks:
                if task.input:
                    task.input.receive_posted = True
                    program.append(("wait", task.input, None))
                program += self._work(task)
                if task.output:
                    program.append(("send", task.output))
            programs.append(program)
        return programs

    def _torch_runtime(self) -> list[list[tuple]]:
        """Receives where torch's lowering puts them; sends after their producer, for a pair after
        both; the step's end waits for no send."""
        programs = []
        for entries in self.lowered():
            program = []
            for kind, value in entries:
                if kind != "work":
                    program.append((kind, value))
                    continue
                if value.input:
                    program.append(("wait", value.input, None))
                program += self._work(value)
            programs.append(program)
        return programs

    def lowered(self) -> list[list[tuple]]:
        """What torch's lowering makes of the order, walked tick by tick as torch does."""
        entries = [deque(self._with_extras(rank)) for rank in range(len(self.lists))]
        lowered: list[list[tuple]] = [[] for _ in self.lists]
        posted: set[Message] = set()
        while any(entries):
            progress = False
            for rank, waiting in enumerate(entries):
                if not waiting:
                    continue
                group = waiting[0]
                if any(task.input and task.input not in posted for task in group):
                    continue
                lowered[rank] += [("work", task) for task in group]
                for task in group:
                    if output := task.output:
                        lowered[rank].append(("send", output))
                        lowered[output.receiver].append(("receive", output))
                        posted.add(output)
                waiting.popleft()
                progress = True
            if not progress:
                raise Deadlock
        return lowered

    def _with_extras(self, rank: int) -> list[list[Task]]:
        """Groups of actions: one, a pair, or nothing for an entry that torch adds."""
        tasks = self.lists[rank]
        groups: list[list[Task]] = []
        at = 0
        while at < len(tasks):
            size = 2 if self.pairs[rank][at] else 1
            groups.append(tasks[at : at + size])
            at += size
        with_shards: list[list[Task]] = []
        active: set[int] = set()
        for group, upcoming in zip(groups, next_stages(groups), strict=True):
            with_shards += [[]] * len(active ^ upcoming)
            active = upcoming
            with_shards.append(group)
        num_microbatches = 1 + max(task.action.microbatch for task in tasks)
        done: dict[int, int] = defaultdict(int)
        result = []
        for group in with_shards:
            result.append(group)
            for action in (task.action for task in group):
                if action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
                    done[action.stage] += 1
                    if done[action.stage] == num_microbatches:
                        result.append([])
        return result

    def _torch_1f1b(self) -> list[list[tuple]]:
        """Schedule1F1B: between two actions of one direction it sends, goes on, and waits for the
        send after the next action."""
        return self._exchanging(blocks=False)

    def _megatron_exposed(self) -> list[list[tuple]]:
        """Blocking exchanges: between two actions of one direction it sends, and then receives."""
        return self._exchanging(blocks=True)

    def _exchanging(self, *, blocks: bool) -> list[list[tuple]]:
        """An exchange follows each action; with the other direction, both messages at once."""
        programs = []
        for tasks in self.lists:
            program: list[tuple] = []
            unfinished: Message | None = None
            fused: Message | None = None
            for task, following in itertools.pairwise([*tasks, None]):
                if task.input:
                    program.append(("receive", task.input))
                program.append(("wait", task.input, fused))
                program += self._work(task)
                if unfinished:
                    program.append(("wait", None, unfinished))
                unfinished = fused = None
                if task.output:
                    program.append(("send", task.output))
                    if following and following.direction != task.direction:
                        fused = task.output
                    elif blocks:
                        program.append(("wait", None, task.output))
                    else:
                        unfinished = task.output
            program.append(("wait", None, unfinished))
            programs.append(program)
        return programs

    def _megatron_overlap(self) -> list[list[tuple]]:
        """Exchanges overlap with the next action from a rank's last warmup forward to its last
        forward: sends are not waited for, and each posts the receive of the next action of its own
        direction. Outside of that an exchange blocks until both messages are there."""
        programs = []
        for tasks in self.lists:
            directions = [task.direction for task in tasks]
            first_backward = directions.index("B")
            last_forward = max(at for at, kind in enumerate(directions) if kind == "F")
            steady = range(first_backward - 1, last_forward + 1)
            posts: dict[int, list[Message]] = defaultdict(list)
            previous: dict[str, int] = {"B": first_backward - 2}
            for at, task in enumerate(tasks):
                if task.action.work == Work.BACKWARD_WEIGHT:
                    continue
                early = previous.get(task.direction, -1)
                is_early = early in steady or (at == first_backward and early >= -1)
                if task.input:
                    posts[early if is_early else at - 1].append(task.input)
                previous[task.direction] = at
            program: list[tuple] = [("receive", message) for message in posts[-1]]
            fused: Message | None = None
            for at, task in enumerate(tasks):
                program.append(("wait", task.input, fused))
                program += self._work(task)
                fused = None
                if task.output:
                    program.append(("send", task.output))
                    if at not in steady:
                        fused = task.output
                program += [("receive", message) for message in posts[at]]
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
        return Result(step, self.results, self.lists)

    def _go_on(self, rank: int) -> None:
        """Run a rank's program until it needs time to pass or a message to arrive."""
        program, result = self.programs[rank], self.results[rank]
        while self.counters[rank] < len(program):
            kind, *values = program[self.counters[rank]]
            if kind == "receive":
                message = values[0]
                message.receive_posted = True
                self.counters[rank] += 1
                self._try_link((message.sender, message.receiver))
            elif kind == "wait":
                if not self._waited(rank, *values):
                    return
                self.counters[rank] += 1
                self.since[rank] = self.now
            elif self._takes_time(rank, kind, values[0]):
                return
        result.finish = self.now

    def _takes_time(self, rank: int, kind: str, value: Task | Message) -> bool:
        """Begin an instruction that may take the rank's time; False if it has ended at once."""
        result = self.results[rank]
        if isinstance(value, Task):
            value.start = self.now
            result.busy += value.seconds
            result.overhead += value.overhead
            self._at(self.now + value.seconds + value.overhead, lambda: self._end_work(rank, value))
            return True
        seconds = value.send_occupied if kind == "send" else value.receive_occupied
        if seconds == 0.0:
            self._end_occupied(rank, kind, value)
            return False
        result.exposed += seconds
        self._at(self.now + seconds, lambda: self._go_on_after(rank, kind, value))
        return True

    def _end_work(self, rank: int, task: Task) -> None:
        task.end = self.now
        if task.output:
            task.output.produced = self.now
        self._next(rank)
        self._go_on(rank)

    def _end_occupied(self, rank: int, kind: str, message: Message) -> None:
        if kind == "send":
            message.send_posted = True
            self.links[message.sender, message.receiver].append(message)
            self._try_link((message.sender, message.receiver))
        self._next(rank)

    def _go_on_after(self, rank: int, kind: str, message: Message) -> None:
        self._end_occupied(rank, kind, message)
        self._go_on(rank)

    def _next(self, rank: int) -> None:
        self.counters[rank] += 1
        self.since[rank] = self.now

    def _waited(self, rank: int, needed: Message | None, sent: Message | None) -> bool:
        """Whether both messages are there; counts the time since the rank began to wait."""
        for message in (needed, sent):
            if message is not None and message.arrived is None:
                if rank not in message.waiting:
                    message.waiting.append(rank)
                return False
        begun = self.since[rank]
        produced = begun
        if needed is not None:
            produced = min(max(begun, needed.produced), self.now)
        self.results[rank].bubble += produced - begun
        self.results[rank].exposed += self.now - produced
        return True


def tasks_of(order: Order, costs: Costs) -> list[list[Task]]:
    """Every rank's actions with what they take and the messages between ranks."""
    seconds = [
        None if times is None else times.tolist()
        for times in (costs.forward_s, costs.backward_s, costs.backward_input_s,
                      costs.backward_weight_s)
    ]  # fmt: skip
    overhead = costs.overhead_s.tolist()
    hops = {
        direction: [
            part.tolist()
            for part in (hop.latency_s, hop.wire_s, hop.send_occupied_s, hop.receive_occupied_s)
        ]
        for direction, hop in (("F", costs.forward_hops), ("B", costs.backward_hops))
    }
    lists = []
    home: dict[int, int] = {}
    for rank in range(order.num_ranks):
        lists.append([])
        for action in order.actions(rank):
            home[action.stage] = rank
            lists[rank].append(
                Task(
                    action=action,
                    direction="F" if action.work == Work.FORWARD else "B",
                    seconds=seconds[action.work][action.stage],
                    overhead=overhead[action.work],
                )
            )
    messages: dict[Name, Message] = {}
    for rank, tasks in enumerate(lists):
        for task in tasks:
            stage, work, microbatch = task.action
            if work == Work.BACKWARD_WEIGHT:
                continue
            target = stage + (1 if task.direction == "F" else -1)
            if not 0 <= target < order.num_stages or home[target] == rank:
                continue
            boundary = min(stage, target)
            name = task.direction, stage, microbatch
            task.output = messages[name] = Message(
                name, rank, home[target], *(part[boundary] for part in hops[task.direction])
            )
    for tasks in lists:
        for task in tasks:
            stage, work, microbatch = task.action
            if work != Work.BACKWARD_WEIGHT:
                source = stage - (1 if task.direction == "F" else -1)
                task.input = messages.get((task.direction, source, microbatch))
    return lists


def next_stages(groups: list[list[Task]]) -> list[set[int]]:
    """The stages that come next from each group on, in whole groups, until they are three."""
    found = []
    nearest: list[tuple[int, int]] = []  # The place where each stage comes next, nearest first.
    for place in reversed(range(len(groups))):
        own = {task.action.stage for task in groups[place]}
        nearest = [(place, stage) for stage in own] + [
            (later, stage) for later, stage in nearest if stage not in own
        ]
        last = nearest[:3][-1][0]
        found.append({stage for later, stage in nearest if later <= last})
    return found[::-1]
