"""A GPU of which a model server and a trainer take memory, counted in bytes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from cua_rl.machine.memory_parts import Request, outside_bytes, usable_bytes
from cua_rl.machine.memory_plan import MemoryBudget

PAGE = 20 * 2**20  # PyTorch's allocator maps large tensors by pages of 20 MiB


class SimulatedShortage(Exception):
    """A program found no memory."""


@dataclass
class Allocator:
    """PyTorch's, with expandable segments: one range of addresses, whose pages stay mapped until they are released."""

    limit: float
    live: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Start and end of every tensor, in order."""
    pages: set[int] = field(default_factory=set[int])

    @property
    def reserved(self) -> int:
        return len(self.pages) * PAGE

    def allocate(self, size: float) -> tuple[int, int]:
        """The gap that needs the fewest new pages, and of those the smallest."""
        wanted = max(512, int(size))
        ends = [0, *(end for _, end in self.live)]
        starts = [*(start for start, _ in self.live), ends[-1] + 2 * wanted]
        gaps = [(start, end) for start, end in zip(ends, starts, strict=True) if end - start >= wanted]
        _, _, start = min((len(self._missing(start, wanted)), end - start, start) for start, end in gaps)
        missing = self._missing(start, wanted)
        if self.reserved + len(missing) * PAGE > self.limit:
            self.release()
            missing = self._missing(start, wanted)
        if self.reserved + len(missing) * PAGE > self.limit:
            raise SimulatedShortage(f"{self.reserved + len(missing) * PAGE} bytes of {self.limit:.0f}")
        self.pages |= missing
        self.live = sorted([*self.live, (start, start + wanted)])
        return start, start + wanted

    def _missing(self, start: int, size: int) -> set[int]:
        return set(range(start // PAGE, (start + size - 1) // PAGE + 1)) - self.pages

    def free(self, tensor: tuple[int, int]) -> None:
        self.live.remove(tensor)

    def release(self) -> None:
        """torch.cuda.empty_cache: unmap pages that hold no tensor."""
        self.pages = {page for start, end in self.live for page in range(start // PAGE, (end - 1) // PAGE + 1)}


def least_free_share_of_a_day(request: Request, plan: MemoryBudget, *, num_steps: int, seed: int) -> float:
    """Steps whose rows differ in length, beside a server that may die and start again.

    Raises:
        SimulatedShortage: trainer or server found too little memory.
    """
    total = usable_bytes(request.machine.gpu_gib or 0.0)
    draw = random.Random(seed)
    share = plan.gpus.gpu_memory_utilization * total if plan.gpus.is_shared else 0.0
    server = share + outside_bytes(plan.gpus.tensor_parallel) if share else 0.0
    outside = outside_bytes(plan.gpus.num_trainer_processes)
    trainer = Allocator(plan.trainer_fraction * total)
    least = total
    for moment in _day(request, plan, trainer, draw, num_steps):
        free = total - server - outside - trainer.reserved
        least = min(least, free)
        # vLLM makes its context and then wants its share free, or refuses to start; it may start again at any moment
        if free < 0:
            raise SimulatedShortage(f"during {moment}, a server finds {free + share:.0f} bytes of {share:.0f}")
    return least / total


def _day(
    request: Request, plan: MemoryBudget, trainer: Allocator, draw: random.Random, num_steps: int
) -> Iterator[str]:
    """Every change of the trainer's memory, as the layers of its model make them."""
    model, rank = request.model, request.trainer.lora_rank
    # in bfloat16, a layer that comes and goes
    passing = 0 if plan.sharding == "replicated" else 2 * model.layer_parameters
    trainer.allocate(plan.trainer["weights"] - 2 * passing)
    trainer.allocate(plan.trainer["adapter and optimizer"])
    yield "start"
    row = max(plan.micro_batch_tokens, request.context_tokens)
    for _ in range(num_steps):
        num_tokens = draw.randint(row // 8, row)
        attention = model.attention_bytes(num_tokens) if plan.keeps_attention else 0
        per_token = 2 * model.hidden if plan.gradient_checkpointing else model.layer_activations(rank)
        kept = num_tokens * per_token + attention / (model.num_layers - 1)
        inputs, weights = list[tuple[int, int]](), list[tuple[int, int]]()

        def pass_weights(weights: list[tuple[int, int]] = weights) -> None:
            if passing:
                weights.append(trainer.allocate(passing))
                if len(weights) == 2:
                    trainer.free(weights.pop(0))

        for _ in range(model.num_layers - 1):
            pass_weights()
            inputs.append(trainer.allocate(kept))
            yield "forward"
        at_peak = model.activation_bytes(num_tokens, rank, recomputes=plan.gradient_checkpointing) + attention
        beside = at_peak - len(inputs) * kept
        while inputs:
            pass_weights()
            parts = [draw.uniform(0.5, 1.5) for _ in range(8)]
            tensors = [trainer.allocate(beside * part / sum(parts)) for part in parts]
            yield "backward"
            for tensor in (*tensors, inputs.pop()):
                trainer.free(tensor)
        for tensor in weights:
            trainer.free(tensor)
        trainer.release()  # rollouts are next
        yield "sampling"
