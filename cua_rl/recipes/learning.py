"""Options that say how a training run learns, as settings of its steps; checked before a model loads."""

from cua_rl.config import LossConfig, OptimConfig
from cua_rl.errors import ConfigError
from cua_rl.recipes.train_config import CLIConfig
from cua_rl.rl.train_step import TrainStepSettings
from cua_rl.training.loss_checks import check_loss_config


def train_step_settings(config: CLIConfig) -> TrainStepSettings:
    """How each batch of the run is trained on."""
    return TrainStepSettings(
        loss=loss_config(config),
        optim=OptimConfig(
            learning_rate=config.learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        ),
        num_substeps=config.num_substeps,
        parity_limit=config.parity_limit,
        kl_penalty_coef=config.kl_penalty_coef,
        compute_post_kl=config.compute_post_kl,
        schedule=config.learning_rate_schedule,
        warmup_steps=config.warmup_steps,
        advantages=config.advantages,
        seed=config.seed,
    )


def loss_config(config: CLIConfig) -> LossConfig:
    """The policy loss."""
    return LossConfig(
        name=config.loss,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        tis_cap=config.tis_cap,
        icepop_low=config.icepop_low,
        icepop_high=config.icepop_high,
        kl_loss_coef=config.kl_loss_coef,
        normalisation=config.normalisation,
        normalisation_tokens=config.normalisation_tokens,
        temperature=config.temperature,
    )


def check_learning(config: CLIConfig) -> None:
    """Raises `ConfigError` for options that do not go together."""
    check_loss_config(loss_config(config))
    if config.kl_penalty_coef and config.kl_loss_coef:
        raise ConfigError(
            f"kl_loss_coef: expected 0 where kl_penalty_coef={config.kl_penalty_coef:g} is in the reward already, got "
            f"{config.kl_loss_coef:g}; set one of them"
        )
    if config.warmup_steps >= config.max_steps:
        raise ConfigError(
            f"warmup_steps: expected less than max_steps={config.max_steps}, got {config.warmup_steps}; lower it"
        )
    _check_old_tokens(config)


def _check_old_tokens(config: CLIConfig) -> None:
    """Tokens of older policies want a loss in which none of them outweighs all others."""
    if loss_config(config).bounds_ratio or config.force_untruncated:
        return
    has_old = {"max_steps_off_policy": config.max_steps_off_policy, "replay_successes": config.replay_successes}
    for name, value in has_old.items():
        if value:
            raise ConfigError(
                f"loss: expected one that bounds the ratio where {name}={value}, got {config.loss} without tis_cap or "
                "icepop_high, which collapses on old tokens; set loss=ppo, or tis_cap=2, or force_untruncated=true"
            )
