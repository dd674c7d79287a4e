"""Python API: one object that loads a model, caches its chunks and answers prompts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from kvmosaic.assembly import (
    BUNDLED_READER,
    AdapterPlaces,
    AnyModel,
    Continuation,
    EngineFacts,
    EngineName,
    PromptLike,
    adapter_folders,
    build_engine,
    check_movable,
    check_tiers,
    checked,
    continuations_of,
    engine_named,
    open_model,
    profile_place,
    prompts_of,
    read_tools,
    usual_context,
)
from kvmosaic.attention import BackendName
from kvmosaic.cache import ChunkCacheStats, Plan
from kvmosaic.chunks import ChunkHandle, ChunkStore
from kvmosaic.config import ChunkCacheConfig, EngineConfig, TierConfig
from kvmosaic.config.llm import with_settings
from kvmosaic.engine import Request
from kvmosaic.engine.priorities import check_priority, priorities_for
from kvmosaic.engine.self_check import SelfCheck, kept_check
from kvmosaic.errors import InvalidConfig, InvalidDocument, InvalidSampling, InvalidTools
from kvmosaic.layout import ChunkContext, context_with
from kvmosaic.prompt import Document, DocumentsOrder, Prompt, PromptEncoder, read_messages
from kvmosaic.prompt.found_documents import DocumentFinder
from kvmosaic.prompt.patterns import document_finder, read_find_documents
from kvmosaic.prompt.segment import has_segments
from kvmosaic.prompt.separator import told_separators
from kvmosaic.prompt.splits import told_splits
from kvmosaic.repair import RepairPolicy
from kvmosaic.sampling import (
    AnswerReader,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    ToolCalling,
    default_sampling,
)
from kvmosaic.tuned_settings import ProfileChoice, find_profile

if TYPE_CHECKING:
    from kvmosaic.attention import AttentionBackend
    from kvmosaic.model.cpu.prepack import Prepack

Messages = Sequence[Mapping[str, Any]]
Documents = Sequence[Document | Mapping[str, Any] | str]
Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]
Progress = Callable[[int, int], None]
"""Called with the number of finished requests and the number of all."""
_Placing = tuple[str | None, ChunkContext | None]
"""Settings that a call overrides for its documents."""


class LLM:
    """A language model that answers from documents whose KV cache is computed once.

        llm = LLM("path/or/hub-name")
        answers = llm.chat([{"role": "user", "content": "What do they say?"}], documents=["One text.", "Another one."])
        answers[0].outputs[0].text
        print(answers[0].reuse)

    Not thread-safe. Use it as a context manager or call `close` to abort running requests.
    """

    def __init__(
        self,
        model: str | Path | AnyModel = BUNDLED_READER,
        *,
        engine: EngineName = "auto",
        kv_cache_dtype: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        prepack: Prepack = "auto",
        enable_chunk_cache: bool = True,
        chunk_cache_config: ChunkCacheConfig | None = None,
        engine_config: EngineConfig | None = None,
        tier_config: TierConfig | None = None,
        profile: ProfileChoice = True,
        attention_backend: AttentionBackend | BackendName | None = None,
        self_check: bool = True,
        tool_format: str = "auto",
        trust_remote_code: bool = False,
        adapter: AdapterPlaces = (),
        merge_adapter: bool = False,
        **settings: Any,
    ) -> None:
        """Loads a model and gives it its caches.

        Args:
            model: a folder, a GGUF file, a name on the Hugging Face hub, "reader" (the small model of this package), or
                a model that is loaded already (`LoadedModel.from_module` takes any transformers model).
            engine: see `ModelConfig`, as for all that has no description here.
            kv_cache_dtype: "f16" (auto), "f32", "bf16" or "q8_0".
            dtype: "auto", "float32", "bfloat16", "float16" or "float64".
            device: "auto", "cpu", "cuda", "cuda:1", …
            prepack: "auto", "always" or True, "never" or False. A model that is loaded already stays as it is.
            enable_chunk_cache: compose prompts from cached chunks; off, segments are joined to an ordinary prompt.
            chunk_cache_config: capacity, positions, separator, eviction, …
            engine_config: how much runs at once, memory for prefixes and answers, and threads.
            tier_config: where chunks are offloaded when they are evicted from the device, so that they are not
                recomputed.
            profile: positions, chunk context and repair as `kvmosaic tune` measured them for this model, where
                `chunk_cache_config` does not say them. True: those of kvmosaic_profile.json in the model's folder
                (beside NAME.gguf: NAME.kvmosaic_profile.json), if it is there and for this model; a path: of this file;
                False: none. `profile` and `profile_note` tell.
            attention_backend: attention implementation: "native" (the C extension), "triton" (CUDA), "torch", or one of
                your own. Default: native or triton where it can be used, otherwise torch; `attention` says which, and
                why. The environment variable KVMOSAIC_ATTENTION decides where nothing is said here.
            self_check: compare a composed prompt with a dense forward first; if they differ, the chunk cache stays off
                and `chunk_cache_off_reason` says why.
            tool_format: "hermes", "llama3_json", "mistral", …
            trust_remote_code: run Python code that comes with the checkpoint.
            adapter: folders of low-rank adapters (LoRA, as PEFT writes them): a mapping by name, or texts
                "[NAME=]FOLDER"; a folder's last part is its name. The first one computes prompts with documents; others
                are chosen by `Prompt.adapter`, or `chat(adapter=…)`. Prompts without documents are the base model's.
                Chunks of different adapters are different chunks.
            merge_adapter: add the only adapter to the weights instead.
            settings: fields of the three configurations by their names: `LLM("reader", chunk_separator="##")`.

        Raises:
            ModelNotFound, UnsupportedModel, InvalidAdapter: see `load_model`.
            NotMovable: the position strategy moves documents and the model does not allow that.
            InvalidConfig: a setting that cannot work, for example memory for less than one block.
            TypeError: a setting that does not exist.
            InvalidProfile: a profile was named, and it cannot be read or is for another model.
        """
        self.chunk_cache_config: ChunkCacheConfig
        self.engine_config: EngineConfig
        self.tier_config: TierConfig
        self.chunk_cache_config, self.engine_config, self.tier_config = with_settings(
            settings,
            checked(chunk_cache_config or ChunkCacheConfig(), ChunkCacheConfig),
            checked(engine_config or EngineConfig(), EngineConfig),
            checked(tier_config or TierConfig(), TierConfig),
        )
        check_tiers(self.tier_config, enable_chunk_cache)
        adapters = adapter_folders(adapter)
        found = find_profile(profile_place(model), profile if enable_chunk_cache else False)
        is_profiles_adapter = not adapters and found.adapter is not None and isinstance(model, str | Path)
        if is_profiles_adapter:
            assert found.adapter is not None
            if merge_adapter:
                raise InvalidConfig(
                    f"merge_adapter is set, but the adapter in {found.adapter} was measured beside the weights; "
                    "give it as adapter= and no profile"
                )
            adapters = adapter_folders(found.adapter)
        self.model: AnyModel
        if not isinstance(model, str | Path):
            if adapters:
                raise InvalidConfig(
                    "adapters are attached when a model is loaded, and this one is loaded already; give its folder, or "
                    "load it with load_model(..., adapters=...)"
                )
            self.model = model
        else:
            self.model = open_model(
                model,
                engine=engine,
                kv_cache_dtype=kv_cache_dtype,
                dtype=dtype,
                device=device,
                max_positions=self.engine_config.max_model_len,
                num_threads=self.engine_config.num_threads,
                prepack=prepack,
                trust_remote_code=trust_remote_code,
                adapters=adapters,
                merge_adapter=merge_adapter,
            )
        digest = next((each.digest for each in self.model.adapters.values()), "")
        used = found.used_for(self.model.fingerprint, self.chunk_cache_config, digest)
        if is_profiles_adapter and used.profile is None and self.model.adapters:
            # it stays in memory, and no prompt is computed by it
            self.model = replace(cast(Any, self.model), adapters={})
        self.chunk_cache_config, self.profile, self.profile_note = used.config, used.profile, used.note
        self._keep_unsaid()
        engine_of_model = engine_named(self.model.engine_name)
        self.attention = engine_of_model.choose_attention(self.model, attention_backend)
        backend = self.attention.backend
        self.engine_facts = EngineFacts.of(self.model, self.attention.name)
        self.self_check: SelfCheck | None = None
        self.chunk_cache_off_reason = "" if enable_chunk_cache else "switched off (enable_chunk_cache=False)"
        if enable_chunk_cache:
            check_movable(self.model, self.chunk_cache_config)
            if self_check:
                check = partial(engine_of_model.check_model, self.model, self.engine_config, backend)
                is_known = isinstance(model, str | Path) and not trust_remote_code and digest == ""
                is_known = is_known and isinstance(attention_backend, str | None) and self.engine_facts.device == "cpu"
                about = f"{self.engine_facts} {self.attention} {prepack} {self.engine_config.num_threads}"
                self.self_check = kept_check(check, self.model.fingerprint, about) if is_known else check()
                self.chunk_cache_off_reason = self.self_check.reason
                if self.chunk_cache_off_reason:
                    warnings.warn(f"the chunk cache is off: {self.chunk_cache_off_reason}", stacklevel=2)
        self.engine = build_engine(
            self.model, self.chunk_cache_config, self.engine_config, backend, self.has_chunk_cache, self.tier_config
        )
        encoder = PromptEncoder(
            self.model.tokenizer,
            self.chunk_cache_config,
            vocab_size=self.model.vocab_size,
            max_positions=self.engine.max_positions,
            tells_tools=True,
        )
        self.encoder = encoder if self.has_chunk_cache else encoder.joining()
        self.chunks = ChunkStore(self.engine, self.encoder, self.chunk_cache_config, self.chunk_cache_off_reason)
        self._default_sampling = default_sampling(self.model.generation_settings)
        tokenizer = self.model.tokenizer
        self.tool_calling = ToolCalling(tokenizer, str(getattr(tokenizer, "chat_template", None) or ""), tool_format)

    def _keep_unsaid(self) -> None:
        """Sets what the caller did not say and this model needs otherwise than most."""
        kept: dict[str, Any] = {"preamble": "all", "chunk_context": "system", "find_documents": "none"}
        if self.model.is_movable:
            kept = {"chunk_context": "system"} if usual_context(self.model) == "system" else {}
        # otherwise, after the rest of a system text or companions, documents would be read elsewhere than computed
        unsaid = {name: value for name, value in kept.items() if not self.chunk_cache_config.says(name)}
        self.chunk_cache_config = replace(self.chunk_cache_config, **unsaid)

    @property
    def has_chunk_cache(self) -> bool:
        """Whether prompts are composed from chunks."""
        return not self.chunk_cache_off_reason

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        repair: str | RepairPolicy | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, all of them together.

        Args:
            prompts: one prompt or a list: texts (ordinary prompts, unless `chunk_cache_config` names a separator),
                `Prompt`s, lists of chunk handles and texts (a `Prompt` each), lists of token ids, or mappings with
                "prompt" or "prompt_token_ids".
            sampling_params: for all prompts, or one per prompt; default `SamplingParams()`.
            priority: for all prompts, or one per prompt, from -100 to 100; higher runs first.
            position_strategy: instead of the configured one, for these prompts.
            chunk_context: what documents saw when they were computed ("system", or "none": nothing, so that they serve
                under any system text), instead of the configured one.
            repair: which tokens of documents are computed again, instead of what `sampling_params` say.
            progress: called after every finished prompt.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidPrompt: the first prompt that cannot be answered; nothing has been computed then.
            RequestTooLarge, ChunkCacheFull: a prompt that can never fit into memory.
        """
        items = prompts_of(prompts)
        params = self._params_for(sampling_params, len(items), repair)
        encoded = [self._encoder_for(each).encode(prompt) for prompt, each in zip(items, params, strict=True)]
        self._warn(*(told_separators(text) for text in items if not self.chunk_cache_config.chunk_separator))
        placing = position_strategy, chunk_context
        return self._answer(encoded, params, priorities_for(priority, len(items)), placing, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        documents: Documents | None = None,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        salt: str = "",
        priority: int | Sequence[int] = 0,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        repair: str | RepairPolicy | None = None,
        preamble: str | int | None = None,
        companions: Sequence[str] | None = None,
        documents_order: DocumentsOrder | None = None,
        find_documents: str | None = None,
        adapter: str | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations over documents, rendered through the model's chat template.

        Args:
            messages: one conversation ([{"role": "user", "content": "…"}]) or a list of them.
            sampling_params: for all conversations, or one each.
            documents: [{"id", "title", "text", "priority"}], Documents or texts; the same for all conversations.
            tools: [{"type": "function", "function": {"name", "description", "parameters"}}] as OpenAI's API has them,
                or functions with type hints and docstrings; the same for all conversations. Calls are in
                `CompletionOutput.tool_calls`.
            tool_choice: "auto" (the default), "none", "required", {"type": "function", "function": {"name": ...}}, or
                {"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}.
            parallel_tool_calls: whether an answer may hold several calls.
            salt: tenant salt; conversations with different salts share nothing.
            priority: for all conversations, or one each, from -100 to 100; higher runs first.
            position_strategy: instead of the configured one.
            chunk_context: as for `generate`.
            repair: as for `generate`.
            preamble: how much of the system text documents see, instead of the configured one.
            companions: texts that documents see with chunk_context "companions", instead of the configured ones: best
                three documents of the same kind that the prompt does not contain.
            documents_order: "any" lets the cache choose which documents come first, so that the fewest tokens are
                computed; instead of the configured one.
            find_documents: "auto", "agents", "patterns", "none" or names of patterns: documents in messages, instead
                of the configured ones.
            adapter: name of the adapter that computes them; "": the base model; None: the default, see `LLM`.
            progress: called after every finished conversation.

        Raises:
            InvalidMessages, InvalidDocument and everything that `generate` raises.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if is_one else list(messages)
        params = self._params_for(sampling_params, len(conversations), repair)
        how: dict[str, Any] = {"preamble": preamble, "companions": companions, "finder": self._finder(find_documents)}
        reader = self._reader(tools, tool_choice, parallel_tool_calls)
        encoded = [
            self.compose(
                conversation,
                documents=documents,
                tools=None if reader is None else reader.tools,
                salt=salt,
                is_endless=each.window_tokens is not None,
                **how,
            )
            for conversation, each in zip(conversations, params, strict=True)
        ]
        encoded = [replace(prompt, adapter=adapter, documents_order=documents_order) for prompt in encoded]
        if reader is not None:
            params = [reader.sampling(each) for each in params]
        placing = position_strategy, context_with(companions, chunk_context)
        outputs = self._answer(encoded, params, priorities_for(priority, len(encoded)), placing, progress)
        if reader is None:
            return outputs
        return [reader.read(output, each) for output, each in zip(outputs, params, strict=True)]

    def score(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        continuations: Continuation | Sequence[Continuation],
        *,
        repair: str | RepairPolicy | None = None,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        progress: Progress | None = None,
    ) -> list[ScoreOutput]:
        """Tells how likely the model finds given answers, token by token, each in one forward (teacher forcing).

        Documents are reused and repaired as for an ordinary answer: what a repair policy measures does not depend on
        the continuation.

        Args:
            prompts: as for `generate`.
            continuations: one for each prompt: a text, or token ids.
            repair: instead of the configured policy, for these prompts.
            position_strategy: instead of the configured one.
            chunk_context: instead of the configured one.
            progress: called after every finished prompt.

        Raises:
            InvalidPrompt: a prompt or continuation that cannot be scored; nothing has been computed then.
            InvalidRepair: a policy that does not exist, or does not suit the model.
            RequestTooLarge, ChunkCacheFull: a prompt that can never fit into memory.
        """
        items = prompts_of(prompts)
        answers = continuations_of(continuations, len(items), self.encoder)
        encoded = [self.encoder.encode(prompt) for prompt in items]
        how: dict[str, Any] = {"position_strategy": position_strategy, "chunk_context": chunk_context}
        requests = (
            self.engine.add_score(prompt, answer, repair=repair, **how)
            for prompt, answer in zip(encoded, answers, strict=True)
        )
        return [request.score() for request in self.engine.run(requests, progress)]

    def stream(
        self,
        prompt: str | Prompt | Sequence[Any],
        sampling_params: SamplingParams | None = None,
        *,
        documents: Documents | None = None,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        salt: str = "",
        priority: int = 0,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        repair: str | RepairPolicy | None = None,
        preamble: str | int | None = None,
        companions: Sequence[str] | None = None,
        documents_order: DocumentsOrder | None = None,
        find_documents: str | None = None,
        adapter: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answers one prompt or conversation, step by step: every output holds the answer so far.

        Closing the iterator aborts the request and returns its blocks.

        Raises:
            Everything that `generate` and `chat` raise, before the first output.
        """
        how: dict[str, Any] = {"preamble": preamble, "finder": self._finder(find_documents)}
        (params,) = self._params_for(sampling_params, 1, repair)
        reader = self._reader(tools, tool_choice, parallel_tool_calls)
        if isinstance(prompt, str | Prompt) or has_segments(prompt):
            if reader is not None:
                raise InvalidTools(
                    "tools go with a conversation; give messages instead of a prompt, or leave tools out"
                )
            encoded = self._encoder_for(sampling_params).beside(companions).encode(prompt, salt=salt, **how)
        else:
            encoded = self.compose(
                cast("Messages", prompt),
                documents=documents,
                tools=None if reader is None else reader.tools,
                salt=salt,
                is_endless=params.window_tokens is not None,
                companions=companions,
                **how,
            )
        if reader is not None:
            params = reader.sampling(params)
        placing = position_strategy, context_with(companions, chunk_context)
        adapter, order = encoded.adapter if adapter is None else adapter, documents_order or encoded.documents_order
        encoded = replace(encoded, adapter=adapter, documents_order=order)
        outputs = self._stream(encoded, params, check_priority(priority), placing)
        return outputs if reader is None else reader.read_all(outputs, params)

    def _finder(self, find_documents: str | None) -> DocumentFinder | None:
        if find_documents is None:
            return None
        return document_finder(read_find_documents(find_documents), self.chunk_cache_config.document_pattern)

    def compose(
        self,
        messages: Messages,
        *,
        documents: Documents | None = None,
        tools: Tools | None = None,
        salt: str = "",
        is_endless: bool = False,
        preamble: str | int | None = None,
        companions: Sequence[str] | None = None,
        finder: DocumentFinder | None = None,
    ) -> Prompt:
        """Renders a conversation over documents to a tokenized prompt, to look at or to pass to `generate`.

        A model without a chat template takes one question with an optional system text, as plain text. With
        `is_endless`, the question may be longer than the model: for sampling parameters with `window_tokens`. With
        `preamble` and `companions`, documents see these instead of what the settings say. `tools` are in the
        order of their names, whatever their order here. Without documents, a `finder` finds them in the messages,
        instead of the one of the settings.

        Raises:
            InvalidMessages, InvalidDocument, InvalidTools: see `chat`.
        """
        encoder = (self.encoder.endless() if is_endless else self.encoder).beside(companions)
        if tools and (read := read_tools(tools, None, True, self.model)) is not None:
            written = read.for_template()
            return encoder.encode_chat(messages, documents, salt=salt, preamble=preamble, finder=finder, tools=written)
        if documents is not None and not getattr(self.model.tokenizer, "chat_template", None):
            *system, question = (message["content"] for message in read_messages(messages))
            if [message["role"] for message in messages] in (["user"], ["system", "user"]):
                prompt = Prompt.from_documents(documents, question, system=system[0] if system else None, salt=salt)
                return encoder.encode(prompt, control_tokens=False, preamble=preamble)
        return encoder.encode_chat(messages, documents, salt=salt, preamble=preamble, finder=finder)

    def warm(
        self,
        documents: Documents,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        salt: str = "",
        chunk_context: ChunkContext | None = None,
        preamble: str | int | None = None,
        companions: Sequence[str] | None = None,
        find_documents: str | None = None,
        progress: Progress | None = None,
    ) -> list[ChunkHandle]:
        """Computes documents now, so that later prompts find them.

        Args:
            documents: as for `chat`.
            system: the system prompt under which they will be used; their keys depend on it (unless chunk_context is
                "none"). None: no system message.
            tools: those with which they will be used, which documents see, too.
            salt: tenant salt of these prompts.
            chunk_context: as these prompts will say it.
            preamble: as these prompts will say it.
            companions: as these prompts will say them; then a document is computed for each place in a prompt that
                changes its companions.
            find_documents: as these prompts will say it, if they have the documents in their texts ("patterns"): then
                the text of a document is computed alone, without title and template. None: they pass `documents`.
            progress: called after every finished document.

        Returns:
            One handle per chunk (a long document may be several).
        """
        if isinstance(documents, str | bytes | Mapping) or not isinstance(documents, Iterable):
            raise InvalidDocument(f"documents must be a list, got {type(documents).__name__}")
        documents = list(documents)
        most = self.chunk_cache_config.max_prompt_chunks
        parts = [documents[first : first + most] for first in range(0, max(len(documents), 1), most)]
        read = read_tools(tools, None, True, self.model)
        how = {"preamble": preamble, "find_documents": find_documents}
        options: dict[str, Any] = how | ({} if read is None else {"tools": read.for_template()})
        encoder, context = self.encoder.beside(companions), context_with(companions, chunk_context)
        prompts = [encoder.encode_documents(part, system=system, salt=salt, **options) for part in parts]
        self._warn(told_splits(prompts))
        return self.chunks.warm(prompts, progress, chunk_context=context)

    def plan(
        self,
        prompt: str | Prompt | Sequence[Any],
        *,
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
    ) -> Plan:
        """What would be reused, moved and computed for a prompt now; nothing is computed or changed."""
        encoded = self.encoder.encode(prompt)
        placed = self.engine.placer.place(encoded, strategy=position_strategy, context=chunk_context)
        layout = placed.layout if placed.repair is None or placed.repair.is_full else placed.repair.layout
        return replace(self.engine.kv_cache.plan(layout, encoded.salt, encoded.tenant), remark=placed.remark)

    def reset_prefix_cache(self, *, reset_external: bool = False) -> bool:
        """Drops all that is cached and not in use, pinned chunks too; returns whether nothing is left.

        Args:
            reset_external: also the entries in tiers that this process has stored or loaded.
        """
        return self.engine.reset_prefix_cache(reset_external=reset_external)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the model's `generation_config.json` recommends."""
        return self._default_sampling

    def get_chunk_cache_stats(self) -> ChunkCacheStats:
        """Returns counters and fill levels of the chunk cache."""
        return self.engine.kv_cache.statistics()

    def sleep(self, level: int = 1) -> None:
        """Releases the device memory of the caches when running requests have ended; `wake` allocates it again.

        Args:
            level: as in vLLM: 1 keeps the caches in the memory of the host, 2 drops them.

        Raises:
            InvalidConfig: another level.
        """
        self.engine.sleep(level, refuse=True)
        while not self.engine.is_asleep:
            self.engine.step()

    def wake(self) -> None:
        """Allocates the memory again and restores the caches; does nothing while awake."""
        self.engine.wake()

    def sleep_cold_chunks(self, min_accesses: int = 1, idle_seconds: float = 600.0) -> int:
        """Offloads cold chunks to the tiers: idle for this long, and used less often than this.

        Both must hold. For either, call it twice: with `min_accesses=2**40`, and with `idle_seconds=0`.

        Returns:
            Number of chunks moved. Their next use loads them again.

        Raises:
            InvalidConfig: a number outside its range, or there are no tiers to move them to.
        """
        if self.engine.offloader is None:
            raise InvalidConfig("chunks sleep in tiers, and there are none; give tier_config, or `delete` chunks")
        return self.engine.kv_cache.evict_cold(min_accesses, idle_seconds)

    def close(self) -> None:
        """Aborts all requests and refuses further ones; calling it again is safe."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reader(
        self, tools: Tools | None, choice: str | Mapping[str, Any] | None, is_parallel: bool
    ) -> AnswerReader | None:
        """Reads the calls out of answers; None without tools."""
        if not tools and choice in (None, "auto", "none"):
            return None
        read = read_tools(tools, choice, is_parallel, self.model)
        return None if read is None else AnswerReader(self.tool_calling, read)

    def _warn(self, *told: str) -> None:
        for text in filter(None, dict.fromkeys(told)):
            if self.has_chunk_cache:
                warnings.warn(text, stacklevel=3)

    def _encoder_for(self, params: SamplingParams | None) -> PromptEncoder:
        """With a rolling window, a prompt may be longer than the model."""
        is_endless = isinstance(params, SamplingParams) and params.window_tokens is not None
        return self.encoder.endless() if is_endless else self.encoder

    def _params_for(
        self,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
        repair: str | RepairPolicy | None,
    ) -> list[SamplingParams]:
        if repair is not None:
            return [replace(params, repair=repair) for params in self._params_for(sampling_params, count, None)]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or SamplingParams()] * count
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
            kind = type(sampling_params).__name__
            raise InvalidSampling(f"sampling_params must be SamplingParams or a list of them, got {kind}")
        if len(sampling_params) != count:
            raise InvalidConfig(f"{len(sampling_params)} sampling_params for {count} prompts; give one, or one each")
        return list(sampling_params)

    def _add(self, prompt: Prompt, params: SamplingParams, priority: int, placing: _Placing) -> Request:
        is_told = prompt.is_joined and not self.has_chunk_cache
        note = f"not composed: {self.chunk_cache_off_reason}" if is_told else ""
        strategy, context = placing
        return self.engine.add_request(
            prompt, params, priority=priority, position_strategy=strategy, chunk_context=context, note=note
        )

    def _answer(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        priorities: Sequence[int],
        placing: _Placing,
        progress: Progress | None,
    ) -> list[RequestOutput]:
        self._warn(told_splits(prompts), *(prompt.remark for prompt in prompts))
        requests = (self._add(*each, placing) for each in zip(prompts, params, priorities, strict=True))
        return [request.output() for request in self.engine.run(requests, progress)]

    def _stream(
        self, prompt: Prompt, params: SamplingParams, priority: int, placing: _Placing
    ) -> Iterator[RequestOutput]:
        self._warn(told_splits([prompt]), prompt.remark)
        request = self._add(prompt, params, priority, placing)
        shown = (0, False)
        try:
            while True:
                if request.error is not None:
                    raise request.error
                # another stream's step may have advanced or ended this answer
                state = (sum(answer.num_tokens for answer in request.answers), request.is_finished)
                if state != shown:
                    shown = state
                    yield request.output()
                elif request.is_finished:
                    return
                else:
                    self.engine.step()
        finally:
            self.engine.abort_all([request])
