# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
"""A model with trainable weights: a LoRA adapter, or everything."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForImageTextToText

from cua_rl.renderers.families import FAMILIES, Family
from cua_rl.training import wire
from cua_rl.training.batching import MicroBatch
from cua_rl.training.checkpoint import gather_whole, shard_like
from cua_rl.training.config import TrainerConfig
from cua_rl.training.context import ALONE, Context
from cua_rl.training.head import TokenScores, token_scores
from cua_rl.training.layers import (
    ATTENTION_KERNELS,
    PACKED_ATTENTION,
    FusedLoraLinear,
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
from cua_rl.training.model_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, copy_settings
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
        if self._context.size > 1 and any("linear_attn" in dict(layer.named_children()) for layer in layers):
            raise ConfigError(
                f"trainer.context_parallel: expected 1 for a model with linear attention, got {self._context.size}; "
                "leave it out"
            )
        self.base: Any = base
        self._peft = _attach_lora(base, family, config) if config.lora_rank else None
        self.trains_base = self._peft is None
        self.trains_vision = self.trains_base or config.adapts_vision
        if self.trains_vision and (is_streamed or (self.is_sharded and not self.trains_base)):
            raise ConfigError(
                "sharding: expected 'none' where adapters on the vision tower are trained, and 'none' or 'full' where "
                f"all weights are, got {config.sharding!r}; train an adapter on the language model"
            )
        if self.is_sharded:  # layer by layer from main memory, so that the device never holds the whole model
            is_hybrid = config.sharding == "hybrid"
            shard_weights(base, self.device, place, is_hybrid=is_hybrid, computes_in=self.dtype)
            base.to(device=self.device, dtype=torch.float32 if self.trains_base else None)
        elif is_streamed:
            stream_frozen_weights(base)
            base.to(self.device)
        self._reference: list[Tensor] | None = None
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
        return [parameter for parameter in self.base.parameters() if parameter.requires_grad]

    def rope_index(self, input_ids: Tensor, token_types: Tensor, grids: Tensor | None) -> Tensor:
        """The model's own M-RoPE positions of one sequence, [3, 1, seq]."""
        return self.base.model.get_rope_index(input_ids, token_types, image_grid_thw=grids)[0]

    def precision(self) -> AbstractContextManager[None]:
        """The autocast context of every forward pass."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)  # type: ignore[return-value]

    @contextmanager
    def base_weights(self) -> Generator[None]:
        """Inside the block the adapter is disabled, which makes this the base model."""
        if self._peft is None:
            raise TrainingError("expected a LoRA adapter to switch off, got full training: set lora_rank")
        with self._peft.disable_adapter():
            yield

    @property
    def has_reference(self) -> bool:
        """Whether the reference model is an adapter instead of the base model."""
        return self._reference is not None

    def load_reference(self, folder: Path) -> None:
        """Keep a frozen copy of an adapter that `save_weights` wrote; the trained weights do not change."""
        if self._peft is None:
            raise TrainingError("expected a LoRA adapter beside which a reference is kept, got full training")
        with self._restored():
            _load_adapter(self._peft, folder)
            self._reference = [parameter.detach().clone() for parameter in self.trainable_parameters]

    @contextmanager
    def reference_weights(self) -> Generator[None]:
        """Inside the block this is the reference model: with the adapter of `load_reference`, or without any."""
        if self._reference is None:
            with self.base_weights():
                yield
            return
        with self._restored():
            _copy(self._reference, self.trainable_parameters)
            yield

    @contextmanager
    def probe_weights(self, probe: wire.Probe) -> Generator[None]:
        """Inside the block the adapter is the probe: the same on every rank, as strong in every layer of its part."""
        if self._peft is None:
            raise TrainingError("expected a LoRA adapter for the probe, got full training: set lora_rank")
        with self._restored(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._config.seed)
            for name, layer in self.base.named_modules():
                if isinstance(layer, LoraLayer):
                    part = "vision" if name.startswith("model.visual.") else "language"
                    _randomise(layer, probe.strength if part == probe.part else 0.0)
            yield

    @contextmanager
    def _restored(self) -> Generator[None]:
        """Restore the trained weights after the block; no autograd graph may need them meanwhile."""
        kept = [parameter.detach().clone() for parameter in self.trainable_parameters]
        try:
            yield
        finally:
            _copy(kept, self.trainable_parameters)

    def scores(self, micro_batch: MicroBatch, features: Mapping[str, Tensor], temperature: float) -> TokenScores:
        """Log-probabilities and entropies of the trained tokens, [n] each; `features` as from `encode_images`.

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
                predictors=[places.to(self.device) for places in micro_batch.predictors(start, end)],
                context=context,
                use_cache=False,
                **deepstack,
            )
        # only of the tokens that predict a trained one, [n, hidden]: see `keep_predictors_only`
        hidden = output.last_hidden_state[0]
        # targets are in the order of the row, so those of a rank are neighbours
        places = [micro_batch.num_predicted(bound) for bound in context.bounds(micro_batch.num_tokens)]
        targets = micro_batch.targets[places[context.rank] : places[context.rank + 1]].to(self.device)
        own = token_scores(hidden, self.base.lm_head.weight, targets, temperature)
        counts = [end - start for start, end in pairwise(places)]
        return TokenScores(*(context.gather_scores(values, counts) for values in own))

    def gather_weights(self, *, keep: bool) -> Callable[[Path], None]:
        """What writes `save_weights`' files on a rank that keeps them; all ranks of a sharded model gather together."""
        if self._peft is not None or not self.is_sharded:
            return self.save_weights
        whole = {name: gather_whole(tensor, keep=keep) for name, tensor in self.base.state_dict().items()}
        return lambda folder: self.save_weights(folder, whole)

    def save_weights(self, folder: Path, whole: Mapping[str, Tensor] | None = None) -> None:
        """Write what a sampler loads into an existing folder: a peft adapter, or the whole model folder."""
        if self._peft is not None:
            weights = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
            on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(on_cpu, folder / ADAPTER_FILE)
            settings = self._peft.peft_config["default"].to_dict()
            settings |= {"inference_mode": True, "base_model_name_or_path": None}
            plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
            (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(plain, indent=2, sort_keys=True, default=str))
            return
        self.base.save_pretrained(folder, state_dict=whole)
        copy_settings(self._config.model_path, folder)

    def load_weights(self, folder: Path) -> None:
        """Load what `save_weights` wrote."""
        if self._peft is not None:
            _load_adapter(self._peft, folder)
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
            if config.sharding not in (None, "none"):
                raise ConfigError(
                    f"trainer.sharding: expected 'none' with trainer.loader=unsloth, which loads the whole model onto "
                    f"each GPU, got {config.sharding!r}; set trainer.loader=hf"
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


@torch.no_grad()
def _randomise(layer: Any, strength: float) -> None:
    """Replace an adapter's B so that the update, scaling * B A, has `strength` times the weight's Frobenius norm."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight  # [rank, in], [out, rank]
    weight = layer.get_base_layer().weight
    norm = torch.linalg.vector_norm(weight, dtype=torch.float32)
    if isinstance(norm, DTensor):  # of a sharded model: all ranks compute it together
        norm = norm.full_tensor()
    b.copy_(torch.randn(b.shape, dtype=torch.float32))
    # |B A|^2 = trace(A^T B^T B A), through matrices of [rank, rank]
    update = ((b.T @ b) * (a @ a.T)).sum().sqrt() * abs(layer.scaling["default"])
    b.mul_(strength * norm / update)


def _find_family(path: Path) -> Family:
    if not (path / "config.json").is_file():
        raise ConfigError(f"expected a model folder with config.json in trainer.model_path, got {str(path)!r}")
    kind = json.loads((path / "config.json").read_text()).get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"expected a model of a type among {sorted(FAMILIES)} in {str(path)!r}, got {kind!r}")
    return FAMILIES[kind]


@torch.no_grad()
def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _attach_lora(base: Any, family: Family, config: TrainerConfig) -> PeftModel:
    targets = "|".join(family.lora_targets[module] for module in config.lora_modules)
    peft_config = PeftLoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=targets, bias="none"
    )
    peft_config._register_custom_module({torch.nn.Linear: FusedLoraLinear})  # pyright: ignore[reportPrivateUsage]
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        adapted = get_peft_model(base, peft_config)
    assert isinstance(adapted, PeftModel)
    return adapted


def _load_adapter(model: PeftModel, folder: Path) -> None:
    saved = load_file(folder / ADAPTER_FILE)
    expected = {
        name: tensor.shape for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    found = {name: tensor.shape for name, tensor in saved.items()}
    if expected != found:
        name = next(name for name in sorted(expected | found) if expected.get(name) != found.get(name))
        raise TrainingError(
            f"expected {name!r} with shape {expected.get(name)} in {str(folder)!r}, got {found.get(name)}: the adapter "
            "was made for another model, with another rank or other lora_modules"
        )
    set_peft_model_state_dict(model, saved)
