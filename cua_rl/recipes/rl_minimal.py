"""GRPO on one page: `python -m cua_rl.recipes.rl_minimal` trains the tiny phone model in minutes on two cores.

Simulated phone, agent, vLLM server and trainer are the real ones; what `cua_rl.recipes.train` adds is left out, such as
settings, database, monitor and checkpoints. The same algorithm with all of that around it is `cua_rl/rl/sync_loop.py`.

    task --GROUP_SIZE rollouts--> rewards --minus their mean--> advantages --> datums --> gradient --> new adapter --+
      ^                                                                                                              |
      +--------------------------------------- the next step samples from it ----------------------------------------+
"""

import asyncio
import tempfile
from argparse import ArgumentParser
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.pool import open_pool
from cua_rl.evaluation.statistics import mean_over_tasks
from cua_rl.events import NoRecorder, RolloutSource
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.datums import build_datums
from cua_rl.rollout.group import GroupJob, run_group
from cua_rl.rollout.run import RolloutRunner
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import VllmServer
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.types.rollout import Datum, RolloutGroup, SamplingParams

NUM_STEPS = 24
GROUPS_PER_BATCH = 16  # task instances per step
GROUP_SIZE = 8  # rollouts of one task instance, which are compared with each other
LEARNING_RATE = 2e-3  # far above the usual 1e-5: the model has 1.9 million parameters
NUM_HELD_OUT = 64
RENDERER = make_renderer(TINY_QWEN3_VL)
EXPLORING = SamplingParams(max_tokens=48, temperature=1.0)
EVALUATING = SamplingParams(max_tokens=48, temperature=0.5)


async def train(folder: Path, *, num_steps: int = NUM_STEPS, groups_per_batch: int = GROUPS_PER_BATCH) -> float:
    """Train for `num_steps` steps and return held-out success; adapters and logs go to `folder`."""
    tasks = load_tasks({"source_type": "demo_training", "tags": ["demo"]}, seed=0, split="train")
    held_out = load_tasks({"source_type": "demo_eval", "tags": ["demo"]}, seed=0, split="eval").held_out(NUM_HELD_OUT)
    async with open_engine(folder) as (trainer, sampler, runner):
        await sampler.publish(await trainer.save_weights_for_sampler(folder / "policy-0"))
        groups = await sample_groups(runner, held_out, 1, EVALUATING)
        print(f"held-out success before training: {mean_reward(groups):.3f}")

        for step in range(1, num_steps + 1):
            # sample: every task of the step is attempted GROUP_SIZE times by the current policy
            groups = await sample_groups(runner, tasks.batch(step - 1, groups_per_batch), GROUP_SIZE, EXPLORING)

            # score: a rollout is good or bad compared with the others of its group; equal rewards have no signal
            datums: list[Datum] = []
            for group in groups:
                baseline = mean_reward([group])
                for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
                    advantage = reward - baseline
                    if advantage:
                        # the tokens that were sampled, in the context in which they were, each with this advantage
                        datums += build_datums(rollout, advantage, RENDERER.image_token_id).datums

            # train: the policy gradient over the mean of all sampled tokens, then one step of AdamW
            rate = LEARNING_RATE * (num_steps + 1 - step) / num_steps
            if datums:
                await trainer.forward_backward(datums, LossConfig(name="importance_sampling"))
                await trainer.optim_step(OptimConfig(learning_rate=rate))

            # publish: the next rollouts come from the new policy
            await sampler.publish(await trainer.save_weights_for_sampler(folder / f"policy-{step}"))
            print(f"step {step}/{num_steps}: success {mean_reward(groups):.3f}, {len(datums)} datums")

        groups = await sample_groups(runner, held_out, 1, EVALUATING)
        print(f"held-out success after training: {mean_reward(groups):.3f}")
        return mean_reward(groups)


async def sample_groups(
    runner: RolloutRunner, tasks: Sequence[Task], group_size: int, params: SamplingParams
) -> list[RolloutGroup]:
    """`group_size` rollouts of every task, all side by side; a group's rollouts are those that no fault ended."""
    job = GroupJob(source=RolloutSource(phase="step", step=1), group_size=group_size, params=params)
    return await asyncio.gather(*(run_group(runner, task, index, job) for index, task in enumerate(tasks)))


def mean_reward(groups: Iterable[RolloutGroup]) -> float:
    """The mean over all groups; 0 for none. A reward is 1 if the device shows the goal, else 0."""
    return mean_over_tasks(group.rewards for group in groups)


@asynccontextmanager
async def open_engine(folder: Path) -> AsyncGenerator[tuple[TrainingClient, SamplingClient, RolloutRunner]]:
    """Start the trainer and the model server, which stop at the end of the block."""
    config = ServerConfig(model_path=TINY_QWEN3_VL, max_lora_rank=16, max_model_len=2048)
    server = VllmServer(config, folder / "vllm.log")
    trainer = TrainingClient(
        TrainerConfig(model_path=TINY_QWEN3_VL, lora_rank=16, dtype="float32"), folder / "trainer.log"
    )
    async with AsyncExitStack() as stack:
        await asyncio.gather(stack.enter_async_context(server), stack.enter_async_context(trainer))
        sampler = await stack.enter_async_context(SamplingClient(server))
        pool = await stack.enter_async_context(open_pool(SimulatedPhones(), max_devices=GROUPS_PER_BATCH * GROUP_SIZE))
        runner = RolloutRunner(
            devices=pool,
            gateway=Gateway(sampler, RENDERER, EXPLORING),  # gives every rollout an OpenAI address, keeps its tokens
            agent=GBoxAgent(),
            reward=binary_reward,
            recorder=NoRecorder(),
            max_turns=20,
        )
        yield trainer, sampler, runner


if __name__ == "__main__":
    parser = ArgumentParser(description="Train the tiny phone model with GRPO, without any settings.")
    parser.add_argument("folder", nargs="?", type=Path, help="adapters and logs go there; by default a temporary one")
    path = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="rl_minimal_"))
    path.mkdir(parents=True, exist_ok=True)
    print(f"adapters and logs in {path}")
    asyncio.run(train(path))
