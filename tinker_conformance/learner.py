"""A short run of reinforcement learning by the SDK, on text and a picture, whose every repetition is the same.

As a program it says what it has done, a line of JSON a time: `python -m tinker_conformance.learner URL KEY STEPS`.

An answer is rewarded for its share of even tokens. The loss is the cross entropy with advantages as weights: its
gradient is that of the policy loss, but without log-probabilities of the sampler, whose last digits depend on what else
a server computes in a batch. After half of the steps, another model goes on from the checkpoint.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

import numpy as np
from tinker import types

from tinker_conformance import data
from tinker_conformance.data import Chunk
from tinker_conformance.server import Server, client_of, wait

GROUP_SIZE, ANSWER_TOKENS = 4, 12
PROMPTS: tuple[tuple[Chunk, ...], ...] = (
    (data.tokens(1, 6),),
    (data.tokens(2, 4), data.picture(1), data.tokens(3, 5)),
)
ADAM = types.AdamParams(learning_rate=1e-2)
Tell = Callable[[str, dict[str, object]], None]
"""Gets to know each stage that is complete, and what came of it."""


def learn(server: Server, num_steps: int, tell: Tell) -> str:
    """Train a new model; returns the path of its last checkpoint, whose name is `end`."""
    service = server.client()
    base = client_of(service.create_sampling_client(base_model=server.model))
    lengths = [len(wait(base.compute_logprobs(data.prompt(*prompt)))) for prompt in PROMPTS]
    model = server.model_of(service)
    for step in range(1, num_steps + 1):
        sampler = client_of(model.save_weights_and_get_sampling_client())
        tell("saved", {"step": step})
        params = types.SamplingParams(max_tokens=ANSWER_TOKENS, seed=step, stop=[])
        asked = [sampler.sample(data.prompt(*prompt), GROUP_SIZE, params) for prompt in PROMPTS]
        groups = [[list(sequence.tokens) for sequence in wait(future).sequences] for future in asked]
        tell("sampled", {"step": step, "answers": groups})
        passes = [
            model.forward_backward(_data(prompt, length, group), "cross_entropy")
            for prompt, length, group in zip(PROMPTS, lengths, groups, strict=True)
        ]
        stepped = model.optim_step(ADAM)
        losses = [wait(each).metrics["loss:sum"] for each in passes]
        tell("computed", {"step": step, "losses": losses})
        wait(stepped)
        tell("stepped", {"step": step, "reward": float(np.mean([_reward(answer) for one in groups for answer in one]))})
        if step == num_steps // 2:
            half = wait(model.save_state("half")).path
            model = client_of(service.create_training_client_from_state_with_optimizer(half))
            tell("reloaded", {"step": step})
    return wait(model.save_state("end")).path


def _reward(answer: Sequence[int]) -> float:
    return float(np.mean([token % 2 == 0 for token in answer]))


def _data(prompt: Sequence[Chunk], length: int, group: Sequence[Sequence[int]]) -> list[types.Datum]:
    """The answers to a prompt of so many positions, with their advantages as weights."""
    num_image_tokens = length - sum(len(chunk) for chunk in prompt if not isinstance(chunk, types.ImageChunk))
    before = [
        token
        for chunk in prompt
        for token in ([0] * num_image_tokens if isinstance(chunk, types.ImageChunk) else chunk)
    ]
    rewards = [_reward(answer) for answer in group]
    return [
        data.datum(
            *prompt,
            answer[:-1],
            targets=[*before, *answer][1:],
            weights=[0.0] * (length - 1) + [reward - float(np.mean(rewards))] * len(answer),
        )
        for answer, reward in zip(group, rewards, strict=True)
    ]


def main() -> None:
    """Learn on the server's first model, and say so."""
    base_url, api_key, num_steps = sys.argv[1:]
    nameless = Server(base_url=base_url, api_key=api_key, model="")
    [first, *_] = nameless.client().get_server_capabilities().supported_models
    server = dataclasses.replace(nameless, model=str(first.model_name))

    def tell(stage: str, facts: dict[str, object]) -> None:
        sys.stdout.write(json.dumps({"stage": stage, **facts}) + "\n")
        sys.stdout.flush()

    tell("end", {"path": learn(server, int(num_steps), tell)})


if __name__ == "__main__":
    main()
