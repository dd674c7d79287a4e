"""Training of an adapter: lessons, steps, held-out divergence, and a state that survives an interrupt."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.errors import InvalidAdapter, InvalidConfig, NotMovable
from kvmosaic.lab.adapt.corpus import Corpus, lessons_of
from kvmosaic.lab.adapt.distillation import Lesson, distill
from kvmosaic.layout import ChunkContext
from kvmosaic.layout.strategies import strategy_named
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel
from kvmosaic.model.lora import LoraAdapter, LoraLinear, attach, write_adapter
from kvmosaic.model.lora.adapter import LowRank

REPORT_NAME = "kvmosaic_adapter.json"
STATE_FOLDER = "training"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class AdaptSettings:
    """How an adapter is trained.

    Raises:
        InvalidConfig: a value outside its bounds.
    """

    rank: int = 16
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Endings of the names of the linear layers that get an update."""
    learning_rate: float = 4e-4
    steps: int = 150
    strategies: tuple[str, ...] = ("sequential",)
    """Positions of the documents, drawn for each lesson; a name that occurs twice is drawn twice as often."""
    context: ChunkContext = "system"
    num_documents: tuple[int, ...] = (2, 3, 3, 4, 6)
    """Documents of a lesson, drawn in the same way."""
    questions: int = 12
    """Questions of a lesson: reading the documents is paid once."""
    sampled_answers: int = 1
    """Answers to each question that are sampled, beside the greedy one."""
    answer_tokens: int = 16
    lessons_per_step: int = 1
    seed: int = 0
    held_out: float = 0.15
    """Share of the documents that is held out."""
    held_out_lessons: int = 24
    evaluate_every: int = 25
    patience: int = 6
    """Evaluations without a smaller held-out divergence, after which training ends."""
    question_weight: float = 0.2
    """Of the divergence at a question's tokens, beside 1 for those of its answer."""

    def __post_init__(self) -> None:
        bounds = {
            "rank": (1, 1_024),
            "steps": (1, 10**6),
            "questions": (1, 64),
            "sampled_answers": (0, 16),
            "answer_tokens": (1, 512),
            "lessons_per_step": (1, 256),
            "held_out_lessons": (1, 10_000),
            "evaluate_every": (1, 10**6),
            "patience": (1, 10**6),
            "seed": (0, 2**63 - 1),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}; it must be from {low} to {high}")
        if not 0 < self.learning_rate <= 1 or not 0 < self.held_out < 1:
            raise InvalidConfig(
                f"learning_rate is {self.learning_rate!r} and held_out {self.held_out!r}; both must be between 0 and 1"
            )
        if not self.num_documents or not all(1 <= count <= 64 for count in self.num_documents):
            raise InvalidConfig(f"num_documents are {self.num_documents!r}; give counts from 1 to 64")
        if not self.targets or not self.strategies:
            raise InvalidConfig("give at least one target and one strategy")
        for name in self.strategies:
            if strategy_named(name).takes_offsets:
                raise InvalidConfig(f"the strategy {name!r} takes offsets, which lessons do not have")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out measurements after so many steps."""

    step: int
    divergence: float
    """Mean over held-out answers' tokens, in nats."""
    agreement: float
    train_divergence: float | None
    """Moving mean of the lessons since the start; None before the first."""
    num_tokens: int
    """Rows that were trained on so far."""
    seconds: float
    """Processor time of training so far."""


Progress = Callable[[int, int, float | None], None]
"""Called after every step with its number, the number of all, and the moving mean of the divergence."""
News = Callable[[Evaluated], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training."""

    adapter: LoraAdapter
    history: tuple[Evaluated, ...]
    is_interrupted: bool
    is_converged: bool
    """Whether it ended early, since the held-out divergence fell no further."""

    @property
    def best(self) -> Evaluated:
        """The evaluation of the adapter that was kept."""
        return min(self.history, key=lambda each: each.divergence)


class Trainer:
    """Trains one adapter of one model. The same settings, model and corpus give the same adapter on one machine."""

    def __init__(self, model: LoadedModel, corpus: Corpus, settings: AdaptSettings, folder: Path) -> None:
        """Prepares a training, or goes on with the one in `folder`.

        Args:
            model: in float32 or wider, and not packed: gradients pass through its weights.
            corpus: documents and questions; a part is held out.
            settings: how.
            folder: where adapter, report and state go.

        Raises:
            InvalidConfig: a model that cannot be trained, or other settings than those of the folder's state.
            NotMovable: a strategy moves documents and the model does not allow that.
        """
        if model.is_prepacked or model.dtype not in (torch.float32, torch.float64):
            raise InvalidConfig(
                f"the model is {model.weights_text}; training needs float32 weights that are not packed: load it with "
                "dtype='float32' and prepack='never'"
            )
        if model.state_layers or model.has_indexers:
            kind = "carry a state" if model.state_layers else "choose the keys that others read"
            raise InvalidConfig(
                f"this model has layers that {kind}, and lessons are composed by attention alone; take another one"
            )
        for name in settings.strategies:
            if strategy_named(name).moves(settings.context) and not model.is_movable:
                raise NotMovable(
                    f"the strategy {name!r} moves documents, and this model does not allow that "
                    f"({model.immovable_reason}); use 'shared'"
                )
        self._model, self._settings, self._folder = model, settings, folder
        self._learned, self._held = corpus.split(settings.held_out, settings.seed)
        self._adapter, self._parameters = _new_adapter(model, settings)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1.0, weight_decay=0.0, betas=(0.9, 0.99))
        config = ChunkCacheConfig(chunk_cache_size="64MiB")
        self._llm = LLM(model, profile=False, self_check=False, chunk_cache_config=config, engine_config=EngineConfig())
        self._history: list[Evaluated] = []
        self._best: list[Tensor] | None = None
        self._step, self._num_tokens, self._seconds = 0, 0, 0.0
        self._mean: float | None = None
        self._resume()

    @property
    def first_step(self) -> int:
        """Steps that were taken before this process."""
        return self._step

    def train(self, progress: Progress = lambda *_: None, news: News = lambda _: None) -> Trained:
        """Trains until all steps are taken, nothing improves, or an interrupt, and writes adapter and report."""
        settings, is_interrupted = self._settings, False
        try:
            held = self._held_out()
            if not self._history:
                self._evaluate(held, news)
            while self._step < settings.steps and not self._is_converged:
                begin = time.process_time()
                self._take_step()
                self._seconds += time.process_time() - begin
                progress(self._step, settings.steps, self._mean)
                if self._step % settings.evaluate_every == 0 or self._step == settings.steps:
                    self._evaluate(held, news)
        except KeyboardInterrupt:
            if not self._history:
                raise
            is_interrupted = True
        adapter = self._kept()
        self._write(adapter)
        return Trained(adapter, tuple(self._history), is_interrupted, self._is_converged)

    @property
    def _is_converged(self) -> bool:
        best = min(range(len(self._history)), key=lambda number: self._history[number].divergence)
        return len(self._history) - 1 - best >= self._settings.patience

    def _take_step(self) -> None:
        settings = self._settings
        rate = settings.learning_rate * _schedule(self._step, settings.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for number in range(settings.lessons_per_step):
            self._take_lessons(Random(f"{settings.seed}:{self._step}:{number}"))  # noqa: S311 - repeatable, no secret
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1

    def _take_lessons(self, chance: Random) -> None:
        """Gradients of one lesson, or of one for each question where questions keep their documents."""
        settings = self._settings
        count = settings.questions if self._learned.keeps_documents else 1
        drawn = [
            self._learned.draw(chance, chance.choice(settings.num_documents), settings.questions) for _ in range(count)
        ]
        seeds = [chance.getrandbits(32) for _ in range(settings.sampled_answers)]
        for lesson in lessons_of(self._llm, drawn, settings.answer_tokens, seeds):
            strategy = chance.choice(settings.strategies)
            losses = distill(self._model, self._adapter, lesson, strategy, settings.context, settings.question_weight)
            (losses.loss / count / settings.lessons_per_step).backward()  # type: ignore[no-untyped-call]
            self._num_tokens += losses.num_rows
            found = losses.divergence
            self._mean = found if self._mean is None else 0.97 * self._mean + 0.03 * found

    def _held_out(self) -> list[tuple[Lesson, str]]:
        """Held-out lessons of one question each, the same in every run, and their strategies."""
        settings, drawn = self._settings, []
        for number in range(settings.held_out_lessons):
            chance = Random(f"{settings.seed}:held out:{number}")  # noqa: S311 - can be repeated, and no secret
            drawn.append(self._held.draw(chance, settings.num_documents[number % len(settings.num_documents)], 1))
        lessons = lessons_of(self._llm, drawn, settings.answer_tokens)
        return [
            (lesson, settings.strategies[number % len(settings.strategies)]) for number, lesson in enumerate(lessons)
        ]

    @torch.no_grad()
    def _evaluate(self, held: Sequence[tuple[Lesson, str]], news: News) -> None:
        settings = self._settings
        losses = [
            distill(self._model, self._adapter, lesson, strategy, settings.context, settings.question_weight)
            for lesson, strategy in held
        ]
        evaluated = Evaluated(
            self._step,
            sum(each.divergence for each in losses) / len(losses),
            sum(each.agreement for each in losses) / len(losses),
            self._mean,
            self._num_tokens,
            self._seconds,
        )
        if not self._history or evaluated.divergence < min(each.divergence for each in self._history):
            self._best = [parameter.detach().clone() for parameter in self._parameters]
        self._history.append(evaluated)
        self._save()
        news(evaluated)

    def _kept(self) -> LoraAdapter:
        """The adapter of the smallest held-out divergence."""
        assert self._best is not None
        pairs = zip(self._best[::2], self._best[1::2], strict=True)
        names = _adapted_names(self._model, self._settings)
        return LoraAdapter({name: LowRank(down, up, _SCALE) for name, (down, up) in zip(names, pairs, strict=True)})

    def _identity(self) -> str:
        texts = [each.text for each in (*self._learned.documents, *self._held.documents)]
        texts += [each.text for each in (*self._learned.questions, *self._held.questions)]
        content = [_FORMAT, self._model.fingerprint, asdict(self._settings), texts, self._learned.system]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _save(self) -> None:
        """Writes the state: a killed training goes on from its last evaluation."""
        folder = self._folder / STATE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        assert self._best is not None
        tensors = {f"best.{number}": tensor for number, tensor in enumerate(self._best)}
        for number, parameter in enumerate(self._parameters):
            tensors[f"now.{number}"] = parameter.detach().clone()
            for name, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{name}.{number}"] = value.detach().clone()
        about = {
            "identity": self._identity(),
            "step": self._step,
            "num_tokens": self._num_tokens,
            "seconds": self._seconds,
            "mean": self._mean,
            "history": [asdict(each) for each in self._history],
        }
        draft = folder / "draft"
        save_file(tensors, draft, {"about": json.dumps(about)})  # in one file, so that both are of the same step
        draft.replace(folder / "state.safetensors")

    def _resume(self) -> None:
        path = self._folder / STATE_FOLDER / "state.safetensors"
        if not path.is_file():
            return
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
            tensors = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise InvalidAdapter(f"{path} cannot be read: {error}; remove it to start again"[:400]) from error
        if about.get("identity") != self._identity():
            raise InvalidConfig(
                f"{self._folder} holds a training with another model, other documents or other settings; choose "
                f"another folder, or remove {path.parent} to start again"
            )
        for number, parameter in enumerate(self._parameters):
            parameter.data.copy_(tensors[f"now.{number}"])
            names = [name for name in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{number}" in tensors]
            if names:
                self._optimizer.state[parameter] = {name: tensors[f"{name}.{number}"] for name in names}
        self._best = [tensors[f"best.{number}"] for number in range(len(self._parameters))]
        self._history = [Evaluated(**each) for each in about["history"]]
        self._step, self._num_tokens = about["step"], about["num_tokens"]
        self._seconds, self._mean = about["seconds"], about["mean"]

    def _write(self, adapter: LoraAdapter) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_adapter(adapter, self._folder, str(getattr(self._model.config, "name_or_path", "")) or "model")
        report: dict[str, Any] = {
            "kvmosaic_adapter": _FORMAT,
            "base_fingerprint": self._model.fingerprint,
            "digest": adapter.digest,
            "settings": asdict(self._settings),
            "documents": [len(self._learned.documents), len(self._held.documents)],
            "questions": [len(self._learned.questions), len(self._held.questions)],
            "history": [asdict(each) for each in self._history],
        }
        (self._folder / REPORT_NAME).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


_SCALE = 2.0
"""lora_alpha / rank."""


def _adapted_names(model: LoadedModel, settings: AdaptSettings) -> list[str]:
    names = []
    for name, part in model.module.named_modules():
        if isinstance(part, nn.Linear | LoraLinear) and name.rsplit(".", 1)[-1] in settings.targets:
            names.append(name)
    if not names:
        raise InvalidConfig(
            f"{type(model.module).__name__} has no linear layer called {', '.join(settings.targets)}; name its own"
        )
    return names


def _new_adapter(model: LoadedModel, settings: AdaptSettings) -> tuple[str, list[nn.Parameter]]:
    """Attaches an update that changes nothing yet; returns its digest and its matrices, two for each layer."""
    generator = torch.Generator().manual_seed(settings.seed)
    module, layers = model.module, {}
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    names = _adapted_names(model, settings)
    for name in names:
        linear = module.get_submodule(name)
        down = torch.randn(settings.rank, linear.in_features, generator=generator) / math.sqrt(linear.in_features)
        layers[name] = LowRank(down, torch.zeros(linear.out_features, settings.rank), _SCALE)
    adapter = LoraAdapter(layers)
    attach(module, adapter)
    parameters = []
    for name in names:
        part = module.get_submodule(name)
        parameters += [part.down[adapter.digest], part.up[adapter.digest]]
    for parameter in parameters:
        parameter.requires_grad_(True)
    return adapter.digest, parameters


def _schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: a short rise, then half a cosine down to a twentieth."""
    rise = min(1.0, (step + 1) / min(15, steps))
    return rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))
