"""What a resumed run keeps of the groups that an earlier attempt left."""

from cua_rl.database.progress import Progress
from cua_rl.rl.config import SamplingSettings
from cua_rl.run.resume import plan_start
from cua_rl.run.training_config import CLIConfig
from tests.builders import group, rollout


def test_a_group_that_lost_too_many_members_is_not_trained_after_a_resume_either() -> None:
    survivors = [rollout(reward=1.0, rollout_id="a"), rollout(reward=0.0, rollout_id="b")]
    progress = Progress(
        done_indices=(),
        untrained=((group(*survivors), 2),),
        newest_steps={0: 0},
        evaluated=frozenset(),
    )

    kept = [
        plan_start(CLIConfig(max_steps_off_policy=2, sampling=SamplingSettings(min_group_size=least)), progress, 1)
        .kept_groups[0]
        .scored.group
        for least in (2, 3)
    ]

    assert [entry.is_constant for entry in kept] == [False, True]
