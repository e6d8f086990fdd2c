"""Reads and writes Hugging Face directories: model, head and tokenizer. Nothing missing or misshapen is accepted."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args
from unittest.mock import patch

import torch
from torch import nn

from coalign.backends import attention, lora, vision_language
from coalign.backends.known_models import find_known_model
from coalign.backends.unfit_weights import describe_layers_beyond, refuse_unfit
from coalign.backends.vision import list_placeholder_ids
from coalign.config.errors import ConfigError, ConfigProblem, find_nearest
from coalign.config.schema import ImagesConfig, ModelConfig, ScoreAt
from coalign.data.images.expansion import Placeholders
from coalign.data.images.image_files import ImageFiles
from coalign.data.images.processor import ImageProcessor
from coalign.data.templates import read_template, store_arguments
from coalign.devices import seed_generator
from coalign.files import list_weight_files, read_json_object, read_model_config
from coalign.hub import find_directory
from coalign.roles import Context
from coalign.weights.model_files import check_model_files, check_tokenizer_files, has_tokenizer, read_stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.quantizers.base import HfQuantizer

log = logging.getLogger(__name__)

NO_ATTENTION_INTERFACE = (
    "{} does not call transformers' attention interface, so it cannot compute packed sequences; set `rows: padded` "
    "(docs/backends.md)"
)
TRAINED_AT: ScoreAt = "last_trained"  # the token whose score the recipes train
MIXERS = {"full_attention", "sliding_attention"}


_BUILD_LOCK = threading.RLock()


@contextmanager
def building() -> Iterator[None]:
    """Let only one thread of the process at a time build, read or write a model. transformers replaces functions of all
    models meanwhile: how weights are drawn and tied, the default dtype, the default device. Two models that load side
    by side would lose their tied weights."""
    with _BUILD_LOCK:
        yield


def read_config(config: ModelConfig) -> PretrainedConfig:
    """The architecture in ``config.load``. Raises what `get_directory` raises."""
    directory = get_directory(config)
    if not (directory / "config.json").is_file():
        raise ValueError(f"models.*.load: '{directory}' is not a Hugging Face model directory (no config.json there)")
    from transformers import AutoConfig  # here and below: two seconds, which `coalign check` of a plain model saves

    check_architecture(directory)
    hf = AutoConfig.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
    text = hf.get_text_config()
    text.use_cache = False
    if hasattr(text, "rescale_every"):  # RWKV would divide its weights in place whenever it does not train
        text.rescale_every = 0
    if config.head != "lm":
        hf.num_labels = 1
    if config.head == "reward" and not config.frozen:
        hf.score_at = TRAINED_AT
    return hf


def check_architecture(directory: Path) -> None:
    """Refuse (ValueError) a model type that transformers does not know and whose directory names no code for it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = read_model_config(directory)
    model_type = fields.get("model_type")
    if "auto_map" in fields or model_type is None or model_type in CONFIG_MAPPING:
        return
    nearest = find_nearest(str(model_type), CONFIG_MAPPING)
    hint = f"did you mean `{nearest}`?" if nearest else "update transformers, or take another model"
    raise ValueError(
        f"'{directory}/config.json' has the model type `{model_type}`, which transformers {transformers.__version__} "
        f"does not know; {hint}"
    )


def find_score_at(config: ModelConfig, hf: PretrainedConfig) -> ScoreAt:
    """Return where the score of a conversation is read: as the settings say, else the model's config.json, else where
    Coalign trains it. ValueError for a value in config.json that is none."""
    said = config.score_at or getattr(hf, "score_at", TRAINED_AT)
    if said not in get_args(ScoreAt):
        raise ValueError(f"{config.load}/config.json: score_at: {said!r} is none of {', '.join(get_args(ScoreAt))}")
    return cast(ScoreAt, said)


def get_directory(config: ModelConfig) -> Path:
    """Return the directory of ``config.load``; ValueError where it is missing, HubError where it was not fetched."""
    if config.load is None:
        raise ValueError("models.*.load is missing: a Hugging Face model directory, or a name of the hub")
    return find_directory(config.load)


@building()
def load(config: ModelConfig, *, seed: int, name: str = "*", packed: bool = True) -> PreTrainedModel:
    """Load the model to the CPU, as ``config.load``, ``init``, ``head``, ``head_init`` and ``lora`` say.

    ``name``: the model's, for messages. ``packed``: it will compute packed sequences. A value or reward model is
    transformers' sequence classifier of one label, so its head has the name that such checkpoints give it. Raises
    ValueError, with their names, for weights that the checkpoint lacks, and for adapters that do not fit;
    NotImplementedError for a family that cannot be ``packed``.
    """
    hf, quantization = read_config(config), _quantization(config)
    auto, options = _find_class(hf, config), _options(config, hf, packed=packed)
    if config.init == "random":
        with seed_generator("cpu", seed):
            model = build_model(auto.from_config, _refuse(hf), hf, **options)
    else:
        check_model_files(get_directory(config))
        # Weights of another shape are refused below, by their names.
        options |= {"config": hf, "output_loading_info": True, "ignore_mismatched_sizes": True, **quantization}
        model, info = build_model(auto.from_pretrained, _refuse(hf), get_directory(config), **options)
        refuse_unfit(config, model, info)
        if beyond := describe_layers_beyond(config, model, info):
            log.warning("%s; they are left out", beyond)
        if quantization:
            _keep_quantized(model)
    if config.head != "lm" and config.head_init == "zero":
        nn.init.zeros_(model.get_parameter("score.weight"))
    _reduce_to_text(model, config, name)
    dropped = vision_language.has_towers(model.config) and config.vision is None
    if dropped and not config.frozen and not list_weight_files(get_directory(config)):
        raise ValueError(f"{config.load} has no model.safetensors, from which an export takes the vision tower")
    if packed:
        _check_interface(model)
    if has_adapters(config):
        lora.attach(model, config, seed=seed, name=name)
        if config.lora and config.lora.load:
            lora.load(model, find_directory(config.lora.load), name)
        count, total = model.num_parameters(only_trainable=True), model.num_parameters()
        log.info(f"models.{name} trains {count:,} of {total:,} parameters ({100 * count / total:.2f} %)")
    return model


@building()
def check_weights(config: ModelConfig) -> None:
    """Raise what `load` raises for files that are no weights, or not those of the architecture. No values are read.
    ValueError also for layers beyond the architecture, which `load` leaves out with a warning. Of pickles and quantised
    weights the tensors are not compared."""
    if config.init == "random":
        return
    check_model_files(get_directory(config))
    stored, plain = read_stored(get_directory(config)), find_known_model(config)
    if plain is not None and stored and plain.fits(stored, config):
        return
    hf = read_config(config)
    if not stored or getattr(hf, "quantization_config", None):
        return
    with torch.device("meta"):
        skeleton = _find_class(hf, config).from_config(hf, trust_remote_code=config.trust_remote_code)
        state = {name: torch.empty(tensor.shape) for name, tensor in stored.items()}
    options = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = type(skeleton).from_pretrained(None, config=hf, state_dict=state, **options)
    refuse_unfit(config, model, info)
    if beyond := describe_layers_beyond(config, model, info):
        raise ValueError(beyond)


@building()
def build_skeleton(config: ModelConfig, *, name: str = "*", packed: bool = True) -> PreTrainedModel:
    """Build the model on the meta device, without weights. ``packed``: as in `load`."""
    hf = read_config(config)
    with torch.device("meta"):
        make, options = _find_class(hf, config).from_config, _options(config, hf, packed=packed)
        model = build_model(make, _refuse(hf), hf, **options)
        _reduce_to_text(model, config, name)
        if packed:
            _check_interface(model)
        if has_adapters(config):
            lora.attach(model, config, seed=0, name=name)
    return model


def _refuse(hf: PretrainedConfig) -> Exception:
    return NotImplementedError(NO_ATTENTION_INTERFACE.format(f"the model type `{hf.model_type}`"))


def has_adapters(config: ModelConfig) -> bool:
    """Whether the model has adapters: its own if it is trained, trained ones that it loads if it is frozen."""
    return config.lora is not None and (not config.frozen or config.lora.load is not None)


def read_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises what `open_tokenizer` raises."""
    return open_tokenizer(find_tokenizer(config), trust_remote_code=config.trust_remote_code)


def open_tokenizer(directory: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory. ValueError where there is none, and for files that are something else."""
    check_tokenizer_files(directory)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except ValueError:
        for file in directory.glob("*token*.json"):
            read_json_object(file)  # names a damaged one
        raise


def find_tokenizer(config: ModelConfig) -> Path:
    """The directory of the model's tokenizer."""
    return find_directory(config.tokenizer) if config.tokenizer else get_directory(config)


def read_processor(config: ModelConfig, images: ImagesConfig | None = None) -> ImageProcessor | None:
    """The processor of images of a model that sees; None for one that reads text alone."""
    settings = images or ImagesConfig()
    return ImageProcessor(get_directory(config), read_tokenizer(config), settings) if config.vision else None


def read_placeholders(config: ModelConfig, images: ImagesConfig | None = None) -> Placeholders | None:
    """The placeholders of images in messages for a model that sees; None for one that reads text alone."""
    if (processor := read_processor(config, images)) is None:
        return None
    settings = processor.settings
    return Placeholders(processor, ImageFiles(Path(settings.root or ""), settings.max_file_pixels))


def read_run_tokenizer(context: Context) -> PreTrainedTokenizerBase:
    """The tokenizer of the run, whose ids the batches hold."""
    return open_tokenizer(find_directory(str(context.tokenizer)), trust_remote_code=context.trust_tokenizer)


def list_forbidden_ids(config: ModelConfig, context: Context, vocabulary: int) -> list[int]:
    """The ids of a language model's ``vocabulary`` that have no probability: placeholders of images for one that sees,
    and in what samples, and what it trains, those without a token."""
    forbidden = set(list_placeholder_ids(read_config(config), vocabulary) if config.vision is not None else ())
    if context.tokens_only:
        uses_model_tokenizer = config.chat_template or config.judge or context.tokenizer is None
        tokenizer = read_tokenizer(config) if uses_model_tokenizer else read_run_tokenizer(context)
        forbidden |= {*_list_tokenless_ids(tokenizer, vocabulary)}
    return sorted(forbidden)


def _list_tokenless_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> list[int]:
    """The ids of a model's ``vocabulary`` that stand for no token: rows that pad it, and gaps."""
    named = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder}
    return [i for i in range(vocabulary) if i not in named and not _has_token(tokenizer, i)]


def _has_token(tokenizer: PreTrainedTokenizerBase, number: int) -> bool:
    """Whether there is a text for an id. Of two tokens of one text a vocabulary shows one."""
    try:
        token = tokenizer.convert_ids_to_tokens(number)
    except (IndexError, KeyError, ValueError, OverflowError):
        return False
    return bool(token) and token != tokenizer.unk_token


def read_context_length(hf: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that the architecture can read as it reads others, where it says so."""
    longest, limit = getattr(hf.get_text_config(), "max_position_embeddings", None), read_rope_limit(hf)
    return longest if limit is None else limit[1]


def read_rope_limit(hf: PretrainedConfig) -> tuple[str, int] | None:
    """The type of rotary embeddings whose frequencies depend on a row's longest sequence, and the longest one that
    leaves them unchanged; None for types with constant frequencies.

    Above that length transformers computes a sequence differently in a batch than alone, and a token differently than
    when it was sampled, if the sequence was shorter then (modeling_rope_utils.dynamic_rope_update).
    """
    text = hf.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    # One set of parameters for the model, or one for each type of layers.
    for rope in (parameters, *(nested for nested in parameters.values() if isinstance(nested, dict))):
        rope_type = rope.get("rope_type") or ""
        if rope_type == "longrope":
            return rope_type, rope["original_max_position_embeddings"]
        if "dynamic" in rope_type:
            return rope_type, text.max_position_embeddings
    return None


def find_context_length(config: ModelConfig) -> int | None:
    """Find what `read_context_length` returns for the architecture in ``config.load``."""
    plain = find_known_model(config)
    return read_context_length(read_config(config)) if plain is None else plain.context


def find_rope_limit(config: ModelConfig) -> tuple[str, int] | None:
    """Find what `read_rope_limit` returns for the architecture in ``config.load``."""
    return read_rope_limit(read_config(config)) if find_known_model(config) is None else None


def check_context(config: ModelConfig, name: str) -> None:
    """Refuse (ConfigError) responses that are longer than all that a policy reads, prompt included."""
    longest, limit = config.sampling.max_new_tokens, find_context_length(config)
    if limit is not None and longest >= limit:
        message = f"is {longest}, and the model reads {limit} tokens at once, prompt included (config.json)"
        raise ConfigError([ConfigProblem(("models", name, "sampling", "max_new_tokens"), message)])


def check_row_length(config: ModelConfig, name: str, max_tokens: int | None) -> None:
    """Refuse (ValueError) rows of up to `data.max_tokens` where rotary embeddings change with the longest of them."""
    limit = find_rope_limit(config)
    if limit and (max_tokens is None or max_tokens > limit[1]):
        raise ValueError(
            f"data.max_tokens is {max_tokens}: rotary embeddings of models.{name} (type `{limit[0]}`) change above "
            f"{limit[1]} tokens with the longest sequence of a row, so the others would be computed wrongly; set it to "
            f"{limit[1]} or less"
        )


def check_rope_length(rope_type: str, limit: int, longest: int) -> None:
    """Raise ValueError for a sequence of more than ``limit`` tokens; see `read_rope_limit`."""
    if longest > limit:
        raise ValueError(
            f"config.json: rotary embeddings of type `{rope_type}` change above {limit} tokens with the longest "
            f"sequence of a row, and here is one of {longest}: the others would be computed wrongly. Keep sequences "
            f"within {limit} tokens: data.max_tokens, or data.max_prompt_tokens and sampling.max_new_tokens together"
        )


def save_tokenizer(config: ModelConfig, context: Context, dir: str | Path) -> None:
    """Write the model's tokenizer, with the chat template of the run and its arguments as defaults. A run without
    templates (`none`) leaves the tokenizer's own. A trainer reads tokens, so it need not have one."""
    if not has_tokenizer(find_tokenizer(config)):
        return
    tokenizer, name = read_tokenizer(config), context.chat_template
    if name != "none" and (name != "auto" or tokenizer.chat_template):
        jinja = tokenizer.get_chat_template() if name == "auto" else read_template(name)
        arguments = {**context.chat_template_kwargs, "reasoning_policy": context.reasoning}
        if (stored := store_arguments(jinja, arguments)) != jinja or name != "auto":
            tokenizer.chat_template = stored
            (Path(dir) / vision_language.LEGACY_TEMPLATE).unlink(missing_ok=True)  # that of the base
    tokenizer.save_pretrained(dir)


def build_writer(
    model: PreTrainedModel, config: ModelConfig, context: Context, dir: str | Path
) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return the function that writes weights, config.json and tokenizer so that ``from_pretrained`` loads them. A
    vision-language model gets the rest of it from the directory that was loaded. The function reads no values of
    ``model``, so another thread may call it while the model trains."""
    carries = config.head == "lm" and vision_language.has_towers(model.config) and config.vision is None
    # Here, because FSDP reshards a model that is asked for its state.
    state = {name.replace(lora.BASE, ""): tensor for name, tensor in model.state_dict().items()} if carries else {}

    def write(weights: dict[str, torch.Tensor]) -> None:
        _save_model(model, dir, state_dict=weights, save_original_format=config.export_experts == "separate")
        if carries:
            vision_language.carry_towers(model, state, get_directory(config), Path(dir))
        elif config.vision is not None:
            vision_language.copy_processor(get_directory(config), Path(dir))
        save_tokenizer(config, context, dir)

    return write


@building()
def _save_model(model: PreTrainedModel, dir: str | Path, **options: Any) -> None:
    """Write a model that nothing wraps, with transformers' ``options``. To unwrap it, transformers would ask
    accelerate, which imports DeepSpeed where it is installed, and DeepSpeed MLflow: four seconds of every process that
    saves."""
    from transformers import modeling_utils

    with patch.object(modeling_utils, "unwrap_model", lambda model: model), transpose_back():
        model.save_pretrained(dir, **options)


def transpose_back() -> Any:
    """A context in which transformers stores experts of Qwen3-VL as on the hub. Else it leaves them as in memory, since
    it transposes only what has another shape than the hub's; vLLM reads only the transposed form."""
    from transformers.core_model_loading import Transpose

    return patch.object(Transpose, "reverse_op", property(lambda op: Transpose(op.dim1, op.dim0)))


def find_auto_class(hf: PretrainedConfig, head: str = "lm", *, trust_remote_code: bool = False) -> Any:
    """Choose transformers' auto class for ``hf``. Raises ValueError where it has none. Some families have a class of
    the whole model and one of its language model alone: config.json names one of them."""
    import transformers

    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    visual: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING  # maps to classes, whatever it declares
    auto, supported, what = transformers.AutoModelForCausalLM, causal, "causal LM"
    if head != "lm":
        auto = transformers.AutoModelForSequenceClassification
        supported = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        what = f"sequence classifier, as `head: {head}` needs one,"
    elif type(hf) in visual and (type(hf) not in causal or visual[type(hf)].__name__ in (hf.architectures or ())):
        auto, supported = transformers.AutoModelForImageTextToText, visual
    if (type(hf) not in supported and not trust_remote_code) or (supported is visual and hf.is_encoder_decoder):
        raise ValueError(f"models.*.load: transformers has no {what} for the model type `{hf.model_type}`")
    return auto


def _find_class(hf: PretrainedConfig, config: ModelConfig) -> Any:
    """The class of transformers, or for the head of a model that sees one made of its parts, to build or load with."""
    import transformers

    visual: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    has_classifier = type(hf) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or type(hf) not in visual
    if config.head != "lm" and config.vision is not None and not has_classifier:
        return vision_language.build_classifier(visual[type(hf)])
    return find_auto_class(hf, config.head, trust_remote_code=config.trust_remote_code)


def build_model(make: Callable[..., Any], refusal: Exception, *arguments: Any, **options: Any) -> Any:
    """Call ``make``. Raises ``refusal`` for a class that looks attention up in a table of its own."""
    try:
        return make(*arguments, **options)
    except KeyError as problem:
        if problem.args != (options.get("attn_implementation"),):
            raise
        raise refusal from problem


def describe_encoder(model: PreTrainedModel) -> str | None:
    """Why ``model`` cannot predict the next token, if it is an encoder; None for a decoder."""
    from transformers import PreTrainedModel

    layers = [layer for layer in model.modules() if not isinstance(layer, PreTrainedModel)]
    sides = [layer.is_decoder for layer in layers if hasattr(layer, "is_decoder")]
    if not sides or any(sides):
        return None
    return "it is an encoder: its tokens see those that follow (`is_decoder` is false in config.json)"


def _reduce_to_text(model: PreTrainedModel, config: ModelConfig, name: str) -> None:
    """Take the towers out of a vision-language model, unless it is to see. Raises ValueError for one that reads no text
    without an image, and for one without weights: an export needs those of the towers."""
    arguments = inspect.signature(model.forward).parameters.values()
    needed = {a.name for a in arguments if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD} - {"input_ids"}
    what = f"models.{name}.load: {type(model).__name__}"
    if needed:
        raise ValueError(f"{what} computes no text alone: it needs {sorted(needed)}")
    if config.vision is not None and not vision_language.has_towers(model.config):
        remedy = f"; to let it judge texts, set models.{name}.judge.show_images: false" if config.judge else ""
        raise ValueError(f"{what} reads no images, and data.images is for models that do{remedy}")
    if config.vision is not None:
        return
    if config.init == "random" and vision_language.has_towers(model.config):
        raise ValueError(
            f"models.{name}.init is random: {type(model).__name__} learns from text alone, so its vision tower has to "
            "come from weights; use `init: load`"
        )
    vision_language.drop_towers(model)


def _check_interface(model: PreTrainedModel) -> None:
    """Raise NotImplementedError for a model that cannot compute packed rows, as where layers mix tokens by other means
    than attention: the sequences would see each other."""
    if types := set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - MIXERS:
        raise NotImplementedError(f"layers of type {sorted(types)} cannot compute packed sequences; set `rows: padded`")
    if not model._supports_attention_backend:
        raise NotImplementedError(NO_ATTENTION_INTERFACE.format(type(model).__name__))


def _options(config: ModelConfig, hf: PretrainedConfig, *, packed: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "trust_remote_code": config.trust_remote_code}
    if not packed:
        return options
    implementation = choose_attention(hf, attention.register_attention(), sees=config.vision is not None)
    return options | {"attn_implementation": implementation}


def choose_attention(hf: PretrainedConfig, name: str, *, sees: bool) -> str | dict[str, str]:
    """``name`` for the language model of ``hf``; the towers of a model that sees compute by torch."""
    if not sees:
        return name
    text = hf.get_text_config()
    return {"": name} | {key: name if getattr(hf, key) is text else "sdpa" for key in hf.sub_configs}


def _quantization(config: ModelConfig) -> dict[str, Any]:
    """Arguments for QLoRA's NF4 with quantised constants (2305.14314), in every linear layer but the head."""
    if config.lora is None or config.lora.base_bits is None:
        return {}
    from transformers import BitsAndBytesConfig

    dtype, head = getattr(torch, config.compute_dtype or config.dtype), ["lm_head", "score"]
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    quantization = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=head, **nf4)
    return {"quantization_config": quantization, "device_map": {"": "cpu"}}


def _keep_quantized(model: PreTrainedModel) -> None:
    """Keep the 4-bit weights, and drop the settings that say so from the model's config: it is exported in full."""
    cast("HfQuantizer", model.hf_quantizer).remove_quantization_config(model)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # repacks the weights, with less precise scales, in eval mode
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (a plain attribute of bitsandbytes)
