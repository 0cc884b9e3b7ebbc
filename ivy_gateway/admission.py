"""Who is let in: a bound on the work that waits, in tokens and, from the rate at which it is done, in time.

Whole requests only, and each is refused for what is there already, never for its own size. Knows nothing of
replicas or of HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ivy_gateway import metrics
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import Overloaded
from ivy_gateway.jobs import Lane

# Nine tenths of what a server can do, asked for at random, makes 99 of 100 requests wait for less than this
# many requests, each weighted by its own size: ln(100 * 0.9) / (2 * (1 - 0.9)) times E[s^2] / E[s], by the
# exponential approximation of the queue M/G/1. More waits only where more comes in than goes out.
STANDING_REQUESTS = math.log(100 * 0.9) / (2 * (1 - 0.9))
MIN_QUEUE_SECONDS = 0.05  # a few batches of a fast device, and what two processes need to hand work over
GRACE_SECONDS = 0.1  # a burst out of idleness is not yet a load
EXCESS = 1.1  # what comes in over what goes out, from which on the queue only grows
SPARE_REQUESTS = 16  # so that some arrivals in a row, as of clients that all begin, mean nothing
FLOW_SECONDS = 2.0  # over which both are averaged
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What may wait in one process. 0 seconds: no bound in time."""

    max_tokens: int
    max_seconds: dict[Lane, float]
    bulk_inputs: int
    bulk_tokens: int

    @classmethod
    def of(cls, config: GatewayConfig) -> AdmissionLimits:
        """This process's share of what `config` allows for all workers together."""
        return cls(
            max_tokens=math.ceil(config.max_waiting_tokens / config.workers),
            max_seconds={
                Lane.INTERACTIVE: config.max_queue_seconds,
                Lane.BULK: config.max_bulk_queue_seconds,
            },
            bulk_inputs=config.bulk_inputs,
            bulk_tokens=config.bulk_tokens,
        )


class Ticket:
    """A request: its cost, estimated until its texts are tokenized, in its lane; inside while a block lasts.

    No generator, as each request has one.
    """

    def __init__(
        self, admission: Admission, asked: Lane | None, num_inputs: int, num_characters: int
    ) -> None:
        self.cost = admission.estimate(num_characters, num_inputs)
        self.lane = admission.lane_of(asked, num_inputs, self.cost)
        self.num_characters = num_characters
        self._admission = admission
        self._asked = asked
        self._num_inputs = num_inputs

    def __enter__(self) -> Ticket:
        """Come in. Raises `Overloaded`."""
        self._admission.let_in(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Be gone."""
        self._admission.let_out(self)

    def correct(self, cost: int) -> None:
        """The request costs `cost` tokens; it changes its lane if it is of another size than it looked."""
        self._admission.learn(self.num_characters, cost)
        lane = self._admission.lane_of(self._asked, self._num_inputs, cost)
        self._admission.move(self, lane, cost)


class Admission:
    """The work inside one gateway process, by lane, and the rate at which it is done."""

    def __init__(self, limits: AdmissionLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._tokens = dict.fromkeys(Lane, 0)
        self._requests = dict.fromkeys(Lane, 0)
        self._rate = _Rate(clock)
        self._flows = {lane: _Flow(clock) for lane in Lane}
        self._sizes = _Sizes()
        self._tokens_per_character = 0.3
        self._names = {lane: lane.value for lane in Lane}  # which the enum takes its time to say

    @property
    def tokens(self) -> int:
        """Tokens of all admitted requests."""
        return sum(self._tokens.values())

    @property
    def num_requests(self) -> int:
        """Requests inside."""
        return sum(self._requests.values())

    def lane_of(self, asked: Lane | None, num_inputs: int, num_tokens: int) -> Lane:
        """The lane that the client asked for, else the one of a request of that size."""
        if asked is not None:
            return asked
        large = num_inputs > self._limits.bulk_inputs or num_tokens > self._limits.bulk_tokens
        return Lane.BULK if large else Lane.INTERACTIVE

    def estimate(self, num_characters: int, num_inputs: int) -> int:
        """Tokens that texts will have, as texts had so far; two more for each."""
        return int(num_characters * self._tokens_per_character) + 2 * num_inputs

    def learn(self, num_characters: int, num_tokens: int) -> None:
        """Note how many tokens so many characters had."""
        if num_characters:
            seen = min(num_tokens / num_characters, 4.0)
            self._tokens_per_character += 0.05 * (seen - self._tokens_per_character)

    def check(self, lane: Lane) -> None:
        """Raise `Overloaded` when the requests in `lane`, or all together, already fill the queue."""
        if self.tokens >= self._limits.max_tokens:
            self._refuse("tokens", lane, self.tokens - self._limits.max_tokens)
        longest, standing = self._bounds(lane)
        waiting, flow = self._tokens[lane], self._flows[lane]
        if (waiting >= standing and flow.grows(EXCESS)) or (waiting >= longest and flow.grows(1.0)):
            self._refuse("seconds", lane, waiting - standing)

    def admitted(self, asked: Lane | None, num_inputs: int, num_characters: int) -> Ticket:
        """A whole request, counted for as long as a block lasts, whose start may raise `Overloaded`."""
        return Ticket(self, asked, num_inputs, num_characters)

    def let_in(self, ticket: Ticket) -> None:
        """Count the request of `ticket`. Raises `Overloaded`."""
        self.check(ticket.lane)
        self._enter(ticket.lane)
        self._count(ticket, 1)

    def let_out(self, ticket: Ticket) -> None:
        """The request of `ticket` is done, whatever became of it."""
        self._count(ticket, -1)
        self._flows[ticket.lane].went()

    def move(self, ticket: Ticket, lane: Lane, cost: int) -> None:
        """Count the request of `ticket` as one of `cost` tokens in `lane`."""
        if lane is ticket.lane:
            self._tokens[lane] += cost - ticket.cost
            ticket.cost = cost
            metrics.queue_changed(self._names[lane], self._tokens[lane])
        else:
            self._count(ticket, -1)
            self._flows[ticket.lane].went()
            self._enter(lane)
            ticket.lane, ticket.cost = lane, cost
            self._count(ticket, 1)
        if lane is Lane.INTERACTIVE:
            self._sizes.add(cost)

    def done(self, num_tokens: int) -> None:
        """Note that a server has answered for so many tokens."""
        self._rate.done(num_tokens)

    def _enter(self, lane: Lane) -> None:
        if not self._requests[lane]:
            self._flows[lane].restart()
        self._flows[lane].came()

    def _count(self, ticket: Ticket, sign: int) -> None:
        self._tokens[ticket.lane] += sign * ticket.cost
        self._requests[ticket.lane] += sign
        self._rate.set_busy(self.num_requests > 0)
        metrics.queue_changed(self._names[ticket.lane], self._tokens[ticket.lane])

    def _bounds(self, lane: Lane) -> tuple[float, float]:
        """Tokens that may wait in `lane` while the queue grows at all, and while it grows fast."""
        rate = self._rate.tokens_per_second
        longest = self._limits.max_seconds[lane] * rate or math.inf
        if lane is Lane.BULK or math.isinf(longest):
            return longest, longest
        standing = max(MIN_QUEUE_SECONDS * rate, STANDING_REQUESTS * self._sizes.weighted_mean)
        return longest, min(longest, standing)

    def _refuse(self, bound: str, lane: Lane, excess: float) -> None:
        self._flows[lane].came()
        rate = self._rate.tokens_per_second
        seconds = excess / rate if rate else MIN_RETRY_SECONDS
        retry_after = min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        metrics.request_refused(lane.value, bound, retry_after)
        raise Overloaded("Model is overloaded", retry_after=retry_after)


class _Rate:
    """Tokens a second that servers do while they have work.

    Learned over stretches that end with an answer; one without a pause says what they can do, one with pauses
    only that they can do at least so much.
    """

    MIN_SECONDS = 0.1

    def __init__(self, clock: Clock) -> None:
        self.tokens_per_second = 0.0  # 0: not known yet
        self._clock = clock
        self._busy_since: float | None = None
        self._began = clock()
        self._busy_seconds = 0.0
        self._tokens = 0

    def set_busy(self, busy: bool) -> None:
        """Whether there is work."""
        if busy == (self._busy_since is not None):
            return
        now = self._clock()
        if self._busy_since is not None:
            self._busy_seconds += now - self._busy_since
        self._busy_since = now if busy else None

    def done(self, num_tokens: int) -> None:
        """Note finished work."""
        now = self._clock()
        self._tokens += num_tokens
        busy = self._busy_seconds + (now - self._busy_since if self._busy_since is not None else 0.0)
        if busy < self.MIN_SECONDS:
            return
        seen, paused = self._tokens / busy, now - self._began > 1.05 * busy
        if not self.tokens_per_second or (paused and seen > self.tokens_per_second):
            self.tokens_per_second = seen
        elif not paused:
            self.tokens_per_second += 0.3 * (seen - self.tokens_per_second)
        self._began, self._busy_seconds, self._tokens = now, 0.0, 0
        if self._busy_since is not None:
            self._busy_since = now


class _Flow:
    """Whether more requests come in than go out, averaged over `FLOW_SECONDS`.

    A client that sends its next request after the last answer adds as much to one as to the other, however
    many such clients there are.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._came = self._went = 0.0
        self._last = self._counts_from = clock()

    def grows(self, excess: float) -> bool:
        """Whether `excess` times as much comes in as goes out, and has not only just begun to."""
        self._fade()
        return self._last >= self._counts_from and self._came > excess * self._went + SPARE_REQUESTS

    def restart(self) -> None:
        """Everything was done: whatever comes next may be a burst."""
        self._came = self._went = 0.0
        self._last = self._clock()
        self._counts_from = self._last + GRACE_SECONDS

    def came(self) -> None:
        """Count a request that came in, or was refused."""
        self._fade()
        self._came += self._last >= self._counts_from

    def went(self) -> None:
        """Count a request that went out."""
        self._fade()
        self._went += self._last >= self._counts_from

    def _fade(self) -> None:
        now = self._clock()
        keep = math.exp((self._last - now) / FLOW_SECONDS)
        self._came, self._went, self._last = self._came * keep, self._went * keep, now


class _Sizes:
    """The sizes of requests lately: their mean, weighted by the size itself."""

    def __init__(self) -> None:
        self._mean = self._mean_square = 0.0

    @property
    def weighted_mean(self) -> float:
        """E[s^2] / E[s], in tokens: the request that somebody who waits is behind."""
        return self._mean_square / self._mean if self._mean else 0.0

    def add(self, size: int) -> None:
        """Note a request of `size` tokens."""
        part = 0.02 if self._mean else 1.0
        self._mean += part * (size - self._mean)
        self._mean_square += part * (size * size - self._mean_square)
