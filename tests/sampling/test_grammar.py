import builtins
import itertools
import json
import random
import re
import subprocess
import sys
import threading
from time import process_time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from kvmosaic.assembly import bundled_reader
from kvmosaic.errors import InvalidSampling, pip_install
from kvmosaic.sampling import GrammarCompiler, StructuredOutputs
from kvmosaic.sampling.grammar import MAX_CACHED_GRAMMARS, check_grammar, check_schema

PADDING = 37
"""Ids of the model that the tokenizer does not have."""


def llama2_style():
    """A small tokenizer built as that of Llama 2: pieces with ▁ for a space, and bytes for everything else."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*'▁abcdefghijklmnopqrstuvwxyz0123456789{}[]:,"', "▁a", "▁b", "ab", "▁ab", "▁▁", "ye", "yes", "▁yes", "ß"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁", "▁"), ("y", "e"), ("ye", "s"), ("▁", "yes")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def reader():
    return PreTrainedTokenizerFast.from_pretrained(bundled_reader())


TOKENIZERS = {
    "byte_level": make_tokenizer(),
    "unigram": make_tokenizer(kind="unigram"),
    "llama2": llama2_style(),
    "reader": reader(),
}


def compiler_for(tokenizer, padding=PADDING):
    return GrammarCompiler(tokenizer, len(tokenizer) + padding, [tokenizer.eos_token_id])


COMPILERS = {name: compiler_for(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def brute_force(tokenizer, pattern, ids):
    """The twin: every token that is a text, tried one by one; those that end in half a character are left open."""
    allowed, unknown = set(), set()
    for token_id in range(len(tokenizer)):
        if token_id == tokenizer.eos_token_id:
            if regex.fullmatch(pattern, text_of(tokenizer, ids)):
                allowed.add(token_id)
        elif token_id not in tokenizer.all_special_ids:
            text = text_of(tokenizer, [*ids, token_id])
            if "�" in text:
                unknown.add(token_id)
            elif regex.fullmatch(pattern, text, partial=True) and text != text_of(tokenizer, ids):
                allowed.add(token_id)
            elif text == text_of(tokenizer, ids):
                unknown.add(token_id)  # a space that is left out of the text
    return allowed, unknown


PATTERNS = [
    "(yes|no|yes indeed)",
    "[0-9]{1,3}",
    "a+b*",
    r'\{"town":"[a-z ]{0,9}"\}',
    " ?(ab)+ ?[ab ]{2}",
    "  ab",
    "a b",
]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=8)
@given(pattern=st.sampled_from(PATTERNS), seed=st.integers(0, 2**20))
def test_the_mask_allows_what_trying_every_token_allows(name, pattern, seed):
    tokenizer, compiler = TOKENIZERS[name], COMPILERS[name]
    chance, ids = random.Random(seed), []
    try:
        matcher = compiler.compile(StructuredOutputs(regex=pattern)).start()
    except InvalidSampling:
        assert name == "unigram"  # it has no token for some characters
        return
    while not matcher.is_complete and len(ids) < 8:
        mask = matcher.vocabulary.allowed([matcher])[0]
        if matcher.failure:
            assert name == "unigram"
            return
        found = set(map(int, mask.nonzero()[0]))
        allowed, unknown = brute_force(tokenizer, pattern, ids)
        assert found - unknown <= allowed
        if missing := allowed - found:
            # Where only one text can follow, llguidance takes the token that the tokenizer would.
            texts = sorted((text_of(tokenizer, [*ids, token_id]) for token_id in missing | (found - unknown)), key=len)
            assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
            assert found
        ids.append(chance.choice(sorted(found)))
        matcher.take(ids[-1])
        assert not matcher.failure
    if matcher.is_complete:
        ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
        assert regex.fullmatch(pattern, text_of(tokenizer, ids))


def test_rows_computed_together_are_the_rows_computed_alone():
    compiler = COMPILERS["llama2"]
    forms = [
        StructuredOutputs(regex="[a-z]+"),
        StructuredOutputs(choice=["yes", "ab"]),
        StructuredOutputs(regex=" a.*"),
    ]
    matchers = [compiler.compile(form).start() for form in forms]
    vocabulary = matchers[0].vocabulary
    for _ in range(3):
        together = vocabulary.allowed(matchers)
        alone = [vocabulary.allowed([matcher])[0] for matcher in matchers]
        assert [row.tolist() for row in together] == [row.tolist() for row in alone]
        for matcher, row in zip(matchers, together, strict=True):
            if not matcher.is_complete:
                matcher.take(int(row.nonzero()[0][-1]))


def test_an_answer_may_begin_with_the_space_that_its_text_leaves_out():
    tokenizer, compiler = TOKENIZERS["llama2"], COMPILERS["llama2"]
    matcher = compiler.compile(StructuredOutputs(choice=["yes"])).start()
    begun = matcher.vocabulary.allowed([matcher])[0].nonzero()[0]
    assert tokenizer.convert_ids_to_tokens(begun.tolist()) == ["yes", "▁yes"]
    matcher.take(tokenizer.convert_tokens_to_ids("▁yes"))
    assert matcher.is_complete


def test_copies_of_a_grammar_go_their_own_ways():
    tokenizer, compiler = TOKENIZERS["reader"], COMPILERS["reader"]
    grammar = compiler.compile(StructuredOutputs(choice=["ab", "cd"]))
    first, second = grammar.start(), grammar.start()
    first.take(tokenizer.convert_tokens_to_ids("a"))
    second.take(tokenizer.convert_tokens_to_ids("c"))
    third = grammar.start()
    assert [
        bool(m.vocabulary.allowed([m])[0][tokenizer.convert_tokens_to_ids("d")]) for m in (first, second, third)
    ] == [
        False,
        True,
        False,
    ]


def test_a_model_with_fewer_ids_than_its_tokenizer_never_gets_one_too_large():
    tokenizer = TOKENIZERS["reader"]
    compiler = GrammarCompiler(tokenizer, 300, [tokenizer.eos_token_id])
    matcher = compiler.compile(StructuredOutputs(regex=".+")).start()
    assert matcher.vocabulary.allowed([matcher]).shape == (1, 300)


def test_a_token_that_is_not_allowed_is_a_failure_and_not_a_crash():
    matcher = COMPILERS["reader"].compile(StructuredOutputs(regex="a+")).start()
    matcher.take(TOKENIZERS["reader"].convert_tokens_to_ids("b"))
    assert "the answer cannot go on in its grammar" in matcher.failure
    assert not matcher.is_complete
    matcher.take(0)


def test_a_vocabulary_without_the_next_letter_is_a_failure():
    matcher = COMPILERS["unigram"].compile(StructuredOutputs(choice=["a☢"])).start()
    matcher.take(TOKENIZERS["unigram"].convert_tokens_to_ids("a"))
    assert not matcher.vocabulary.allowed([matcher])[0].any()
    assert matcher.failure


def test_compiled_grammars_are_kept_up_to_a_number():
    compiler = compiler_for(TOKENIZERS["byte_level"])
    kept = compiler.compile(StructuredOutputs(regex="a0"))
    for number in range(1, MAX_CACHED_GRAMMARS):
        compiler.compile(StructuredOutputs(regex=f"a{number}"))
    assert compiler.compile(StructuredOutputs(regex="a0")) is kept
    compiler.compile(StructuredOutputs(regex="b"))
    assert compiler.compile(StructuredOutputs(regex="a0")) is kept  # used last but one
    assert len(compiler._grammars) == MAX_CACHED_GRAMMARS


def test_compiling_works_from_many_threads():
    compiler, found = compiler_for(TOKENIZERS["byte_level"]), []
    form = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}})
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(form).start())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    masks = [matcher.vocabulary.allowed([matcher])[0].tolist() for matcher in found]
    assert len(masks) == 8
    assert all(mask == masks[0] for mask in masks)


def ambiguous(number):
    return f"(a|b)*a(a|b){{{number}}}"


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"json": {"type": "array", "contains": {}}}, r'structured_outputs.json cannot be used: .*"contains"'),
        ({"json": {"type": "text"}}, "structured_outputs.json cannot be used: Invalid type: text"),
        ({"json": {"$ref": "http://example.org/x.json"}}, "json cannot be used: .*example.org.*does not fetch"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "json cannot be used: .*does not fetch"),
        ({"json": {"oneOf": [{"const": {"a": 1}}, {"type": "object"}]}}, "json cannot be used: .*oneOf.*Use anyOf"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "json cannot be used: Unsatisfiable"),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "json cannot be used: .*look-around"),
        ({"json": {"type": "integer", "multipleOf": 999_983}}, "multipleOf: the common multiple .* 999983"),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, "multipleOf: the common multiple"),
        ({"json": {"allOf": [{"pattern": ambiguous(n)} for n in range(24)]}}, "24 patterns .* because allOf may join"),
        ({"regex": "("}, "structured_outputs.regex cannot be used: .*unclosed group"),
        ({"regex": "^$"}, "structured_outputs.regex allows only the empty answer"),
        ({"regex": r"(a)\1"}, "regex cannot be used: .*backreferences are not supported"),
        ({"regex": "(" * 2000 + ")" * 2000}, "regex cannot be used"),
        ({"grammar": "start: town"}, "structured_outputs.grammar cannot be used: .*town"),
        ({"grammar": "start: " + "(" * 30_000}, "grammar cannot be used: .*nested"),
        ({"grammar": "start: start"}, "grammar cannot be used"),
        ({"grammar": 'start: %json {"type": "string"}'}, "grammar: %json cannot be used"),
        (
            {"grammar": "start: A\nA: " + " & ".join(f"/{ambiguous(n)}/" for n in range(29))},
            "at most 6 uses of & and ~",
        ),
        ({"grammar": '{"grammars": [{"json_schema": {}}]}'}, "grammar cannot be used"),
        ({"grammar": "root ::= town ("}, "grammar: .*Expected"),
    ],
)
def test_what_cannot_be_compiled_is_named(outputs, message):
    with pytest.raises(InvalidSampling, match=message):
        COMPILERS["reader"].compile(StructuredOutputs(**outputs))


def test_ampersands_in_texts_and_patterns_and_comments_join_nothing():
    check_grammar('start: "&&&&&&&&" /[&~]&&&&\\/&&&&/ // &&&&&&&&\n')


def chain_of_references(length: int, reference: str = "#/$defs/d{}") -> dict[str, object]:
    """A schema in which each definition is an object that holds the next."""
    steps = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": reference.format(n + 1)}}} for n in range(length - 1)
    }
    return {"$ref": reference.format(0), "$defs": {**steps, f"d{length - 1}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        chain_of_references(1_000),
        chain_of_references(1_000, "#/%24defs/d{}"),
        {"$defs": [{"items": [{"$ref": f"#/$defs/{n + 1}/items/0"}]} for n in range(1_000)], "$ref": "#/$defs/0"},
        {"$defs": {"a~/": {"anyOf": [{"$ref": f"#/$defs/a~0~1/{n}"} for n in range(200)]}}},
        {"items": {"items": {"anyOf": [{"$ref": f"http://here/{n}"} for n in range(200)]}}},
    ],
)
def test_chains_of_references_that_would_overflow_the_stack_are_refused(schema):
    with pytest.raises(InvalidSampling, match=r"definitions .* nested \d+ levels deep, .* at most 512"):
        check_schema(schema)


def test_schemas_with_as_many_definitions_as_applications_have_compile():
    COMPILERS["reader"].compile(StructuredOutputs(json=chain_of_references(170)))
    check_schema({"properties": {"a": {"$ref": "#"}, "b": {"$ref": True}, "c": {"$ref": "#/properties/a/0"}}})


def test_patterns_of_separate_properties_are_not_counted_as_joined():
    check_schema({"properties": {f"p{number}": {"type": "string", "pattern": f"a{number}"} for number in range(50)}})
    check_schema(
        {"properties": {f"p{number}": {"multipleOf": step} for number, step in enumerate([0.01, 5, 10, 1000])}}
    )


@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "((a{0,1000}){0,1000}){0,1000}"},
        {"regex": "(x+x+)+y"},
        {"regex": "a?" * 1000 + "a" * 1000},
        {"regex": "(a?){2000}a{2000}"},
        {"regex": r"(\p{L}|[a-z]{1,50}){1,5000}\w{1000}"},
        {"regex": ambiguous(300)},
        {"json": {"allOf": [{"type": "string", "pattern": ambiguous(n)} for n in range(1, 7)]}},
        {"json": {"type": "string", "pattern": ambiguous(30), "minLength": 100, "maxLength": 5000}},
        {"json": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2000)}}},
        {"json": {"type": "array", "items": {"type": "string", "minLength": 1000}, "minItems": 10**6}},
        {"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{k}": {}}} for k in range(4)]} for i in range(12)]}},
        {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
        {"grammar": 'start: a\na: a a a | a a | "x" | "x" "x"'},
        {"grammar": 'start: (("a"|"b"){1,10000} "c"){1,10000}'},
    ],
)
def test_a_hostile_form_is_refused_or_followed_in_little_time(outputs):
    begin, chance = process_time(), random.Random(0)
    try:
        matcher = COMPILERS["reader"].compile(StructuredOutputs(**outputs)).start()
    except InvalidSampling:
        matcher = None
    for _ in range(30):
        if matcher is None or matcher.is_complete or matcher.failure:
            break
        mask = matcher.vocabulary.allowed([matcher])[0]
        if mask.any():
            matcher.take(int(chance.choice(mask.nonzero()[0])))
    assert process_time() - begin < 5  # it takes hundredths of a second


def test_a_missing_llguidance_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("llguidance"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **options)

    monkeypatch.delitem(sys.modules, "kvmosaic.sampling.vocabulary", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidSampling, match=re.escape(pip_install("structured"))):
        compiler_for(TOKENIZERS["byte_level"]).compile(StructuredOutputs(regex="a"))


def test_sampling_without_structured_outputs_does_not_import_llguidance():
    script = "import sys, kvmosaic.sampling; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_slow_tokenizer_and_one_without_an_end_are_refused():
    class Slow:
        eos_token_id = 1

    with pytest.raises(InvalidSampling, match="need a fast tokenizer; this model has Slow"):
        GrammarCompiler(Slow(), 10, [1]).compile(StructuredOutputs(regex="a"))
    with pytest.raises(InvalidSampling, match="need a fast tokenizer, and this model has no tokenizer"):
        GrammarCompiler(None, 10, [1]).compile(StructuredOutputs(regex="a"))
    endless = make_tokenizer()
    endless.eos_token = None
    with pytest.raises(InvalidSampling, match="need an end-of-sequence token"):
        GrammarCompiler(endless, len(endless), []).compile(StructuredOutputs(regex="a"))


def test_a_schema_cannot_switch_white_space_on():
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " *"}}
    matcher = COMPILERS["reader"].compile(StructuredOutputs(json=json.dumps(schema))).start()
    tokenizer = TOKENIZERS["reader"]
    assert not matcher.vocabulary.allowed([matcher])[0][tokenizer.encode(" ", add_special_tokens=False)].any()


def test_a_failed_row_does_not_disturb_the_rows_beside_it():
    compiler, tokenizer = COMPILERS["reader"], TOKENIZERS["reader"]
    failed, good, other = (compiler.compile(StructuredOutputs(regex="a+")).start() for _ in range(3))
    for matcher in (failed, other):
        matcher.take(tokenizer.convert_tokens_to_ids("b"))
    expected = good.vocabulary.allowed([good])[0].tolist()
    masks = good.vocabulary.allowed([failed, good, other])
    assert masks[1].tolist() == expected
    assert not masks[[0, 2]].any()
