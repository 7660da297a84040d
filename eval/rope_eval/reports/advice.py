"""Conclusions of a report: a sentence for every model, and next commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rope_eval.options import option_fields
from rope_eval.reports.recommendation import MAX_COST, Evidence, Recommendation, Scores, gather
from rope_eval.reports.results import Results
from rope_eval.settings import BEFORE
from rope_eval.systems import System, built, under
from rope_eval.tasks.passkey import Passkey
from rope_eval.tasks.perplexity import Perplexity
from rope_ext.command.arguments import UNPATCHED, command_words
from rope_ext.command.method_options import ADAPTER
from rope_ext.command.terminal import unused
from rope_ext.engines import engines_for, engines_with_plugin
from rope_ext.errors import OptionError, RopeExtError
from rope_ext.methods import extended_length, method_class
from rope_ext.methods.rope import factor_to
from rope_ext.quoting import command_line
from rope_ext.saving.folder import model_of, patch_without_weights

_MORE = {"windows": 64, "trials": 20}
"""Options of a larger comparison, suggested if the default is inconclusive."""
Words = list[str]
RECIPE = "recipes/own_model_yarn_lora.yaml"
ON_CPU = ("--use_cpu", "true", "--quantize", "false", "--optim", "adamw_torch")
"""Settings that a GPU recipe needs on a CPU."""


Engines = dict[str, tuple[str, ...]]


def engines_of(systems: Sequence[System], arguments: Sequence[Any]) -> tuple[Engines, Engines]:
    """Return the engines that can serve each method of a model, by label; reads no weights.

    First those that can by themselves, then those that can with this package installed.
    """
    found: Engines = {}
    plugins: Engines = {}
    with suppress(RopeExtError):
        model = model_of(systems[0].model)
        for system in systems:
            method = built(system.method, system.options)
            # A patch that needs weights has no engine here; the report does not fail for it.
            with suppress(RopeExtError):
                if method.replaces_attention:  # only recorded, so on a model of its own
                    noted = patch_without_weights(
                        model_of(systems[0].model),
                        method,
                        {"compose": arguments[0], "original_max_position_embeddings": arguments[1]},
                    )
                    plugins[system.label] = engines_with_plugin(noted)
                else:
                    with under(model, system.method, system.options, *arguments):
                        found[system.label] = engines_for(model)
    return found, plugins


@dataclass(frozen=True)
class Advice(Results):
    """Results with conclusions."""

    @cached_property
    def recommendations(self) -> list[str]:
        """By model: the change by training, or else the method to use, in a few sentences."""
        if pairs := self.trainings:
            return [_of(self.unpatched(one), self.training(one, two)) for one, two in pairs]
        return [sentence for sentences, _ in self._advice for sentence in sentences]

    @property
    def next_lines(self) -> list[str]:
        """The next commands as lines to paste."""
        return [command_line(words) for words in self.next_commands]

    @property
    def next_commands(self) -> list[Words]:
        settings = self.plan.settings
        if settings.servers:
            return []
        if settings.adapter and (self.trainings or not self._advice):
            return [self._merging]
        return [words for _, words in self._advice] or list(map(self._after, settings.models))

    @property
    def optional_commands(self) -> list[Words]:
        """Optional previous commands: if the next command trains, the calibration of a method."""
        settings = self.plan.settings
        if not (self._trains and self._advice):
            return []
        named = [(model, self._methods(model)) for model in settings.models]
        return [self._calibrating(model, names[0], True) for model, names in named if names]

    def _methods(self, model: str) -> list[str]:
        """Return the methods that were asked for and that the model takes, without unpatched."""
        names = [name for name in self.plan.settings.methods if name != UNPATCHED]
        return [name for name in names if self.plan.takes(name, model)]

    @property
    def reading(self) -> list[str]:
        """Explain how the recommendation relates to the tables, and its rule for a low cost."""
        cost = (
            f'"at most {MAX_COST:.0%}" holds for the whole interval of perplexity, and says '
            f"nothing of passkeys; "
        )
        rule = (
            f"Summary: of all lengths beyond the trained one together; {cost * (not self._embeds)}"
            f"methods are compared with intervals of 95 % for all of them together (Bonferroni)."
        )
        return [rule] if self.recommendations and not self.trainings else []

    @cached_property
    def _advice(self) -> list[tuple[list[str], Words]]:
        settings = self.plan.settings
        names = {task.name for task in self.plan.tasks}
        if settings.servers or not (self._embeds or names >= {"perplexity", "passkey"}):
            return []
        scores = gather(self.places, self._embeds or ("passkey",))
        advice = []
        for model in settings.models:
            ours = [system for system in self.plan.systems if system.model == model]
            if len(ours) > 1:
                bullets, words = self._advice_for(ours, scores)
                advice.append(([_of(ours[0], bullet) for bullet in bullets], words))
        return advice

    def _advice_for(
        self, ours: Sequence[System], scores: Mapping[str, Scores]
    ) -> tuple[list[str], Words]:
        """Return sentences about one model, of its systems, and the next command."""
        settings = self.plan.settings
        model = ours[0].model
        trained = ours[0].trained
        table = {system.label: scores[system.name] for system in ours}
        if self._embeds:
            found = Recommendation(table, trained, things="questions")
        else:
            patched = [system for system in ours if system.method != UNPATCHED]
            arguments = (settings.compose, settings.trained_length)
            engines, plugins = engines_of(patched, arguments)
            found = Recommendation(table, trained, engines, plugins=plugins)
        bullets = found.bullets
        larger = self._larger_factor(ours)
        if found.broken:  # no method repairs broken weights
            return bullets, command_words("describe", model)
        if larger is not None:
            bullets.append(
                f"{max(settings.lengths)} tokens are beyond factor {settings.factor:g}: raise "
                f"--factor to {larger:g}."
            )
            return bullets, self._comparing(model, settings.lengths, "raised", factor=larger)
        if self._embeds:
            return bullets, self._next_of_embedder(ours, found.choice)
        return bullets, self._next(model, trained, found.choice)

    def _larger_factor(self, systems: Sequence[System]) -> float | None:
        """Return the factor that reaches the longest length, if it is larger than the one given.

        The rule: results beyond the target of every method judge the factor, not the methods, so
        the next step is the same comparison with a factor that covers them. None if a method
        reaches the longest length, by the common factor or its own.
        """
        longest = max(self.plan.settings.lengths)
        trained = systems[0].trained
        patched = [system for system in systems if system.method != UNPATCHED]
        targets = [extended_length(system.options["factor"], trained) for system in patched]
        if not targets or max(targets) >= longest:
            return None
        return factor_to(longest, trained)

    def _next(self, model: str, trained: int, choice: Evidence | None) -> Words:
        """Return the next command: train, calibrate or merge what helps, or measure more."""
        settings = self.plan.settings
        if choice is not None and settings.adapter:
            return self._merging
        if self._trains:
            return self._training(model, trained)
        if choice is not None:
            ours = (s for s in self.plan.systems if s.model == model)
            method = next(s.method for s in ours if s.label == choice.name)
            options = self._options([method])
            # Calibrate cannot raise a factor, and begins with a method's published options.
            if settings.compose != "raise" and not options:
                return self._calibrating(model, method)
            engine = next(iter(choice.engines), "transformers")
            patch_options = {"method": method, "factor": settings.factor}
            patch_options |= {"option": options, "compose": settings.compose}
            patch_options["trained_length"] = settings.trained_length
            return command_words("export", model, **patch_options, engine=engine)
        tasks = self.plan.tasks
        longest = max(settings.lengths)
        enough = all(max(getattr(t, n, 0) for t in tasks) >= least for n, least in _MORE.items())
        if longest <= trained or enough:
            more = {"finetune": longest > trained, "text": list(self._texts)}
            more["trained_length"] = settings.trained_length
            return command_words(
                "recommend", model, length=extended_length(settings.factor, trained), **more
            )
        return self._comparing(model, [longest], "more", **_MORE)

    def _next_of_embedder(self, ours: Sequence[System], choice: Evidence | None) -> Words:
        """Return the next command: describe the patch that helps, or ask more questions."""
        settings = self.plan.settings
        model = ours[0].model
        best = next((s for s in ours if choice is not None and s.label == choice.name), None)
        if best is not None and best.method != UNPATCHED:
            patch_options = {"method": best.method, "factor": settings.factor}
            return command_words("describe", model, **patch_options, compose=settings.compose)
        given = {"tasks": "embedding", "method": ",".join(self._methods(model))}
        given |= {"factor": settings.factor, "lengths": ",".join(map(str, settings.lengths))}
        sizes = {"queries": 100, "candidates": 100}
        return command_words("eval", model, **given, **sizes, output=unused("more"))

    @property
    def _embeds(self) -> tuple[str, ...]:
        """The names of the tasks for embedders, which are measured alone."""
        return tuple(task.name for task in self.plan.tasks if task.embeds)

    @property
    def _trains(self) -> bool:
        """Whether the next command trains: recipes cannot raise a checkpoint's factor."""
        settings = self.plan.settings
        return settings.finetune and settings.compose != "raise" and settings.adapter is None

    @property
    def _merging(self) -> Words:
        adapter = str(self.plan.settings.adapter)
        return ["python", "recipes/merge.py", adapter, "--output", unused("merged")]

    def _after(self, model: str) -> Words:
        lengths = self.plan.settings.lengths
        if self._embeds or all(system.method == UNPATCHED for system in self.plan.systems):
            longer = max(4 * max(system.trained for system in self.plan.systems), *lengths)
            given = {"length": longer, "trained_length": self.plan.settings.trained_length}
            return command_words("recommend", model, **given)
        ours = [system for system in self.plan.systems if system.model == model]
        larger = self._larger_factor(ours)
        more = {} if larger is None else {"factor": larger}
        return self._comparing(model, lengths, "compared", **more)

    def _comparing(self, model: str, lengths: Sequence[int], output: str, **more: Any) -> Words:
        settings = self.plan.settings
        given = self._given
        sizes = {name: max(more.pop(name), given.get(name, 0)) for name in _MORE if name in more}
        more = given | sizes | more
        same = ("factor", "adapter", "finetune", "chat", "attn", "batch_size")
        more = {name: getattr(settings, name) for name in same} | more
        trained = next(system.trained for system in self.plan.systems if system.model == model)
        methods = [
            name for name in self._methods(model) if self._takes(name, more["factor"], trained)
        ]
        more |= {"method": ",".join(methods), "lengths": ",".join(map(str, lengths))}
        more["option"] = self._options(methods)
        return self._command("compare", model, output, **more)

    def _takes(self, method: str, factor: float, trained: int) -> bool:
        """Whether a method takes a factor: some have a largest one."""
        if method in (ADAPTER, BEFORE):
            return True
        with suppress(OptionError):
            built(method, {"factor": factor, **self._given_for(method)}).check(trained)
            return True
        return False

    def _given_for(self, method: str) -> Mapping[str, Any]:
        """Return the options that were given for a method, by any name of it."""
        name = _canonical(method)
        options = self.plan.settings.options.items()
        return next((given for one, given in options if _canonical(one) == name), {})

    def _options(self, methods: Sequence[str]) -> list[str]:
        """Return the options that were given for these methods, for the command line."""
        return [
            f"{method}.{name}={value!r}"
            for method in methods
            for name, value in self._given_for(method).items()
        ]

    def _calibrating(self, model: str, method: str, finetune: bool = False) -> Words:
        given = {"length": max(self.plan.settings.lengths), "finetune": finetune}
        given |= {"method": method, "needle": self._given.get("needle")}
        return self._command("calibrate", model, "calibrated", **given)

    def _command(self, name: str, model: str, output: str, **options: Any) -> Words:
        """Return a command that measures the same model and text, with a new output folder."""
        own = next(_model_of(system) for system in self.plan.systems if system.model == model)
        output = unused("-".join([output, *filter(None, own.split("/"))]))
        same = ("dtype", "device", "seed", "trained_length", "compose")
        more = {name: getattr(self.plan.settings, name) for name in same} | options
        return command_words(name, model, **more | {"output": output, "text": list(self._texts)})

    def _training(self, model: str, trained: int) -> Words:
        settings = self.plan.settings
        method = self._methods(model)[0]
        return training_command(
            model=model,
            method=method,
            trained=trained,
            target=extended_length(settings.factor, trained),
            options=self._given_for(method),
            compose=bool(settings.compose),
            text=str(self._texts[0]) if self._texts else None,
            cpu=self.plan.identities[model]["device"] == "cpu",
        )

    @property
    def _given(self) -> dict[str, Any]:
        """Options of the tasks of ``compare`` that differ from their defaults."""
        tasks = [task for task in self.plan.tasks if isinstance(task, (Perplexity, Passkey))]
        every = [(f, getattr(task, f.name)) for task in tasks for f in option_fields(type(task))]
        # The protocol "ending" is what a default of None becomes.
        return {f.name: value for f, value in every if value not in (f.default, "ending")}

    @property
    def _texts(self) -> Sequence[Path | str]:
        return next((t.text for t in self.plan.tasks if isinstance(t, Perplexity)), ())


def _canonical(method: str) -> str:
    return method if method in (ADAPTER, BEFORE) else method_class(method).name


def _model_of(system: System) -> str:
    """Return the part of the name before the method if there are several models, else ``""``."""
    return system.name.removesuffix(system.label).strip()


def _of(unpatched: System, sentence: str) -> str:
    """Return the sentence about a model, with its name if there are several."""
    name = _model_of(unpatched)
    return f"{name}: {sentence}" if name else sentence


def training_command(
    model: str,
    method: str,
    trained: int,
    target: int,
    *,
    options: Mapping[str, Any] | str | None = None,
    compose: bool = False,
    text: str | None = None,
    cpu: bool = False,
) -> list[str]:
    """Return the command that checks whether training fits, and prints the training command.

    ``options`` are those of the method, or a file of ``rope-ext calibrate``; ``text`` evaluates the
    result, and None is Python's library. ``cpu``: there is no GPU.
    """
    words = ["python", "-m", "recipes.memory", RECIPE, "--model", model, "--method", method]
    words += ["--original_max_position_embeddings", str(trained), "--target_length", str(target)]
    if options:
        given = options if isinstance(options, str) else json.dumps(dict(options))
        words += ["--method_options", given]
    words += ["--compose", "true"] if compose else []
    words += ["--eval_dataset", text] if text and not text.startswith("hf:") else []
    return [*words, *(ON_CPU if cpu else ("--card", "24"))]
