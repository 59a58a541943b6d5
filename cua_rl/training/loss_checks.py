"""Checks loss settings before a model loads. Does not import torch."""

from cua_rl.training.config import LossConfig
from cua_rl.types.errors import ConfigError


def check_loss_config(config: LossConfig) -> None:
    """Raises `ConfigError` for settings that no loss can work with."""
    if not config.temperature > 0.0:
        raise ConfigError(f"expected loss.temperature > 0, got {config.temperature!r}: give the sampler's temperature")
    if config.clip_low < 0.0 or config.clip_high < 0.0:
        raise ConfigError(
            f"clip_low, clip_high: expected at least 0, got {config.clip_low!r}, {config.clip_high!r}; they are "
            "distances from 1"
        )
    if config.dro_beta < 0.0:
        raise ConfigError(f"dro_beta: expected at least 0, got {config.dro_beta!r}; 0.05 is usual")
    if config.kl_loss_coef < 0.0:
        raise ConfigError(f"kl_loss_coef: expected at least 0, got {config.kl_loss_coef!r}; 0 is no KL term")
    if config.normalisation_tokens < 1:
        raise ConfigError(f"normalisation_tokens: expected at least 1, got {config.normalisation_tokens!r}; raise it")
    if config.dual_clip is not None and config.name not in ("ppo", "decoupled_ppo"):
        raise ConfigError(
            f"dual_clip: expected loss=ppo or loss=decoupled_ppo with it, got loss={config.name}; leave dual_clip out"
        )
    if config.dual_clip is not None and not config.dual_clip > 1.0:
        raise ConfigError(f"dual_clip: expected more than 1, got {config.dual_clip!r}; 3 is usual")
    _check_mismatch_correction(config)


def _check_mismatch_correction(config: LossConfig) -> None:
    """Truncation and masks of the behaviour weight."""
    if config.name in ("cross_entropy", "stable_reinforce") and config.has_behaviour_weight:
        raise ConfigError(
            "tis_cap, icepop_low, icepop_high: expected a loss with an importance ratio, got "
            f"loss={config.name}; leave them out"
        )
    if config.tis_cap is not None and not config.tis_cap > 0.0:
        raise ConfigError(f"tis_cap: expected more than 0, got {config.tis_cap!r}; 2 is usual")
    if config.icepop_low is not None and not 0.0 <= config.icepop_low <= 1.0:
        raise ConfigError(f"icepop_low: expected 0 to 1, got {config.icepop_low!r}; 0.5 is usual")
    if config.icepop_high is not None and not config.icepop_high >= 1.0:
        raise ConfigError(f"icepop_high: expected at least 1, got {config.icepop_high!r}; 5 is usual")
