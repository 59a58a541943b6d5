"""Simulates the prefix cache of a model server: the share of the rollouts' prompts that it still holds a turn later.

Blocks are freed, found and evicted as by vLLM: those of a request are freed last to first into a queue, found again if
every block before them is, and taken from the front of the queue when new ones are needed, those without content first.
Runs of blocks stand for blocks, which are freed together and evicted from their ends.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from math import ceil, log
from random import Random

ENOUGH_KEPT = 0.8
"""Share of what an unlimited cache finds; below it, the server spends more time on prompts than on sampling."""
LARGEST_NUM_ROLLOUTS = 128
"""At a time, unless more are asked for."""
_TEXT, _SAMPLED, _SHARED = 60, 150, 1200  # tokens: prompt beside a screenshot, answer, system prompt and tools
_THINK_MU, _THINK_SIGMA = log(2.0) - 1.0**2 / 2, 1.0  # of a device between two turns, 2 s: lognormal (docs/gpus.md)
_ANSWER_S, _PREFILL_S = 4.0, 1e-4  # of a request, and of each token that is not cached
_ROLLOUTS_PER_SLOT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutShape:
    """Prompts of a rollout with all its turns."""

    num_turns: int
    screen_tokens: int
    max_images: int
    """Screenshots in a prompt; when there is one more, `drop` are left out at once."""
    drop: int
    context_tokens: int
    """No prompt with its answer is longer."""

    @property
    def shared_tokens(self) -> int:
        """System prompt and tools; of a tiny context, half."""
        return min(_SHARED, self.context_tokens // 2)

    def num_dropped(self, turn: int) -> int:
        """Screenshots left out at this turn, counted from 0."""
        return -(-max(0, turn + 1 - self.max_images) // self.drop) * self.drop

    def prompt_tokens(self, turn: int) -> int:
        """Length of the prompt."""
        grown = self.shared_tokens + (turn + 1) * (self.screen_tokens + _TEXT) + turn * _SAMPLED
        room = max(self.shared_tokens + 1, self.context_tokens - _SAMPLED)
        return min(grown - self.num_dropped(turn) * self.screen_tokens, room)

    def same_tokens(self, turn: int) -> int:
        """Tokens of it that the turn before has left in an unlimited cache: all but the last one sampled."""
        if not turn:
            return self.shared_tokens
        before = self.num_dropped(turn - 1)
        if before == self.num_dropped(turn):
            return min(self.prompt_tokens(turn - 1) + _SAMPLED, self.prompt_tokens(turn)) - 1
        return self.shared_tokens + before * (_TEXT + _SAMPLED)


@dataclass(eq=False, slots=True)
class _Run:
    """Cached blocks that follow one another."""

    num_blocks: int = 0
    num_users: int = 0


@dataclass(eq=False, slots=True)
class Chain:
    """The blocks of a conversation: a run of all conversations, those that stay when screenshots go, and the last."""

    runs: list[_Run]
    num_unfilled: int = 0


@dataclass(slots=True)
class PrefixCache:
    """A pool of blocks, counted as vLLM manages them."""

    num_blocks: int
    block_tokens: int
    shared_tokens: int = _SHARED
    shared: _Run = field(default_factory=_Run)
    _blank: int = field(init=False)
    _queue: OrderedDict[_Run, None] = field(default_factory=OrderedDict[_Run, None])
    _num_queued: int = 0

    def __post_init__(self) -> None:
        self._blank = self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, with content or without."""
        return self._blank + self._num_queued

    def new_chain(self) -> Chain:
        """The blocks of a new conversation."""
        return Chain([self.shared, _Run()])

    def start(self, chain: Chain, *, prompt: int, same: int, sampled: int) -> int | None:
        """Allocate a request and its answer; returns the tokens that were cached, None if it has to wait for others.

        The prompt begins with the first `same` tokens of the conversation's last request.
        """
        size = self.block_tokens
        same_blocks = min(same, prompt - 1) // size
        needed, full = ceil((prompt + sampled - 1) / size), (prompt + sampled - 1) // size
        found, queued, hits = 0, 0, list[int]()
        for run in chain.runs:
            hits.append(min(run.num_blocks, same_blocks - found))
            found += hits[-1]
            queued += 0 if run.num_users else hits[-1]
        if needed - found > self.num_free - queued:
            return None
        for index, (run, hit) in enumerate(zip(chain.runs, hits, strict=True)):
            if index and hit < run.num_blocks:  # the others stay where they are in the queue, but cannot be found
                self._num_queued -= hit
                run.num_blocks -= hit
                chain.runs = [*chain.runs[:index], _Run(hit), _Run()]
                break
        for run in chain.runs:
            run.num_users += 1
            if run in self._queue:
                del self._queue[run]
                self._num_queued -= run.num_blocks
        if len(chain.runs) > 3:  # from now on, what stayed before and what stays now come and go together
            chain.runs[1].num_blocks += chain.runs.pop(2).num_blocks
        self._take(needed - found)
        if chain.runs[0] is self.shared:
            self.shared.num_blocks = max(self.shared.num_blocks, min(self.shared_tokens // size, full))
        chain.runs[-1].num_blocks += full - sum([run.num_blocks for run in chain.runs])
        chain.num_unfilled = needed - full
        return found * size

    def finish(self, chain: Chain) -> None:
        """Free the blocks of the conversation's request."""
        self._blank += chain.num_unfilled
        for run in reversed(chain.runs):
            run.num_users -= 1
            if not run.num_users and run.num_blocks:
                self._queue[run] = None
                self._num_queued += run.num_blocks

    def _take(self, number: int) -> None:
        blank = min(number, self._blank)
        self._blank -= blank
        number -= blank
        self._num_queued -= number
        while number:
            run = next(iter(self._queue))
            taken = min(number, run.num_blocks)
            run.num_blocks -= taken
            number -= taken
            if not run.num_blocks:
                del self._queue[run]


@lru_cache(maxsize=256)
def simulate_prefix_cache(shape: RolloutShape, *, num_blocks: int, block_tokens: int, num_rollouts: int) -> float:
    """Rollouts that begin together, each followed by others in its place, on one server with so many blocks."""
    random, cache = Random(0), PrefixCache(num_blocks, block_tokens, shape.shared_tokens)
    lengths = [(shape.prompt_tokens(turn), shape.same_tokens(turn)) for turn in range(shape.num_turns)]
    chains, turns = [cache.new_chain() for _ in range(num_rollouts)], [0] * num_rollouts
    events: list[tuple[float, int, bool]] = [(0.0, slot, False) for slot in range(num_rollouts)]
    waiting, hits, endless = list[int](), 0, 0
    while events:
        now, slot, is_end = heappop(events)
        if is_end:
            cache.finish(chains[slot])
            turns[slot] += 1
            if turns[slot] % shape.num_turns == 0:
                chains[slot] = cache.new_chain()
            if turns[slot] < shape.num_turns * _ROLLOUTS_PER_SLOT:
                heappush(events, (now + random.lognormvariate(_THINK_MU, _THINK_SIGMA), slot, False))
        else:
            waiting.append(slot)
        while waiting:
            slot = waiting[0]
            prompt, same = lengths[turns[slot] % shape.num_turns]
            found = cache.start(chains[slot], prompt=prompt, same=same, sampled=_SAMPLED)
            if found is None:
                break
            waiting.pop(0)
            hits, endless = hits + found, endless + same // block_tokens * block_tokens
            heappush(events, (now + _ANSWER_S + _PREFILL_S * (prompt - found), slot, True))
    return hits / endless if endless and not waiting else 0.0


def most_rollouts(kept_frac: Callable[[int], float]) -> int:
    """The most rollouts at a time with which servers keep enough of the prompts."""
    low, high = 1, LARGEST_NUM_ROLLOUTS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if kept_frac(middle) >= ENOUGH_KEPT else (low, middle - 1)
    return low
