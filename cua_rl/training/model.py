# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
"""A model with trainable weights: a LoRA adapter, or everything."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForImageTextToText

from cua_rl.host.system import processor_name
from cua_rl.renderers.families import FAMILIES, Family
from cua_rl.training.adapters import Adapters
from cua_rl.training.batching import MicroBatch
from cua_rl.training.checkpoint import gather_whole, shard_like
from cua_rl.training.config import LoraSpec, TrainerConfig
from cua_rl.training.context import ALONE, Context
from cua_rl.training.grammars import AllowedTokens
from cua_rl.training.head import TokenScores, token_scores
from cua_rl.training.layers import (
    ATTENTION_KERNELS,
    PACKED_ATTENTION,
    attention_kernel,
    compile_elementwise,
    keep_predictors_only,
    leave_experts_in_files,
    require_separate_sequences,
    separate_sequences,
    stream_frozen_weights,
    use_linear_patch_embedding,
)
from cua_rl.training.libraries import load_with_unsloth
from cua_rl.training.model_files import copy_settings
from cua_rl.training.ranks import Place, shard_weights
from cua_rl.training.vision import BLANKS
from cua_rl.types.errors import ConfigError, TrainingError


class PolicyModel:
    """The trained model: log-probabilities of trained tokens, and its weights as files."""

    def __init__(self, config: TrainerConfig, place: Place | None = None, context: Context = ALONE) -> None:
        place = place or Place()
        self._config = config
        self._context = context
        self.is_sharded = config.sharding in ("full", "hybrid") and place.size > 1
        self.device = find_device(config.gpu_names)
        family = _find_family(config.model_path)
        # Any: Transformers' annotations do not hold for tensors on a device
        base: Any = self._load_base()
        is_streamed = config.sharding == "offload"
        if not self.is_sharded and not is_streamed:
            base.to(device=self.device, dtype=None if config.lora_rank else torch.float32)
        use_linear_patch_embedding(base.model.visual)
        separate_sequences(base.model.language_model)
        if config.kernels == "compiled":
            compile_elementwise(base.model.language_model)
        if config.loader == "unsloth":
            require_separate_sequences(base.model.language_model)
        keep_predictors_only(base.model)
        layers = base.model.language_model.layers
        has_states = any("linear_attn" in dict(layer.named_children()) for layer in layers)
        self.shares_prefixes = not has_states
        """Whether sequences of a row may share a prefix; the state of linear attention would have to branch, too."""
        if self._context.size > 1 and has_states:
            raise ConfigError(
                f"trainer.context_parallel: expected 1 for a model with linear attention, got {self._context.size}; "
                "leave it out"
            )
        self.base: Any = base
        self._adapters = Adapters(base, family, config.lora) if config.lora is not None else None
        self.trains_base = self._adapters is None
        self._require_reachable_vision(config.lora)
        if self.is_sharded:  # layer by layer from main memory, so that the device never holds the whole model
            is_hybrid = config.sharding == "hybrid"
            shard_weights(base, self.device, place, is_hybrid=is_hybrid, computes_in=self.dtype)
            base.to(device=self.device, dtype=torch.float32 if self.trains_base else None)
        elif is_streamed:
            stream_frozen_weights(base)
            base.to(self.device)
        if config.gradient_checkpointing:
            self.recompute_activations(keeps_attention=config.keeps_attention)
        base.train()

    def recompute_activations(self, *, keeps_attention: bool = False) -> None:
        """From now on, recompute each layer's activations in the backward pass instead of keeping them.

        The results of attention may still be kept: they are small for the time that they take.
        """
        how: dict[str, object] = {"use_reentrant": False}
        if keeps_attention:
            how["context_fn"] = partial(create_selective_checkpoint_contexts, ATTENTION_KERNELS)
        self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of matrix products.

        auto is float32 on CPUs, which compute it at least as fast unless they have matrix units for half precision.
        """
        dtype = self._config.dtype
        if dtype == "auto":
            dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        return torch.float32 if dtype == "float32" else torch.bfloat16

    @property
    def attention_kernel(self) -> str:
        """What computes attention inside a packed row."""
        text, head_dim = self.base.config.text_config, self.base.model.language_model.layers[-1].self_attn.head_dim
        heads = (text.num_attention_heads, text.num_key_value_heads, head_dim)
        return attention_kernel(*heads, device=self.device, dtype=self.dtype)

    @property
    def image_token_id(self) -> int:
        return self.base.config.image_token_id

    @property
    def vocabulary_size(self) -> int:
        return self.base.config.text_config.vocab_size

    @property
    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of the optimizer, in a fixed order."""
        if self._adapters is not None:
            return self._adapters.parameters
        return [parameter for parameter in self.base.parameters() if parameter.requires_grad]

    def rope_index(self, input_ids: Tensor, token_types: Tensor, grids: Tensor | None) -> Tensor:
        """The model's own M-RoPE positions of one sequence, [3, 1, seq]."""
        return self.base.model.get_rope_index(input_ids, token_types, image_grid_thw=grids)[0]

    def precision(self) -> AbstractContextManager[None]:
        """The autocast context of every forward pass."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)  # type: ignore[return-value]

    @property
    def trains_vision(self) -> bool:
        """Whether what is trained reaches vision tower or merger."""
        return self._adapters is None or self._adapters.spec.adapts_vision

    @property
    def adapters(self) -> Adapters:
        """What is trained beside the frozen base model; raises `TrainingError` if the base model itself is."""
        if self._adapters is None:
            raise TrainingError("expected a LoRA adapter, got full training: set lora_rank")
        return self._adapters

    def check_added(self, spec: LoraSpec) -> None:
        """Raises `ConfigError` if an adapter cannot be trained beside others."""
        if spec.rank < 1 or spec.alpha < 1 or not spec.modules:
            raise ConfigError(f"expected rank and alpha of at least 1, and modules, got {spec}; change the adapter")
        if self._adapters is None or self._config.sharding == "offload":
            raise ConfigError(
                "trainer: expected adapters on a model in the device's memory to train several models, got "
                f"lora_rank={self._config.lora_rank} and trainer.sharding={self._config.sharding}; train one"
            )
        self._require_reachable_vision(spec)

    def _require_reachable_vision(self, spec: LoraSpec | None) -> None:
        trains_vision, is_streamed = spec is None or spec.adapts_vision, self._config.sharding == "offload"
        if trains_vision and (is_streamed or (self.is_sharded and spec is not None)):
            raise ConfigError(
                "sharding: expected 'replicated' where adapters on the vision tower are trained, and 'replicated' or "
                f"'full' where all weights are, got {self._config.sharding!r}; train an adapter on the language model"
            )

    def scores(
        self,
        micro_batch: MicroBatch,
        features: Mapping[str, Tensor],
        temperature: float,
        allowed: AllowedTokens | None = None,
    ) -> TokenScores:
        """Log-probabilities and entropies of the trained tokens, [n] each; `features` as from `encode_images`.

        They are those among the tokens that are `allowed`, None for all.

        Ranks that share a row call this together, and each gets the values of all its tokens.
        """
        language_model, context = self.base.model.language_model, self._context
        start, end = context.span(micro_batch.num_tokens)
        with self.precision():
            embeddings = language_model.embed_tokens(micro_batch.input_ids[:, start:end].to(self.device))
            deepstack: dict[str, object] = {}
            if micro_batch.image_hashes:
                first, last = map(micro_batch.num_image_tokens, (start, end))
                visual = [features[name] for name in micro_batch.image_hashes]
                levels = _join_features(visual, first, last, like=embeddings)
                is_image = micro_batch.is_image[:, start:end].to(self.device)
                embeddings = embeddings.masked_scatter(is_image[..., None], levels[0])
                if len(levels) > 1:
                    deepstack = {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(levels[1:])}
            if BLANKS in features:
                embeddings = embeddings + features[BLANKS].sum()
            output = language_model(
                inputs_embeds=embeddings,
                position_ids=micro_batch.position_ids[:, :, start:end].to(self.device),
                sequence_lengths=micro_batch.lengths,
                prefixes=[sequence.prefix for sequence in micro_batch.sequences],
                predictors=[places.to(self.device) for places in micro_batch.predictors(start, end)],
                context=context,
                use_cache=False,
                **deepstack,
            )
        # only of the tokens that predict a trained one, [n, hidden]: see `keep_predictors_only`
        hidden = output.last_hidden_state[0]
        # targets are in the order of the row, so those of a rank are neighbours
        places = [micro_batch.num_predicted(bound) for bound in context.bounds(micro_batch.num_tokens)]
        ours = slice(places[context.rank], places[context.rank + 1])
        targets = micro_batch.targets[ours].to(self.device)
        if allowed is not None:
            allowed = AllowedTokens(allowed.rows[ours].to(self.device), allowed.masks.to(self.device))
        own = token_scores(hidden, self.base.lm_head.weight, targets, temperature, allowed)
        counts = [end - start for start, end in pairwise(places)]
        return TokenScores(*(context.gather_scores(values, counts) for values in own))

    def gather_weights(self, *, keep: bool) -> Callable[[Path], None]:
        """What writes `save_weights`' files on a rank that keeps them; all ranks of a sharded model gather together."""
        if self._adapters is not None or not self.is_sharded:
            return self.save_weights
        whole = {name: gather_whole(tensor, keep=keep) for name, tensor in self.base.state_dict().items()}
        return lambda folder: self.save_weights(folder, whole)

    def save_weights(self, folder: Path, whole: Mapping[str, Tensor] | None = None) -> None:
        """Write what a sampler loads into an existing folder: a peft adapter, or the whole model folder."""
        if self._adapters is not None:
            self._adapters.save(folder)
            return
        self.base.save_pretrained(folder, state_dict=whole)
        copy_settings(self._config.model_path, folder)

    def load_weights(self, folder: Path) -> None:
        """Load what `save_weights` wrote."""
        if self._adapters is not None:
            self._adapters.load(folder)
            return
        saved: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        held, found = self.base.state_dict(), saved.state_dict()
        if held.keys() != found.keys():
            others = sorted(held.keys() ^ found.keys())[:5]
            raise TrainingError(f"expected the weights of this model in {str(folder)!r}, got others: {others}")
        with torch.no_grad():
            for name, tensor in found.items():
                held[name].copy_(shard_like(tensor, held[name]))

    def _load_base(self) -> Any:
        """Weights in the working precision; fully trained weights are always float32, autocast does the rest."""
        config, trains_base = self._config, not self._config.lora_rank
        dtype: Any = torch.float32 if trains_base else self.dtype
        if trains_base and (self.is_sharded or self.device.type == "cuda"):
            dtype = "auto"  # converted one by one as they leave main memory, of which all processes share the pages
        attention = {"text_config": PACKED_ATTENTION, "vision_config": "sdpa"}
        if config.loader == "unsloth":
            if config.sharding not in (None, "replicated"):
                raise ConfigError(
                    f"trainer.sharding: expected 'replicated' with trainer.loader=unsloth, which loads the whole model "
                    f"onto each GPU, got {config.sharding!r}; set trainer.loader=hf"
                )
            base = load_with_unsloth(config.model_path, dtype=dtype, device=self.device, trains_base=trains_base)
            base.set_attn_implementation(attention)  # Unsloth chooses one while it loads
            return base
        leave_experts_in_files()
        return AutoModelForImageTextToText.from_pretrained(
            config.model_path, dtype=dtype, attn_implementation=attention, local_files_only=True
        )


def _join_features(images: Sequence[Tensor], first: int, last: int, *, like: Tensor) -> Tensor:
    """Features of a row's image tokens from `first` to `last`, [levels, last - first, hidden].

    Ranks that share the row hold nothing of the others.
    """
    starts = accumulate((image.shape[1] for image in images), initial=0)
    parts = [
        image[:, max(0, first - start) : max(0, last - start)].to(like)
        for image, start in zip(images, starts, strict=False)
    ]
    return torch.cat(parts, dim=1)


def find_device(gpus: Sequence[str]) -> torch.device:
    """Where this process computes: on a GPU, or on the CPU if none is assigned and none can be used.

    Raises:
        ConfigError: GPUs are assigned, but torch cannot use them.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not gpus:
        return torch.device("cpu")
    try:
        torch.cuda.init()
        reason = "no GPU that it can use"
    except (RuntimeError, AssertionError) as error:  # without CUDA, PyTorch asserts
        reason = str(error)
    raise ConfigError(
        f"trainer.gpus: expected GPUs that PyTorch can use ({', '.join(gpus)} are assigned), it says: {reason}; see "
        "what nvidia-smi says and run set-up again (make setup), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


@cache
def describe_machine(device: torch.device, num_processes: int) -> str:
    """What decides how sums are rounded: processor, threads, processes, and the version of PyTorch."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{processor_name()}, threads {torch.get_num_threads()}"
    return f"{processor}, processes {num_processes}, torch {torch.__version__}"


def _find_family(path: Path) -> Family:
    if not (path / "config.json").is_file():
        raise ConfigError(f"expected a model folder with config.json in trainer.model_path, got {str(path)!r}")
    kind = json.loads((path / "config.json").read_text()).get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"expected a model of a type among {sorted(FAMILIES)} in {str(path)!r}, got {kind!r}")
    return FAMILIES[kind]
