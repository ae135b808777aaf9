"""Warp groups of a Hopper kernel on the CPU: threads of which one runs at a time, barriers, and copies that take their time.

Random numbers say which group goes on wherever one may be held up, and when a copy arrives. So nothing depends on how busy a
machine is, a seed gives the same order again, and groups that wait for ever are seen at once.

What a group knows: for each group, how far that had come, and for each part of memory, which copy into it has arrived. Barriers
hand this on. A group finds garbage where it does not know that the last copy has arrived, whether or not it has, and must know
that nobody reads any more where it begins one; so an order in which nothing goes wrong hides no fault.
"""

import threading

import numpy as np

EARLY = 0.2  # chance that a copy arrives before a group goes on, which takes less time than a copy


class Stopped(BaseException):
    """Ends a group after another has failed."""


class Groups:
    """The groups of one program; `under_way` holds what makes a copy arrive, in any order."""

    def __init__(self, random):
        self.random, self.under_way, self.waiting, self.failure, self.current = random, [], {}, None, None

    def run(self, functions):
        """Run all to their ends."""
        self.known = [{own: 0} for own in range(len(functions))]
        self.gates = [threading.Semaphore(0) for _ in functions]
        self.waiting = dict.fromkeys(range(len(functions)), _always)
        threads = [threading.Thread(target=self._body, args=own, daemon=True) for own in enumerate(functions)]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        assert not self.under_way, "copies are still under way at the end"

    def pause(self, ready=None):
        """Let others go on; the group that calls does so once it is ready."""
        own = self.current
        self.waiting[own] = ready or _always
        self._next()
        self._begin(own)

    def wait(self, barrier, phase):
        """Until this phase of a barrier has ended, or the one before has not."""
        self.pause(lambda: barrier.phase != phase)
        learn(self.known[self.current], barrier.passed)

    def tell(self, arrive, count):
        """Arrive with all that the group knows."""
        arrive(count, self.known[self.current])
        self.known[self.current][self.current] += 1
        self.pause()

    def _begin(self, own):
        self.gates[own].acquire()
        if self.failure:
            raise Stopped

    def _body(self, own, function):
        try:
            self._begin(own)
            with np.errstate(all="ignore"):  # a card computes with what is no number and says nothing
                function()
        except Stopped:
            pass
        except BaseException as error:  # else the others would wait for it
            self.failure = self.failure or error
        self._next()

    def _next(self):
        """Wake one group; before that, some copies may arrive."""
        while self.waiting:
            able = [group for group, ready in self.waiting.items() if self.failure or ready()]
            if not able and not self.under_way:
                self.failure = AssertionError(f"warp groups {sorted(self.waiting)} wait for what never happens")
                continue
            if self.under_way and not self.failure and (not able or self.random.random() < EARLY):
                self._deliver()
                continue
            chosen = self.random.choice(able)
            del self.waiting[chosen]
            self.current = chosen
            self.gates[chosen].release()
            return

    def _deliver(self):
        try:
            self.under_way.pop(self.random.randrange(len(self.under_way)))()
        except Exception as error:
            self.failure = error


def _always():
    return True


class Barrier:
    """Its phase ends once so many have arrived as it counts, and all bytes that were announced."""

    def init(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.gathered, self.passed = {}, {}  # what those who arrive know, in this phase and in those that have ended

    def arrive(self, count, known):
        self.pending -= count
        assert self.pending >= 0, "more arrive at a barrier than it counts"
        self._end(known)

    def expect(self, count, known):
        """One arrives and announces bytes."""
        self.bytes += count
        self.arrive(1, known)

    def land(self, count, known):
        """Bytes are there."""
        self.bytes -= count
        self._end(known)

    def _end(self, known):
        learn(self.gathered, known)
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count
            learn(self.passed, self.gathered)
            self.gathered = {}


def learn(known, more):
    """Add to what is known."""
    for of, far in more.items():
        known[of] = max(known.get(of, -1), far)


class Part:
    """Shared memory that one copy fills; readers: how far groups were when they last read it, infinity where they still do."""

    def __init__(self, shape, dtype, layout):
        self.shape, self.layout, self.dtype = shape, layout, np.dtype(dtype)
        self.asked, self.readers, self.value = 0, {}, None

    def ask(self, known):
        """A copy into it begins."""
        assert all(known.get(group, -1) >= far for group, far in self.readers.items()), "a copy begins where others may read"
        assert self.asked == 0 or known.get(self) == self.asked, "a copy begins where another may be under way"
        self.asked, self.readers = self.asked + 1, {}

    def land(self, value):
        """The copy arrives; what those who are told then know."""
        assert list(value.shape) == list(self.shape) and value.dtype == self.dtype, "a copy of another shape"
        self.value = value
        return {self: self.asked}

    def read(self, group, known, far):
        """NaN, or 0x5A in every byte, where a group does not know that all has arrived."""
        if self.asked and known.get(self) == self.asked:
            self.readers[group] = far
            return self.value
        if self.dtype.kind == "f":
            return np.full(self.shape, np.nan, self.dtype)
        return np.full((*self.shape, self.dtype.itemsize), 0x5A, np.uint8).view(self.dtype)[..., 0]
