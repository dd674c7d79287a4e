"""Prompt encoder: turns prompts, texts and conversations into segments of token ids."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kvmosaic.errors import ChunkTooLong, InvalidPrompt, PromptTooLong, TooManyChunks
from kvmosaic.prompt.chat_request import known_roles, other_forms, with_told_tools
from kvmosaic.prompt.chat_template.document_placement import place_documents
from kvmosaic.prompt.companions import NUM_COMPANIONS, like_one_before, paragraph_for, read_companions
from kvmosaic.prompt.conversation import Conversation, TemplateRefusal
from kvmosaic.prompt.document import MAX_POSITION, Document, read_documents, seen_documents
from kvmosaic.prompt.found_documents import (
    DocumentFinder,
    Draft,
    Part,
    drafts_of,
    found_parts,
    is_of_agent,
    said_before,
    split_at_documents,
    tokens_up_to,
    with_documents,
    with_texts,
)
from kvmosaic.prompt.message import read_messages
from kvmosaic.prompt.patterns import always_fits, document_finder, read_find_documents
from kvmosaic.prompt.preamble import (
    PreambleRule,
    placed,
    preamble_end,
    preamble_rule,
    with_preamble,
    with_preamble_tokens,
)
from kvmosaic.prompt.segment import Prompt, Segment, SegmentKind, document_segment, has_segments, numbered
from kvmosaic.prompt.separator import check_unicode
from kvmosaic.prompt.settings import PromptSettings, check_token_ids
from kvmosaic.prompt.splits import fit_chunks
from kvmosaic.prompt.text_pieces import TextPiece, foreign, joined, merged, split_pieces, template
from kvmosaic.prompt.tokenizer import Encoded, PieceTokenizer, Tokenizer

MAX_ENDLESS_TOKENS = 2**20
"""Maximum tokens of a question (or plain prompt) processed by a rolling window."""

_PLACEHOLDER_QUESTION = "?"
_MAX_KNOWN = 512
_END_CHARACTERS = 800
"""Of a document, that are compared: somewhat more than the tokens that count."""
_EMPTY_LINE = "\n\n"


class PromptEncoder:
    """Encoder of any prompt input into a prompt of token ids.

    Each segment is tokenized alone, so a document has the same tokens in every prompt. The BOS token is at the start of
    the first segment, in a system segment of its own if documents come first; the EOS token that some tokenizers append
    is omitted, since the answer follows. A tokenizer that prepends a space to every text does so for every segment.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        settings: PromptSettings,
        *,
        vocab_size: int,
        max_positions: int | None = None,
        tells_tools: bool = False,
    ) -> None:
        """Takes a transformers tokenizer, or None if every prompt is given as token ids.

        Args:
            tokenizer: turns text into ids and renders conversations.
            settings: limits and the separator, usually the `ChunkCacheConfig`.
            vocab_size: the model's number of token ids.
            max_positions: the model's number of positions, which no segment may exceed; None: no limit.
            tells_tools: whether the system text tells of tools where the chat template shows none.
        """
        self.tokenizer = tokenizer
        self.settings = settings
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self._preamble = preamble_rule(self.settings.preamble)
        self._finder = document_finder(
            read_find_documents(self.settings.find_documents), self.settings.document_pattern
        )
        self._pieces = None if tokenizer is None else PieceTokenizer(tokenizer)
        self._companions = read_companions(self.settings.companions)
        self._known: dict[tuple[TextPiece, ...], tuple[int, ...]] = {}
        """Companions as they are written in a prompt, and ends of an agent's documents; and their tokens."""
        self._tells_tools = tells_tools
        self._is_endless = False
        self._is_joining = False
        self._splits = self.settings.long_chunks != "error"

    def endless(self) -> PromptEncoder:
        """The same encoder for a rolling window: question and plain prompt may exceed the model's positions."""
        other = copy.copy(self)
        other._is_endless = True
        return other

    def beside(self, companions: Sequence[str] | None) -> PromptEncoder:
        """The same encoder with other companions than the settings' (None: the same); see `read_companions`."""
        if companions is None:
            return self
        other = copy.copy(self)
        other._companions = read_companions(companions)
        return other

    def joining(self) -> PromptEncoder:
        """The same encoder without a chunk cache: a prompt of segments becomes one ordinary text, tokenized as one.

        Texts of segments are paragraphs, separated by an empty line where there is no white space. Conversations are
        rendered by their chat template. Segments given as token ids are concatenated.
        """
        other = copy.copy(self)
        other._is_joining = True
        return other

    def _splitting(self) -> PromptEncoder:
        """The same encoder for documents found in text: the caller did not cut them, so a long one is split."""
        other = copy.copy(self)
        other._splits = True
        return other

    def encode(
        self,
        prompt: Prompt | str | Sequence[int],
        *,
        salt: str = "",
        control_tokens: bool = True,
        preamble: str | int | None = None,
        finder: DocumentFinder | None = None,
    ) -> Prompt:
        """Tokenizes a prompt; a text or a list of token ids is an ordinary prompt.

        The system segment of a prompt with chunks is split where its preamble ends, unless a text segment follows it.

        Args:
            prompt: the input. A text is split only where the settings name a separator, or at documents that the finder
                finds in it. Segments with token ids are checked and kept.
            salt: tenant salt of a text or a list; a `Prompt` has its own.
            control_tokens: whether control tokens written in a plain prompt, a system text or a question count. In
                documents they never do.
            preamble: where the preamble ends, instead of the settings; see `preamble_rule`.
            finder: finds documents in a text, instead of the settings.

        Raises:
            InvalidPrompt: and its subclasses, naming the value, the limit and the fix.
            InvalidPreamble: a rule that cannot be read or used.
        """
        if isinstance(prompt, str):
            prompt = Prompt.from_text(prompt, self.settings.chunk_separator, salt=salt)
            finder = self._finder if finder is None else finder
            is_searched = not finder.is_empty and not finder.is_for_chats
            if is_searched and prompt.is_plain and not self._is_joining:
                found = with_documents(prompt, finder, self.settings.max_prompt_chunks)
                return self._splitting().encode(found, control_tokens=control_tokens, preamble=preamble)
        elif not isinstance(prompt, Prompt):
            prompt = Prompt(prompt, salt) if has_segments(prompt) else Prompt.plain(prompt, salt=salt)  # type: ignore[arg-type]
        self._check_count(prompt.segments)
        rule = self._preamble if preamble is None else preamble_rule(preamble)
        segments, encodings, pieces = [], [], list[TextPiece]()
        given = prompt.segments if self._is_joining else with_preamble(prompt.segments, rule)
        has_text = any(segment.token_ids is None for segment in given)
        if given[0].kind in (SegmentKind.CHUNK, SegmentKind.TEXT) and has_text and self._prefix:
            segments.append(Segment(SegmentKind.SYSTEM, self._prefix, text=""))
            encodings.append(Encoded(self._prefix, None))
        for segment in numbered(given):
            if segment.token_ids is None:
                trusted = control_tokens and segment.kind is not SegmentKind.CHUNK
                piece = template(segment.text or "") if trusted else foreign(segment.text or "")
                encoded = self._encode([piece], segment, with_prefix=not segments)
                pieces += [template(_gap(pieces, piece)), piece]
            else:
                encoded = Encoded(segment.token_ids, None)
            segments.append(replace(segment, token_ids=encoded.token_ids))
            encodings.append(encoded)
        is_split = any(segment.kind is SegmentKind.TEXT for segment in given[:2])  # by the caller
        if not self._is_joining and not is_split:
            segments, encodings = with_preamble_tokens(segments, encodings, rule.num_tokens)
        companions = prompt.companions or self._companion_tokens(_found_text, segments)
        checked = self._checked(segments, encodings, prompt.salt)
        checked = replace(
            checked,
            tenant=prompt.tenant,
            is_joined=prompt.is_joined,
            companions=companions,
            place=prompt.place,
            documents_order=prompt.documents_order,
            adapter=prompt.adapter,
        )
        if not self._is_joining or checked.is_plain:
            return checked
        has_ids = any(segment.token_ids is not None for segment in prompt.segments)
        return checked.joined() if has_ids else self._joined(checked, pieces, with_prefix=True)

    def encode_chat(
        self,
        messages: object,
        documents: Iterable[object] | None = None,
        *,
        salt: str = "",
        preamble: str | int | None = None,
        finder: DocumentFinder | None = None,
        **template_options: Any,
    ) -> Prompt:
        """Renders a conversation through the tokenizer's chat template and tokenizes it.

        With documents, everything before them is the system segment (and a text segment after its preamble), each
        document is a chunk, and everything after them is the question. Without documents, it is one plain segment, or
        what a finder finds in its messages. Control tokens count only where the template wrote them.

        Args:
            messages: `{"role": ..., "content": ...}`, a content being a text or a list of text parts. The preamble ends
                with the first part of a system message that is marked with `cache_control`.
            documents: texts, mappings with "text" (and "title", "id") or `Document`s.
            salt: tenant salt.
            preamble: where it ends if no part is marked, instead of the settings; see `preamble_rule`.
            finder: finds documents in the messages, instead of the settings. With documents of its own, a conversation
                is searched only for what the request placed in its messages.
            template_options: passed to the template, for example tools=..., enable_thinking=..., chat_template=....

        Raises:
            InvalidMessages: not a conversation, or one that the template rejects.
            InvalidDocument: an entry that is not a document.
            InvalidPrompt: and its other subclasses.
            InvalidPreamble: a rule that cannot be read or used.
        """
        read = read_documents(documents or (), self.settings.max_prompt_chunks)
        rule = self._preamble if preamble is None else preamble_rule(preamble)
        encode = partial(self._encode_chat, read, rule=rule, salt=salt, finder=finder, options=template_options)
        prompt = _as_taken(messages, encode)
        return replace(prompt, has_tools=True) if template_options.get("tools") else prompt

    def _encode_chat(
        self,
        read: tuple[Document, ...],
        messages: Any,
        *,
        rule: PreambleRule,
        salt: str,
        finder: DocumentFinder | None,
        options: Mapping[str, Any],
    ) -> Prompt:
        messages, conversation = self._conversation(messages, options)
        last_answer = conversation.last_answer
        if not read:
            pieces = conversation.pieces()
            finder = self._finder if finder is None else finder
            if not finder.is_empty and not self._is_joining:
                found = split_at_documents(pieces, finder, self.settings.max_prompt_chunks, conversation.messages)
                found = self._with_versions(found)
                if len(found) > 1:
                    return self._splitting()._encode_found(conversation, found, messages, rule, salt)
            return self._from_pieces([Draft(SegmentKind.PLAIN, pieces)], salt, last_answer)
        if self._is_joining:
            placing, end = place_documents(conversation), None
        else:
            conversation, placing, end = placed(conversation, messages, rule)
            last_answer = conversation.last_answer
        head, rest = placing.head, tuple[TextPiece, ...]()
        if end is not None:
            head, rest = split_pieces(placing.head, end)
        drafts = [Draft(SegmentKind.SYSTEM, head), *[Draft(SegmentKind.TEXT, rest)] * bool(rest)]
        seen = zip(read, seen_documents(read), strict=True)
        drafts += [Draft(SegmentKind.CHUNK, placing.chunk(each), document_segment(each, sees)) for each, sees in seen]
        drafts += drafts_of(self._placed_parts(placing.tail, finder, len(read)))
        prompt = self._from_pieces(drafts, salt, last_answer, None if rest else rule.num_tokens)
        companions = self._companion_tokens(lambda text: placing.chunk(Document(text)), prompt.segments)
        return replace(prompt, companions=companions)

    def _conversation(self, messages: Any, options: Mapping[str, Any]) -> tuple[Any, Conversation]:
        """A conversation whose tools the model sees, and its messages."""
        read = read_messages(messages)
        template = options.get("chat_template") or getattr(self._known_tokenizer(), "chat_template", None)
        messages, read = known_roles(str(template), messages), known_roles(str(template), read)
        conversation = Conversation(self._known_tokenizer(), read, options)
        if self._tells_tools and (tools := conversation.hidden_tools):
            messages = with_told_tools(messages, tools)
            conversation = Conversation(self._known_tokenizer(), read_messages(messages), {**options, "tools": None})
        conversation.check_tools()
        return messages, conversation

    def _placed_parts(self, tail: Sequence[TextPiece], finder: DocumentFinder | None, num_documents: int) -> list[Part]:
        """What follows the documents of a conversation, split at documents placed in its messages."""
        if finder is None or finder.placed is None or self._is_joining:
            return [Part(tuple(tail))]
        return split_at_documents(tail, finder.only_placed(), self.settings.max_prompt_chunks - num_documents)

    def _with_versions(self, parts: Sequence[Part]) -> list[Part]:
        """The same parts, with results of an agent's tools that are like one of the few before them as text.

        Another version of a file is read after the first one, and sees it; read apart, they may be mixed up.
        """
        is_result = [is_of_agent(part.found) for part in parts if part.found]
        if not any(is_result):
            return list(parts)
        texts = [joined(part.pieces) for part in parts if part.found]
        later = like_one_before([self._ends(text) for text in texts], texts)
        return with_texts(parts, {number for number in later if is_result[number]})

    def _ends(self, text: str) -> tuple[int, ...]:
        """The tokens of a text's ends; of all of it if it is short."""
        ends = [text] if len(text) <= 2 * _END_CHARACTERS else [text[:_END_CHARACTERS], text[-_END_CHARACTERS:]]
        return tuple(token for end in ends for token in self._remembered([foreign(end)]))

    def _encode_found(
        self, conversation: Conversation, parts: Sequence[Part], messages: Any, rule: PreambleRule, salt: str
    ) -> Prompt:
        """A conversation with documents found in its messages.

        Documents see the preamble of the system messages, and never what a user or the model said before them.
        """
        drafts = list(drafts_of(parts))
        head = drafts.pop(0).pieces if drafts[0].kind is SegmentKind.TEXT else ()
        system, rest = split_pieces(head, said_before(conversation, head))
        end = preamble_end(conversation, system, messages, rule, has_documents=False)
        if end is not None:
            system, changing = split_pieces(system, end)
            rest = merged(changing + rest)
        before = [Draft(SegmentKind.SYSTEM, system), *[Draft(SegmentKind.TEXT, rest)] * bool(joined(rest))]
        drafts = before + drafts
        num_tokens = rule.num_tokens if end is None else None
        prompt = self._from_pieces(drafts, salt, conversation.last_answer, num_tokens)
        companions = self._companion_tokens(_found_text, prompt.segments)
        # what agents were given moves to the front when earlier turns are dropped, and is the same document there
        moves_up = any(map(is_of_agent, prompt.chunks))
        return replace(prompt, companions=companions, place=min(len(companions), NUM_COMPANIONS) * moves_up)

    def encode_documents(
        self,
        documents: Iterable[object],
        system: str | None = None,
        *,
        salt: str = "",
        chat: bool | None = None,
        preamble: str | int | None = None,
        find_documents: str | Sequence[str] | None = None,
        **template_options: Any,
    ) -> Prompt:
        """A prompt with the system and chunk segments of later prompts with these documents, for cache warming.

        Its question is a placeholder; only the segments before it matter.

        Args:
            documents: texts, mappings with "text" (and "title", "id") or `Document`s.
            system: the system text of the later prompts.
            salt: tenant salt of the later prompts.
            chat: whether they are conversations (`encode_chat`) or texts (`Prompt.from_text`, `from_documents`); None:
                conversations if the tokenizer has a chat template.
            preamble: that of the later prompts, if not that of the settings.
            find_documents: that of the later prompts, if they have the documents in their texts: then a chunk is the
                document's text alone, without its title and the template's format. None, "auto": they pass documents.
            template_options: as for `encode_chat`.
        """
        read: tuple[Document, ...] = read_documents(documents, self.settings.max_prompt_chunks)
        names = read_find_documents(find_documents or ())
        is_found = bool(names) and not ("auto" in names and always_fits(names))
        if chat is None:
            chat = bool(template_options.get("chat_template") or getattr(self.tokenizer, "chat_template", None))
        if not chat:
            read = tuple(replace(each, id=each.name, title=None) for each in read) if is_found else read
            prompt = Prompt.from_documents(read, _PLACEHOLDER_QUESTION, system=system, salt=salt)
            return (self._splitting() if is_found else self).encode(prompt, preamble=preamble)
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": _PLACEHOLDER_QUESTION})
        if is_found:
            rule = self._preamble if preamble is None else preamble_rule(preamble)

            def encode(messages: Any) -> Prompt:
                told, conversation = self._conversation(messages, template_options)
                parts = found_parts(conversation.pieces(), read)
                return self._splitting()._encode_found(conversation, parts, told, rule, salt)

            return _as_taken(messages, encode)
        return self.encode_chat(messages, read, salt=salt, preamble=preamble, **template_options)

    def bare(self, text: str) -> tuple[int, ...]:
        """The tokens of an ordinary prompt without BOS.

        Raises:
            PromptTooLong: far more tokens than the model has positions.
        """
        return self._encode([template(text)], Segment(SegmentKind.PLAIN, text=text)).token_ids

    def continuation(self, text: str) -> tuple[int, ...]:
        """The tokens of an answer as it would follow a prompt: control tokens written in it count as text.

        Raises:
            InvalidPrompt: it is no text, it is empty, or there is no tokenizer.
        """
        if not isinstance(text, str) or not text:
            raise InvalidPrompt(f"a continuation is a text of at least one character, or token ids; got {text!r:.80}")
        check_unicode(text, InvalidPrompt)
        self._known_tokenizer()
        assert self._pieces is not None
        return self._pieces.encode([foreign(text)]).token_ids

    @property
    def _prefix(self) -> tuple[int, ...]:
        return self._pieces.prefix if self._pieces else ()

    def _companion_tokens(
        self, written: Callable[[str], Sequence[TextPiece]], segments: Sequence[Segment]
    ) -> tuple[tuple[int, ...], ...]:
        """Companions for the documents of a prompt; empty for a prompt without, or without a tokenizer."""
        if self._pieces is None or all(segment.kind is not SegmentKind.CHUNK for segment in segments):
            return ()
        documents = (segment.text or "" for segment in segments if segment.kind is SegmentKind.CHUNK)
        return tuple(map(self._remembered, map(written, self._companions or (paragraph_for(documents),))))

    def _remembered(self, pieces: Sequence[TextPiece]) -> tuple[int, ...]:
        """The tokens of a text that many prompts have."""
        assert self._pieces is not None
        known, key = self._known, tuple(pieces)
        if (token_ids := known.get(key)) is None:
            if len(known) >= _MAX_KNOWN:
                known.clear()
            token_ids = known[key] = self._pieces.encode(key).token_ids
        return token_ids

    def _from_pieces(
        self,
        drafts: Sequence[Draft],
        salt: str,
        last_answer: int | None = None,
        num_preamble: int | None = None,
    ) -> Prompt:
        """A prompt of rendered segments; the template has already written the BOS token."""
        segments, encodings = [], []
        for segment, draft in zip(numbered([draft.segment() for draft in drafts]), drafts, strict=True):
            encoded = self._encode(draft.pieces, segment)
            if segment.kind is SegmentKind.SYSTEM and not encoded.token_ids:
                continue
            history_tokens = tokens_up_to(draft.pieces, last_answer, encoded)
            segments.append(replace(segment, token_ids=encoded.token_ids, history_tokens=history_tokens))
            encodings.append(encoded)
        if not self._is_joining:
            segments, encodings = with_preamble_tokens(segments, encodings, num_preamble)
        checked = self._checked(segments, encodings, salt)
        if not self._is_joining or checked.is_plain:
            return checked
        return self._joined(checked, [piece for draft in drafts for piece in draft.pieces], last_answer)

    def _joined(
        self, prompt: Prompt, pieces: Sequence[TextPiece], last_answer: int | None = None, *, with_prefix: bool = False
    ) -> Prompt:
        """A prompt of segments as an ordinary prompt: the tokens of their joined text."""
        pieces = merged(pieces)
        segment = Segment(SegmentKind.PLAIN, text=joined(pieces))
        encoded = self._encode(pieces, segment, with_prefix=with_prefix)
        history_tokens = tokens_up_to(pieces, last_answer, encoded)
        segment = replace(segment, token_ids=encoded.token_ids, history_tokens=history_tokens)
        return replace(prompt, segments=(segment,), is_joined=True)

    def _checked(self, segments: list[Segment], encodings: list[Encoded], salt: str) -> Prompt:
        for segment in segments:
            check_token_ids(segment.token_ids or (), self.vocab_size, segment.label)
        parts = fit_chunks(
            segments,
            encodings,
            self.settings.max_chunk_tokens,
            split=self._splits,
            max_part_tokens=self._room(segments) if self._splits else MAX_POSITION,
            max_section_tokens=self.settings.max_section_tokens,
            divides_all=self.settings.long_chunks == "sections",
            max_in_order=self._free(segments) - 1,
        )
        self._check_count(parts)
        for part in parts:
            most = self._max_tokens(part)
            if most is not None and part.num_tokens > most:
                can_split = part.kind is SegmentKind.CHUNK and not self._splits
                reason = f"the limit is {most}" if most == MAX_ENDLESS_TOKENS else f"the model has {most} positions"
                raise PromptTooLong(
                    f"the {part.label} alone has {part.num_tokens} tokens, {reason}; "
                    "shorten it" + (" or set long_chunks='split'" if can_split else ""),
                    num_tokens=part.num_tokens,
                    max_tokens=most,
                    document=part.document,
                )
        return Prompt(parts, salt=salt)

    def _max_tokens(self, segment: Segment) -> int | None:
        """Maximum tokens of a segment by the model's positions; None: no limit."""
        is_last = segment.kind in (SegmentKind.QUESTION, SegmentKind.PLAIN)
        return MAX_ENDLESS_TOKENS if self._is_endless and is_last else self.max_positions

    def _room(self, segments: Sequence[Segment]) -> int:
        """Maximum tokens per part of a split chunk: usually half of the positions after the system prompt.

        A long question halves it to a quarter, or an eighth. It changes in such steps only: if a document's
        parts changed with every question, they would never be cache hits. Nothing is split into smaller parts.
        """
        if self.max_positions is None:
            return MAX_POSITION
        room = self._free(segments)
        changing = (SegmentKind.QUESTION, SegmentKind.TEXT)
        free = room + sum(segment.num_tokens for segment in segments if segment.kind in changing)
        if room < 2:
            return self.max_positions
        parts = (free // 2, free // 4, max(free // 8, 1))
        return next((part for part in parts if part <= room * 3 // 4), MAX_POSITION)

    def _free(self, segments: Sequence[Segment]) -> int:
        """The model's positions minus system prompt, texts and question."""
        if self.max_positions is None:
            return MAX_POSITION
        return self.max_positions - sum(
            segment.num_tokens for segment in segments if segment.kind is not SegmentKind.CHUNK
        )

    def _check_count(self, segments: Sequence[Segment]) -> None:
        num_chunks = sum(segment.kind is SegmentKind.CHUNK for segment in segments)
        if num_chunks > self.settings.max_prompt_chunks:
            raise TooManyChunks(
                f"{num_chunks} documents in one prompt (parts of long ones included); raise max_prompt_chunks "
                f"({self.settings.max_prompt_chunks}) or send fewer"
            )

    def _refuse_far_too_long(self, segment: Segment, pieces: PieceTokenizer) -> None:
        """Rejects a text that cannot fit before tokenizing all of it, which can take seconds."""
        is_chunk = segment.kind is SegmentKind.CHUNK
        limits = [
            limit
            for limit in (self._max_tokens(segment), self.settings.max_chunk_tokens if is_chunk else None)
            if limit
        ]
        if not limits:
            return
        limit, text = min(limits), segment.text or ""
        if is_chunk and self._splits:
            limit *= self.settings.max_prompt_chunks
        number = pieces.far_longer(text, limit)
        if not number:
            return
        told = f"the {segment.label} has {len(text)} characters, far more than the limit of {limit} tokens"
        if is_chunk and limit == self.settings.max_chunk_tokens:
            way_out = "raise max_chunk_tokens, shorten the document, or set long_chunks='split'"
            raise ChunkTooLong(f"{told}; {way_out}", document=segment.document)
        can_split = is_chunk and not self._splits
        way_out = "shorten it" + (" or set long_chunks='split'" if can_split else "")
        raise PromptTooLong(f"{told}; {way_out}", num_tokens=number, max_tokens=limit, document=segment.document)

    def _encode(self, pieces: Sequence[TextPiece], segment: Segment, *, with_prefix: bool = False) -> Encoded:
        if self._pieces is None:
            self._known_tokenizer()
        assert self._pieces is not None
        self._refuse_far_too_long(segment, self._pieces)
        encoded = self._pieces.encode(pieces)
        if not with_prefix or not self._prefix:
            return encoded
        starts = None if encoded.starts is None else (0,) * len(self._prefix) + encoded.starts
        return Encoded(self._prefix + encoded.token_ids, starts)

    def _known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidPrompt(
                "there is no tokenizer, so text cannot be read; give token ids (Prompt.from_tokens) or load a tokenizer"
            )
        return self.tokenizer


def _as_taken(messages: Any, encode: Callable[[Any], Prompt]) -> Prompt:
    """Encodes a conversation; one that the template refuses, in the first form that it takes."""
    try:
        return encode(messages)
    except TemplateRefusal:
        for remark, moved in other_forms(messages):
            with suppress(TemplateRefusal):
                return replace(encode(moved), remark=remark)
        raise


def _found_text(text: str) -> list[TextPiece]:
    """A companion of documents that have no template around them."""
    return [foreign(text + _EMPTY_LINE)]


def _gap(before: Sequence[TextPiece], piece: TextPiece) -> str:
    """The separator between a text and the one before it: an empty line, unless there is white space."""
    if not before or before[-1].text[-1:].isspace() or piece.text[:1].isspace():
        return ""
    return _EMPTY_LINE
