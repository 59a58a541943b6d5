"""The on-policy loop: sample, score, build datums, train, publish, record; then the next step.

Stages run strictly one after the other: rollouts of step k + 1 begin when the adapter of step k is served. Steps count
from 1; step 0 is the policy before training. Off-policy data are replayed successes only (`curriculum.py`), if any.
"""

from functools import partial

from cua_rl.events import RolloutSource, SourceStarted
from cua_rl.rl import stages
from cua_rl.rl.advantages import ScoredGroup
from cua_rl.rl.train_step import TrainStepResult, train_step
from cua_rl.rollout.group import GroupJob, collect_groups, run_group
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import AdapterRef, RolloutGroup


async def train(settings: stages.LoopSettings, parts: stages.LoopParts) -> None:
    """Train from `first_step` to `max_steps`, with evaluations before and after."""
    adapter = await parts.policy.publish(settings.first_step - 1)
    for wanted in stages.first_evaluations(settings, adapter):
        await stages.evaluate(parts, wanted)

    for step in range(settings.first_step, settings.config.max_steps + 1):
        clock, old_version, result = stages.Clock(), adapter.policy_version, TrainStepResult()
        with clock.time("step"):
            # sample: groups of rollouts of one task each; score: every rollout against the others of its group
            with clock.time("rollouts"):
                groups = await sample_groups(settings, parts, step, adapter)

            # build datums: the sampled tokens in their context, each with the advantage of its rollout
            with clock.time("datums"):
                batch = await stages.build_step_batch(settings, groups)

            if batch.datums:  # without any, the policy stays as it is
                # train: forward_backward, parity gate, optim_step
                with clock.time("train"):
                    result = await train_step(
                        parts.trainer, batch, settings.config, step=step, max_steps=settings.config.max_steps
                    )

                # publish: the next rollouts are sampled from the new policy
                with clock.time("publish"):
                    adapter = await parts.policy.publish(step)

        # record: metrics, and the fingerprint of what was trained on
        trained = stages.TrainedStep(
            step=step,
            groups=groups,
            batch=batch,
            result=result,
            old_version=old_version,
            adapter=adapter if batch.datums else None,
        )
        await stages.record_step(settings, parts, trained, clock)
        del groups, batch, result, trained  # screenshots take gigabytes, while the next step collects as many
        await stages.save_checkpoint(settings, parts, step)
        if stages.is_evaluation_due(settings, step):
            await stages.evaluate(parts, stages.WantedEvaluation(phase="eval", step=step, adapter=adapter))


async def sample_groups(
    settings: stages.LoopSettings, parts: stages.LoopParts, step: int, adapter: AdapterRef
) -> list[ScoredGroup]:
    """Run and score the groups of a step; tasks beyond `groups_per_batch` replace groups without a learning signal."""
    tasks = parts.tasks.batch(step - 1, settings.config.groups_per_batch * settings.config.max_refill_factor)
    source = RolloutSource(phase="step", step=step)
    await parts.recorder.record(
        SourceStarted(
            source=source,
            tasks=tuple(tasks[: settings.config.groups_per_batch]),
            group_size=settings.config.group_size,
            policy_version=adapter.policy_version,
        )
    )
    job = GroupJob(
        source=source,
        group_size=settings.config.group_size,
        params=settings.params.seeded(step - 1),
        min_group_size=settings.config.sampling.min_group_size,
        branching=settings.config.branching,
        moving_top=settings.config.credit.moving_top or 0.0,
    )

    async def run(task: Task, index: int) -> RolloutGroup:
        kept = stages.find_kept(settings, step, task, index)
        return parts.memory.replay.join(kept or await run_group(parts.runner, task, index, job))

    end = partial(stages.score_and_record, settings, parts, source)
    return await collect_groups(tasks, run, end, num_groups=settings.config.groups_per_batch)
