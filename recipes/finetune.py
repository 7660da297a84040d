"""Fine-tune a patched model for a longer context, with LoRA or all weights.

    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/finetune.py \
        --config recipes/llama3_8b_yarn_lora.yaml --learning_rate 1e-5

Settings come from the YAML file; the command line overrides it. They are those in
recipes/settings.py and all of transformers' TrainingArguments.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import peft
import torch
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_utils import set_zero3_state
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput

import rope_ext
from recipes import data, evaluation, positions
from recipes.chat import require_template
from recipes.contents import Contents, beginning_of
from recipes.files import is_saved
from recipes.loss import ChunkedLoss, WeightedLoss, label_sums
from recipes.parallel import (
    check_fractions,
    check_parallelism,
    check_processes,
    context_parallel_size,
    leave,
    shares_heads,
    warn_of_launch,
)
from recipes.restoration import restoration_loss
from recipes.retrieval import RetrievalRows
from recipes.settings import (
    ALL_LINEAR,
    CHAT,
    LONG_ROWS,
    NONE,
    STOP,
    STREAM,
    Recipe,
    check_data,
    check_output,
    check_together,
    finished,
    how_to_resume,
    length_of,
    lora_options,
    method_of,
    output_of,
    parts,
    read_settings,
    save_from,
    scheme_of,
    separates,
    warn_of_gaps,
    write_settings,
)
from recipes.stream import Stream
from recipes.vocabulary import Embedded, Vocabulary
from rope_eval.folder import HIDDEN, lock
from rope_ext.command.terminal import first_process, show, stoppable, tell, tell_next, unused
from rope_ext.config.nested import text_of
from rope_ext.encodings import Encoding
from rope_ext.errors import (
    AlreadyPatchedError,
    AlreadyScaledError,
    Mistakes,
    OptionError,
    RopeExtError,
    first_line,
)
from rope_ext.methods import DynamicMethod, Method, SSMax, Temperature, extended_length
from rope_ext.methods.checked import not_none
from rope_ext.options import SlidingLayers
from rope_ext.position.learned import TEMPERATURE, learned
from rope_ext.rotary.sites import find_sites, text_decoder
from rope_ext.saving.checkpoints import load_config, load_tokenizer, loader, saved_under
from rope_ext.saving.drafts import write_whole
from rope_ext.saving.folder import patch_without_weights

FITTED_ROWS = 16
"""Number of rows to which ``init: model`` fits an encoding."""


class DivergedError(RopeExtError):
    """Training has diverged: a loss or a weight is NaN or infinite."""


@dataclass(frozen=True)
class Plan:
    """The result of checking a recipe.

    Args:
        config: configuration of the model.
        tokenizer: tokenizer of the model.
        vocabulary: which of its tokens the model has an embedding of.
        trained: context length before training, tokens.
        target: context length after training, tokens.
        eval_length: length of evaluation rows and passkey prompts, tokens.
        passkeys: passkey prompts to evaluate.
        resume: ``--resume_from_checkpoint`` as it was given.
    """

    config: Any
    tokenizer: Any
    vocabulary: Vocabulary
    trained: int
    target: int
    eval_length: int
    passkeys: list[Any]
    resume: str | None


def check(recipe: Recipe, args: Any, mistakes: Mistakes | None = None) -> Plan:
    """Check everything that needs neither weights nor data.

    Args:
        recipe: the recipe.
        args: TrainingArguments, or their plain values if transformers rejected them.
        mistakes: mistakes found so far.

    Raises:
        RopeExtError: lists all settings that are missing, unknown or incompatible.
    """
    mistakes = Mistakes() if mistakes is None else mistakes
    resume = args.resume_from_checkpoint  # which check_output replaces by a path
    with mistakes.collected():
        check_processes(args.world_size, getattr(args, "n_gpu", 1))
    check_together(recipe, args, mistakes)
    with mistakes.collected():
        check_output(recipe, args)
    with mistakes.collected():
        _check_places(recipe, args)
    config = None
    tokenizer = None
    vocabulary = Vocabulary(None, math.inf)
    if recipe.model is not None:
        with mistakes.collected():
            config = load_config(recipe.model)
            tokenizer = load_tokenizer(recipe.model)
            embeddings = getattr(text_of(config), "vocab_size", math.inf)
            vocabulary = Vocabulary(tokenizer, embeddings)
            vocabulary.require_written(uses_chat(recipe))
    # Building a model would report the same mistakes again, in transformers' words.
    buildable = not mistakes
    trained = 0
    target = 0
    if config is not None and recipe.length is not None:
        with mistakes.collected():
            _check_parallelism(recipe, args, config)
        with mistakes.collected():
            trained, target = _check_length(recipe, config)
    if buildable:
        with mistakes.collected():
            _check_model(recipe, config)
    if tokenizer is not None and recipe.length is not None and recipe.retrieval_share > 0:
        with mistakes.collected():
            RetrievalRows(tokenizer, recipe.retrieval_share).require_room(recipe.length)
    if tokenizer is not None and uses_chat(recipe):
        with mistakes.collected():
            require_template(tokenizer)
    cases = []
    length = recipe.eval_length or target
    if length and args.eval_strategy != "no" and tokenizer is not None:
        with mistakes.collected():
            cases = evaluation.passkeys(tokenizer, length, recipe.eval_passkeys)
    mistakes.report()
    return Plan(
        config=config,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        trained=trained,
        target=target,
        eval_length=length,
        passkeys=cases,
        resume=resume,
    )


def uses_chat(recipe: Recipe) -> bool:
    """Whether a dataset of the recipe has conversations."""
    try:
        return any(part.format == CHAT for part in parts(recipe))
    except OptionError:  # reported with the other settings
        return False


def template_of(recipe: Recipe, plan: Plan) -> str | None:
    """A hash of the chat template that a run on conversations uses; None for text alone."""
    if not uses_chat(recipe):
        return None
    return beginning_of([plan.tokenizer.chat_template]).digest


def _check_places(recipe: Recipe, args: Any) -> None:
    """Raise OptionError if what the run writes would become a part of the data that it reads."""
    output = output_of(args).resolve()
    try:
        read = [("--dataset", part.dataset) for part in parts(recipe)]
    except OptionError:  # reported with the other settings
        return
    if recipe.eval_dataset is not None and args.eval_strategy != "no":
        read.append(("--eval_dataset", recipe.eval_dataset))
    for option, name in read:
        folder = Path(name).resolve()
        reads = name and folder.is_dir() and not is_saved(folder)
        if not (reads and output.is_relative_to(folder)):
            continue
        # Files in hidden directories are not read.
        if not any(part.startswith(".") for part in output.relative_to(folder).parts):
            raise OptionError(
                f"--output_dir {args.output_dir} is in {option} {name}, so the run would be part "
                f"of its own data and could not be resumed; give another --output_dir"
            )


def _check_parallelism(recipe: Recipe, args: Any, config: Any) -> None:
    """Raise OptionError for a recipe that context or sequence parallelism would train otherwise."""
    cp_size = context_parallel_size(args.parallelism_config)
    if recipe.restoration and cp_size > 1:
        raise OptionError(
            "--restoration needs whole rows, which context parallelism splits; give --restoration "
            "0, or launch with recipes/accelerate/fsdp2.yaml"
        )
    if recipe.retrieval_share and cp_size > 1:  # ranks split only the inputs that Trainer knows
        raise OptionError(
            f"--retrieval_share {recipe.retrieval_share:g} weights the loss of labels, which "
            f"devices that share a row do not; give --retrieval_share 0, or launch with "
            f"recipes/accelerate/fsdp2.yaml"
        )
    if shares_heads(args.parallelism_config):
        _check_ulysses(recipe, args, cp_size)
    check_parallelism(
        method_of(recipe),
        config,
        cp_size=cp_size,
        attn_implementation=recipe.attn,
        document_masking=separates(recipe),
        length=recipe.length,
    )
    if recipe.positions == "random_floats":
        check_fractions()


def _check_ulysses(recipe: Recipe, args: Any, sp_size: int) -> None:
    """Raise OptionError where Ulysses would not take the mean over all labels of a step."""
    other = "launch with recipes/accelerate/deepspeed_zero3.yaml"
    if args.eval_strategy != "no":
        raise OptionError(
            f"--eval_strategy {args.eval_strategy} does not work with Ulysses, which shares rows "
            f"of training only; leave it out and evaluate with rope-ext eval, or {other}"
        )
    if args.per_device_train_batch_size > 1 and not args.dataloader_drop_last:
        raise OptionError(
            "with Ulysses all batches have the same number of rows; give --dataloader_drop_last "
            "true, or --per_device_train_batch_size 1"
        )
    # Trainer takes the mean of the batches' means, which is the mean of labels for equal numbers.
    several = args.gradient_accumulation_steps > 1 or args.world_size > sp_size
    if several and uses_chat(recipe):
        raise OptionError(
            f"rows with different numbers of labels (--format chat) do not work with Ulysses in "
            f"steps of several batches, whose loss would not be a mean over labels; give "
            f"--gradient_accumulation_steps 1 and --num_processes {sp_size}, or {other}"
        )


def _check_length(recipe: Recipe, config: Any) -> tuple[int, int]:
    """Return the trained and the target length in tokens, between which rows can train.

    Raises:
        OptionError: rows of the given length cannot train for the target.
    """
    method = method_of(recipe)
    scheme = scheme_of(recipe)
    length = length_of(recipe)
    # For its lengths alone: --attn and --dtype are checked elsewhere, with messages of their own.
    bare = _bare(replace(recipe, attn=None, dtype="float32"), config, meta=True)
    trained, target = lengths(recipe, bare)
    if scheme == "mixed_windows":
        _check_windows(recipe, bare, trained)
    if scheme not in LONG_ROWS and length >= target:
        raise OptionError(
            f"--length {length} is too long for --positions {scheme}, since the target is "
            f"{target} tokens; give a shorter --length, such as the trained {trained}, or "
            f"--positions consecutive"
        )
    warn_of_gaps(recipe, method)
    # An encoding is new to the model at any length; DroPE trains at the trained length.
    own = method is not None and method.allows_factor_one and length == trained
    if scheme in LONG_ROWS and not own and not trained < length <= target:
        raise OptionError(
            f"--length {length} must be longer than the trained {trained} tokens and at "
            f"most the target of {target}; give --positions pose to train on short rows, or "
            f"another --length or --factor"
        )
    return trained, target


def _check_windows(recipe: Recipe, model: Any, trained: int) -> None:
    """Check that short windows run under the trained frequencies, as they will in inference."""
    method = method_of(recipe)
    length = torch.tensor([trained], dtype=torch.float64)
    for site in find_sites(text_decoder(model), recipe.original_max_position_embeddings):
        if not (
            isinstance(method, DynamicMethod)
            and method.is_dynamic
            # Without an absolute tolerance: slow frequencies are below 1e-5 radians per token.
            and torch.allclose(method.inv_freq_at(site.rope, length), site.rope.inv_freq, atol=0)
            and float(method.attention_scaling_at(site.rope, length)) == 1
            and _same_queries(method.tempered(site.rope), trained)
        ):
            raise OptionError(
                f"--positions mixed_windows needs a method that changes nothing within the trained "
                f"length, unlike {recipe.method} with these options; give --method dynamic_yarn or "
                f"dynamic_ntk, or longrope with a short_factor of ones and attention_factor 1"
            )


def _same_queries(temperature: Temperature | None, trained: int) -> bool:
    """Whether a temperature multiplies no query within the trained length."""
    last = torch.tensor([trained - 1], dtype=torch.float64)  # temperatures only grow
    if isinstance(temperature, SSMax):  # whatever its scales have learned
        return float(temperature.growth(last)) == 0
    return temperature is None or float(temperature.at(last)) == 1


def _check_model(recipe: Recipe, config: Any) -> None:
    """Build the model without weights, to find errors early."""
    model = _extend(recipe, _bare(recipe, config, meta=True), meta=True)
    if not recipe.chunked_loss:
        return
    ids = torch.zeros((1, 4), dtype=torch.long, device="meta")
    try:
        model(input_ids=ids, labels=ids)
    except RopeExtError:
        raise
    except RuntimeError:
        # Some operators do not run on meta tensors; then errors show in the first training step.
        return
    except Exception as error:  # of the model's code, such as a router that LoRA has wrapped
        raise OptionError(
            f"{recipe.model} cannot be trained so: its forward fails ({type(error).__name__}: "
            f"{first_line(error)}); give --lora_target other layers, such as q_proj k_proj v_proj "
            f"o_proj"
        ) from error


def _bare(recipe: Recipe, config: Any, meta: bool) -> Any:
    """Load the model without a patch; with ``meta``, build it without weights."""
    options: dict[str, Any] = {"dtype": recipe.dtype}
    if recipe.attn is not None:
        options["attn_implementation"] = recipe.attn
    if meta:
        # Under ZeRO-3, transformers would partition and initialize meta tensors.
        try:
            with set_zero3_state(), torch.device("meta"):
                return _without_weights(copy.deepcopy(config), **options)
        except (ImportError, ValueError) as error:
            raise OptionError(
                f"transformers cannot build {recipe.model} with --attn {recipe.attn} "
                f"({first_line(error)}); give --attn {'eager' if recipe.attn == 'sdpa' else 'sdpa'}"
                f", or another --model"
            ) from error
    if recipe.quantize:
        options["quantization_config"] = quantization(recipe)
    model = not_none(recipe.model)
    return loader(model, config)(model, **options)


def quantization(recipe: Recipe) -> BitsAndBytesConfig:
    """How bitsandbytes quantizes the base weights."""
    if recipe.quantize_bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=recipe.dtype,
        bnb_4bit_quant_storage=recipe.dtype,  # FSDP needs one dtype for all weights
    )


def _without_weights(config: Any, **options: Any) -> Any:
    """Build a model without weights from a configuration, with the patch it was saved with."""
    record = saved_under(config)
    if record is None:
        return AutoModelForCausalLM.from_config(config, **options)
    model = AutoModelForCausalLM.from_config(record.restored(config), **options)
    return patch_without_weights(model, record.method, record.arguments)


def collator_of(recipe: Recipe, args: TrainingArguments, plan: Plan) -> data.Collator:
    """The collator of training rows."""
    share = recipe.retrieval_share
    retrieval = RetrievalRows(plan.tokenizer, share) if share else None
    return data.Collator(
        scheme(recipe, trained=plan.trained, target=plan.target),
        args.seed,
        retrieval=retrieval,
        positioned=shares_heads(args.parallelism_config),
    )


def lengths(recipe: Recipe, model: Any) -> tuple[int, int]:
    """Trained and target length of a model that this recipe has not patched."""
    described = rope_ext.describe(model)
    own = described.length if _continues(described, method_of(recipe)) else described.target_length
    trained = recipe.original_max_position_embeddings or own
    return trained, extended_length(recipe.factor, trained)


def _continues(described: rope_ext.Description, method: Method | None) -> bool:
    """Whether the model was saved with the encoding that the recipe trains.

    Patching then keeps what the encoding has learned; a table that grows keeps its rows.
    """
    return isinstance(method, Encoding) and described.method == method.name


def build(recipe: Recipe, config: Any, meta: bool = False, rows: Any = ()) -> Any:
    """Build the model for training: patched, with LoRA and the chunked loss.

    With ``meta``, it has no weights, and methods that need weights for their checks are skipped.
    ``rows``: training rows, to which ``init: model`` fits the encoding.
    """
    return _extend(recipe, model=_bare(recipe, config, meta), meta=meta, rows=rows)


def _extend(recipe: Recipe, model: Any, meta: bool, rows: Any = ()) -> Any:
    """Patch a model, fit its encoding if asked for, and add LoRA and the chunked loss."""
    method = method_of(recipe)
    if method is None:
        text = text_of(model.config)
        text.max_position_embeddings = lengths(recipe, model)[1]
    elif not (meta and (method.replaces_attention or method.chosen_temperature is not None)):
        trained, _ = lengths(recipe, model)
        described = rope_ext.describe(model)
        try:
            rope_ext.patch(
                model,
                method,
                sliding_layers=cast(SlidingLayers, recipe.sliding_layers),  # others raise there
                layers=recipe.layers,
                compose=recipe.compose,
                original_max_position_embeddings=recipe.original_max_position_embeddings,
                replace=_continues(described, method),
            )
        except (AlreadyPatchedError, AlreadyScaledError) as error:
            # Its message says what to do in Python.
            on_top = isinstance(error, AlreadyScaledError) and not recipe.compose
            more = ", --compose true to extend it further," if on_top else ""
            raise OptionError(
                f"--model {recipe.model} is already extended to {described.target_length} tokens "
                f"({described.method or 'by its configuration'}), which --method {recipe.method} "
                f"cannot start from; give --model the original model{more} or --method none to "
                f"train it as it is"
            ) from error
        if recipe.init == "model":
            text = [row["input_ids"][:trained] for row in itertools.islice(rows, FITTED_ROWS)]
            rope_ext.fit(model, torch.tensor(text))
    # After the patch, since PEFT copies what the encoding learns, and a fit precedes adapters.
    whole = with_lora(model, recipe) if recipe.lora_r else model
    if recipe.chunked_loss:
        # Last: LoRA may wrap the output layer, whose forward this replaces.
        ChunkedLoss(model)
    elif recipe.retrieval_share:
        WeightedLoss(model)
    return whole


def with_lora(model: Any, recipe: Recipe) -> Any:
    """Add LoRA to ``model``, with trained weights in float32 whatever the dtype of the others.

    The output of a trained embedding is cast to the dtype of the other weights: in float32 it would
    double the memory of all activations.

    Raises:
        OptionError: the model has no such layers.
    """
    extra = embeddings_and_norms(model) if recipe.train_embeddings_and_norms else []
    # Parameters of an encoding start at random, and LoRA cannot make up for that.
    encoding = sorted({name.split(".")[-2] for name in learned(model)})
    tied = text_of(model.config).tie_word_embeddings
    options = lora_options(recipe)
    if next(model.parameters()).is_meta:  # no weights to take initial values from
        options["init_lora_weights"] = True
    targets = _targets(recipe)
    layers = _linear_layers(model)
    try:
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.lora_r,
            lora_alpha=recipe.lora_alpha,
            lora_dropout=recipe.lora_dropout,
            target_modules=targets,
            modules_to_save=[*extra, *encoding] or None,
            ensure_weight_tying=bool(extra and tied),
            **options,
        )
        if isinstance(targets, list):
            _require_layers(model, targets)
        whole = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise OptionError(
            f"cannot add LoRA to this model ({first_line(error)}); give --lora_target some of "
            f"{', '.join(layers)}"
        ) from error
    except Exception as error:  # of values in the options that PEFT does not check
        if not options:
            raise
        raise OptionError(
            f"--lora_options {recipe.lora_options} cannot be used ({type(error).__name__}: "
            f"{first_line(error)}); correct or remove them"
        ) from error
    if tied:
        _require_untouched(model, layers)
    for parameter in whole.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if extra and recipe.dtype == "bfloat16":
        whole.get_input_embeddings().register_forward_hook(_in_bfloat16)
    if extra and tied:
        # PEFT has renamed the parameters, and saving drops copies of tied ones by name.
        model._tied_weights_keys = _shared(model)
    return whole


def _require_layers(model: Any, targets: Iterable[str]) -> None:
    """Raise ValueError if a target is the end of no layer's name; PEFT needs only one that is."""
    names = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in names):
            raise ValueError(f"it has no layer {target}")


def _require_untouched(model: Any, layers: Iterable[str]) -> None:
    """Raise OptionError if LoRA is on one of two layers with the same weight, as merging splits it.

    ``layers``: names that LoRA can be added to instead.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): name.rsplit(".", 1)[-1] for name, module in model.named_modules()}
    found = [names[id(end)] for end in ends if isinstance(end, BaseTunerLayer)]
    if found:
        raise OptionError(
            f"--lora_target adds LoRA to {' and '.join(found)}, but embedding and output layer are "
            f"one weight in this model (tie_word_embeddings), so the adapter could not be merged; "
            f"give --lora_target some of {', '.join(layers)}, and --train_embeddings_and_norms "
            f"true to train that weight"
        )


def _linear_layers(model: Any) -> list[str]:
    """The last parts of the names of linear layers, quantized ones included.

    Without an output layer that shares its weight with the embedding.
    """
    head = model.get_output_embeddings() if text_of(model.config).tie_word_embeddings else None
    linear = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "in_features") and module is not head
    ]
    return sorted({name.rsplit(".", 1)[-1] for name in linear})


def _targets(recipe: Recipe) -> list[str] | str:
    """Names of layers, or a text for PEFT: all-linear, no layer, or a regular expression."""
    [first, *others] = recipe.lora_target
    if others:
        return recipe.lora_target
    if first == NONE:
        return DUMMY_TARGET_MODULES
    pattern = re.search(r"[\\*+?()\[\]|^$]", first)
    return first if pattern or first == ALL_LINEAR else recipe.lora_target


def _in_bfloat16(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output.bfloat16()


def _shared(model: Any) -> dict[str, str]:
    """Map names of tied parameters to the name of the parameter they share, under PEFT."""
    first: dict[Any, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    return {name: first[p] for name, p in named if first.setdefault(p, name) != name}


def embeddings_and_norms(model: Any) -> list[str]:
    """Paths of the input embedding and of all norms, which are the layers with 1-D weights only."""
    embedding = model.get_input_embeddings()
    paths = []
    for path, module in model.named_modules():
        own = [parameter.ndim for parameter in module.parameters()]
        norm = "norm" in type(module).__name__.lower() and own and set(own) == {1}
        if module is embedding or norm:
            paths.append(path)
    return paths


class LongTrainer(Trainer):
    """Trainer with optional LoRA+ that saves the patch next to every adapter.

    It trains scales of a temperature at their own learning rate. It also evaluates passkeys,
    without changing the random state of training, and saves the state of streams in checkpoints.
    """

    def __init__(self, recipe: Recipe, *args: Any, plan: Plan, **kwargs: Any) -> None:
        self.recipe = recipe
        self.plan = plan
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Like Trainer's, but under FSDP2 losses and gradient sums are in float32.

        By default, accelerate casts both to bfloat16, and Trainer holds unsharded gradients on
        every device while it accumulates them.
        """
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or plugin.fsdp_version != 2:
            return
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        if plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = replace(
                plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
            )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            optimizer = self._create_optimizer(model)
            set_temperature_rate(self.model if model is None else model, optimizer, self.recipe)
        return super().create_optimizer(model)

    def _create_optimizer(self, model: Any) -> torch.optim.Optimizer:
        if self.recipe.loraplus_ratio is None:
            return super().create_optimizer(model)
        whole = cast(PreTrainedModel, self.model)
        cls, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
        self.optimizer = create_loraplus_optimizer(
            cast(peft.PeftModel, whole if model is None else model),  # LoRA+ needs LoRA
            cls,
            loraplus_lr_ratio=self.recipe.loraplus_ratio,
            loraplus_weight_decay=self.args.weight_decay,
            **options,
        )
        return self.optimizer

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """Like Trainer's; the weights of labels take the place of their number.

        So the loss of a step is the mean by weights over all accumulated rows of all processes.
        """
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if count is None or "loss_weights" not in batches[0]:
            return batches, count
        sums = torch.stack([label_sums(batch) for batch in batches]).sum(0).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            sums = cast(torch.Tensor, self.accelerator.gather(sums[None])).sum(0)
        weights, labels = sums
        # Trainer has divided its count by the devices that share a row.
        return batches, count * (weights / labels)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like Trainer's.

        Raises:
            DivergedError: the loss is NaN or infinite.
        """
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            self._diverged(f"the loss is {loss.item()}")
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Like Trainer's; in training, adds the restoration loss on the start of each row."""
        result = super().compute_loss(
            model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
        )
        if not (self.recipe.restoration and model.training):
            return result
        loss = result[0] if isinstance(result, tuple) else result
        short = inputs["input_ids"][:, : self.plan.trained]
        more = self.recipe.restoration * restoration_loss(model, self.model, short)
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            # Trainer expects the share of this batch in the loss of all accumulated rows.
            more = more / self.current_gradient_accumulation_steps
        loss = loss + more.to(loss)
        return (loss, result[1]) if isinstance(result, tuple) else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # Training goes on with the random numbers that it would have without an evaluation.
        with evaluation.preserve_rng_state():
            metrics = super().evaluate(*args, **kwargs)
        if self.is_world_process_zero():
            folder = output_of(self.args)
            recipe = self.recipe
            name = Path(not_none(recipe.model)).name
            evaluation.report(
                self.state.log_history,
                title=f"{name}, {recipe.method}, factor {recipe.factor:g}",
                training=training_loss(recipe),
                length=self.plan.eval_length,
                passkeys=len(self.plan.passkeys),
                folder=folder,
            )
        return metrics

    def evaluation_loop(
        self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self.plan.passkeys:
            with self.compute_loss_context_manager():
                share = evaluation.found(not_none(self.model), self.plan.passkeys)
            not_none(output.metrics)[f"{metric_key_prefix}_passkey"] = share
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Like Trainer's, and saves the patch next to an adapter.

        Raises:
            DivergedError: a trained weight is NaN or infinite. Earlier checkpoints stay.
        """
        folder = Path(output_dir) if output_dir else output_of(self.args)
        model = not_none(self.model)
        if not all(_finite(p) for p in model.parameters() if p.requires_grad):
            self._diverged("trained weights are not finite")
        if self.args.should_save:  # this file marks a complete checkpoint
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super().save_model(output_dir, _internal_call)
        # PEFT saves weights and its own settings; without this file, the patch would be lost.
        if self.recipe.lora_r and self.recipe.method != NONE and self.args.should_save:
            rope_ext.save_sidecar(model, folder)
        # Only checkpoints are resumed from; the final model is saved by a call of our own.
        if _internal_call and isinstance(self.train_dataset, Stream) and self.args.should_save:
            done = self.state.global_step * self.get_total_train_batch_size(self.args)
            state = self.train_dataset.state(done)
            if state is not None:
                write_whole(folder / STREAM, json.dumps(state) + "\n")

    def _diverged(self, what: str) -> None:
        raise DivergedError(
            f"training has diverged: {what} after {self.state.global_step} steps; the checkpoints "
            f"in {self.args.output_dir} are older; train again in another --output_dir with a "
            f"smaller --learning_rate, more --warmup_steps or a smaller --max_grad_norm"
        )


def training_loss(recipe: Recipe) -> str:
    """What Trainer logs as the loss."""
    parts = [f"training rows of {recipe.length} tokens"]
    if recipe.retrieval_share:
        parts.append(f"{recipe.retrieval_share:g} of them ask for facts")
    if recipe.restoration:
        parts.append(f"plus {recipe.restoration:g} times the restoration loss")
    return ", ".join(parts)


def set_temperature_rate(model: Any, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Move the scales of temperature ssmax to a group with their own rate and without decay.

    They are about 1, and Adam's steps are as large as its rate: a rate for weights is too small.
    """
    named = model.named_parameters()
    scales = [p for n, p in named if p.requires_grad and f".{TEMPERATURE}." in n]
    if not scales:
        return
    groups = optimizer.param_groups
    moved = set(map(id, scales))
    options = {**groups[0], "params": scales, "lr": recipe.temperature_lr, "weight_decay": 0.0}
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in moved]
    groups[:] = [group for group in groups if group["params"]]
    optimizer.add_param_group(options)


def _finite(parameter: torch.Tensor) -> bool:
    """Whether all values are finite; for a sharded parameter, those of this process."""
    shard = getattr(parameter, "to_local", None)
    local = parameter if shard is None else shard()
    local = getattr(local, "ds_tensor", local)  # under ZeRO-3
    return bool(torch.isfinite(local).all())


def scheme(recipe: Recipe, trained: int, target: int) -> Any:
    """The scheme of positions between two lengths in tokens; None for consecutive positions."""
    name = scheme_of(recipe)
    if name == "pose":
        return positions.PoSE(target, recipe.pose_chunks or 2)
    if name == "pose_released":
        return positions.ReleasedPoSE(target, length_of(recipe))
    if name == "mixed_windows":
        return positions.MixedWindows(trained, recipe.short_share)
    found: dict[str, Any] = {
        "random": positions.Scattered,
        "random_floats": positions.RandomFloats,
        "cream": positions.CREAM,
    }
    return found[name](target) if name in found else None


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Args:
        rows: training rows.
        held_out: evaluation rows, or None.
        contents: what each dataset contains.
        notes: what to know before training on it.
    """

    rows: Any
    held_out: Any
    contents: tuple[Contents, ...]
    notes: Sequence[str] = ()


def read(recipe: Recipe, args: TrainingArguments, plan: Plan) -> Data:
    """Read the training rows, and evaluation rows if the run is evaluated.

    Raises:
        DataError: data cannot be read, or does not fill a row.
    """
    tokenizer = plan.tokenizer
    length = length_of(recipe)
    given = parts(recipe)
    times = positions.DOCUMENT if recipe.positions == "pose_released" else 1
    packs = [
        data.packer(
            part.rows,
            tokenizer,
            length,
            masking=recipe.document_masking,
            most=length * times,
            chat=part.format == CHAT,
        )
        for part in given
    ]
    listings = [data.files_of(part.dataset) for part in given]
    strict = recipe.bad_files == STOP
    texts = [
        data.documents(
            part.dataset,
            config=part.config,
            split=part.split,
            column=part.column,
            streaming=recipe.streaming,
            strict=strict,
            chat=part.format == CHAT,
        )
        for part in given
    ]
    tokenize = [data.tokenization(tokenizer, part.format == CHAT, strict) for part in given]
    held: evaluation.HeldOut | None = None
    notes: list[str] = []
    if args.eval_strategy != "no":
        held_out = texts[0]
        if recipe.eval_dataset is not None:
            name = recipe.eval_dataset
            split = recipe.eval_split
            # Streamed: a few rows do not need the whole dataset on disk.
            held_out = data.documents(
                name,
                split=split,
                column=recipe.text_column,
                streaming=True,
                strict=strict,
                option="eval_dataset",
            )
        held = evaluation.held_out(
            held_out,
            tokenizer,
            length=plan.eval_length,
            rows=recipe.eval_rows,
            minimum=recipe.minimum_document,
        )
        if recipe.eval_dataset is None:
            # What is evaluated on must not be trained on.
            texts = [evaluation.without(texts[0], held.texts)]
            notes.append(f"{recipe.dataset}: {held}")
    notes += _chat_notes(given, texts, tokenizer)
    evaluated = held.rows if held else None
    minima = [part.minimum_document for part in given]
    if not recipe.datasets:
        rows, found = data.rows(
            texts[0],
            tokenizer,
            packs[0],
            minimum=minima[0],
            seed=args.seed,
            files=listings[0],
            tokenize=tokenize[0],
        )
        return Data(rows, evaluated, (found,), notes)
    sources = [
        data.source(text, tokenizer, pack, minimum=minimum, seed=args.seed, tokenize=each)
        for text, pack, minimum, each in zip(texts, packs, minima, tokenize, strict=True)
    ]
    mixture = Stream(sources, [part.weight for part in given], args.seed)
    return Data(mixture, evaluated, tuple(map(data.first_contents, texts, listings)), notes)


def _chat_notes(given: Sequence[Any], texts: Sequence[Any], tokenizer: Any) -> Iterator[str]:
    """Yield what to know before training on the parts that are conversations."""
    for part, conversations in zip(given, texts, strict=True):
        note = data.chat_note(conversations, tokenizer) if part.format == CHAT else None
        if note is not None:
            yield f"{part.dataset}: {note}"


def tell_contents(recipe: Recipe, args: TrainingArguments, found: Data) -> None:
    """Say what the training data contains, and how often the run reads it."""
    needed = None
    if args.max_steps > 0:
        ranks = args.world_size / context_parallel_size(args.parallelism_config)
        each = args.per_device_train_batch_size * args.gradient_accumulation_steps
        needed = args.max_steps * each * ranks
    elif args.num_train_epochs and found.contents[0].rows:
        needed = args.num_train_epochs * found.contents[0].rows
    for part, contents in zip(parts(recipe), found.contents, strict=True):
        files = str(data.files_of(part.dataset) or "")
        share = f" ({part.weight:g} of the rows)" if recipe.datasets else ""
        name = part.dataset + share
        for line in contents.lines(name, files, row=length_of(recipe), needed=needed):
            tell(line)
    for note in found.notes:
        tell(f"note: {note}", "yellow")


def resume_stream(rows: Stream, args: TrainingArguments) -> None:
    """Start a stream at the state in the checkpoint, so that earlier data is not read again."""
    if args.resume_from_checkpoint is None or args.ignore_data_skip:
        return
    file = Path(args.resume_from_checkpoint) / STREAM
    if not file.exists():  # a worker process read the data; then Trainer skips rows
        return
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        rows.start(state)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise OptionError(
            f"cannot read {file} ({first_line(error)}), where the data goes on; delete it to skip "
            f"the rows before the checkpoint instead"
        ) from None


class Steps(TrainerCallback):
    """Tells how much there is to train, and sets the epoch of the collator."""

    def __init__(self, collator: data.Collator) -> None:
        self.collator = collator
        self.tokens = 0  # of a step
        self.batches = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        steps = state.max_steps - state.global_step
        self.begun = time.monotonic()
        self.batches = steps * args.gradient_accumulation_steps
        tell(f"{steps:,} steps of {self.tokens:,} tokens")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Estimate the time after the first batch; Trainer does after the first step."""
        if self.batches:
            seconds = round((time.monotonic() - self.begun) * self.batches)
            if not args.disable_tqdm:
                tell("")  # ends the bar's line
            tell(f"about {timedelta(seconds=seconds)} in all, after the first batch")
        self.batches = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.epoch = int(state.epoch)


Settings = tuple[Recipe, TrainingArguments, Plan]


def prepare(argv: Sequence[str] | None = None) -> Settings:
    """Read and check the settings.

    Raises:
        RopeExtError: lists all mistakes.
    """
    mistakes = Mistakes()
    recipe, args = read_settings(sys.argv[1:] if argv is None else argv, mistakes)
    plan = check(recipe, args, mistakes)
    if args.should_log:
        warn_of_launch(args)
    note = plan.vocabulary.note()
    if note is not None:
        tell(f"note: {note}", "yellow")
    return recipe, args, plan


def main(argv: Sequence[str] | None = None) -> None:
    run(*prepare(argv))


def run(recipe: Recipe, args: TrainingArguments, plan: Plan) -> None:
    """Train, with a lock on the output directory.

    Raises:
        MeasureError: another run is in it.
        OptionError: another run has written into it since the settings were checked.
    """
    with contextlib.ExitStack() as held:
        # The first process locks for all, before the others look into the directory.
        with args.main_process_first(local=False, desc="locking the output directory"):
            if first_process():
                held.enter_context(_locked(output_of(args).resolve()))
            args.resume_from_checkpoint = plan.resume
            check_output(recipe, args)
        checkpoint = finished(args)
        if checkpoint is None:
            _train(recipe, args, plan, found=_read(recipe, args, plan))
        else:
            if args.should_save:
                save_from(checkpoint, output_of(args))
            show(f"{args.output_dir}: training is finished; it contains {checkpoint.name}'s model")
    tell_next(next_command(recipe, args, plan))


def _locked(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Lock a directory for this run, even if it does not exist yet."""
    # Next to it, since it may be uploaded; but what a container has mounted has no such place.
    hidden = folder.parent / HIDDEN
    there = next(path for path in (hidden, *hidden.parents) if path.exists())
    beside = os.access(there, os.W_OK) and not os.path.ismount(folder)
    place, name = (folder.parent, folder.name) if beside else (folder, "")
    # Some clusters have file systems without locks: continue there.
    return lock(place, name, option="--output_dir", required=False)


def _read(recipe: Recipe, args: TrainingArguments, plan: Plan) -> Data:
    """Read the data, say what they contain, and check that a resumed run had the same."""
    # The others then find what datasets has cached.
    with args.main_process_first(desc="reading the data"):
        found = read(recipe, args, plan)
    tell_contents(recipe, args, found)
    check_data(args, [each.digest for each in found.contents], template_of(recipe, plan))
    return found


def _train(recipe: Recipe, args: TrainingArguments, plan: Plan, found: Data) -> None:
    """Train and save, resuming where ``args`` say."""
    # Before the model is built: LoRA and encodings draw their initial values.
    set_seed(args.seed)
    rows = found.rows
    model = build(recipe, plan.config, rows=rows)
    if recipe.lora_r and args.should_log:
        model.print_trainable_parameters()
    steps = Steps(collator_of(recipe, args, plan))
    plan.tokenizer.model_max_length = plan.target
    args.remove_unused_columns = False  # the collator needs the row index
    args.per_device_eval_batch_size = 1  # evaluation rows are long
    args.use_cache = False  # with a cache, transformers does not detect packed documents
    trainer = LongTrainer(
        recipe,
        model,
        args,
        data_collator=Embedded(steps.collator, plan.vocabulary),
        train_dataset=rows,
        eval_dataset=found.held_out,
        processing_class=plan.tokenizer,
        callbacks=[steps],
        plan=plan,
    )
    steps.tokens = trainer.get_total_train_batch_size(args) * length_of(recipe)
    if args.should_save:
        # Before the first checkpoint, since whoever resumes from it is compared with them.
        digests = [each.digest for each in found.contents]
        write_settings(recipe, args, digests, template_of(recipe, plan))
    if isinstance(rows, Stream):
        # After the model is built, which may fit an encoding to the first rows of the stream.
        resume_stream(rows, args)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


def next_command(recipe: Recipe, args: Any, plan: Plan) -> list[object]:
    """The command that measures what training changed; without an adapter, the model alone."""
    measured = f"{plan.trained},{plan.target}"
    words = ["rope-ext", "eval", "perplexity", "passkey", "--lengths", measured]
    words += ["--output", unused(Path(args.output_dir) / "report")]
    text = recipe.eval_dataset
    if text not in (None, data.PYTHON_LIBRARY):
        words += ["--text", text if Path(text).exists() else f"hf:{text}:{recipe.eval_split}"]
    elif recipe.dataset != data.PYTHON_LIBRARY:
        tell("note: this measures on the Python standard library; add --text for other documents")
    if recipe.lora_r and recipe.method != NONE:
        words += ["--model", recipe.model, "--adapter", args.output_dir]
        return [*words, "--method", "before,adapter", "--factor", str(recipe.factor)]
    if recipe.lora_r:
        return ["python", "recipes/merge.py", args.output_dir, "--output", unused("merged")]
    return [*words, "--model", args.output_dir, "--method", "unpatched"]


if __name__ == "__main__":
    try:
        settings = prepare()
        with stoppable(lambda: how_to_resume(settings[1])):
            run(*settings)
    except RopeExtError as error:
        sys.exit(f"error: {error}")
    leave()
