import json
import math

import pytest

from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling import SamplingParams, StructuredOutputs
from kvmosaic.sampling.structured import MAX_CHOICES, MAX_GRAMMAR_CHARACTERS, MAX_REGEX_CHARACTERS, MAX_SCHEMA_BYTES


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_a_schema_is_stored_as_text_and_keeps_the_order_of_its_keys():
    schema = {"type": "object", "properties": {"zebra": {}, "ant": {}}}
    outputs = StructuredOutputs(json=schema)
    assert outputs == StructuredOutputs(json=json.dumps(schema))
    assert hash(outputs) == hash(StructuredOutputs(json=schema))
    assert list(outputs.schema["properties"]) == ["zebra", "ant"]
    assert outputs.kind == "json"
    assert StructuredOutputs(json_object=True).schema == {"type": "object"}


def test_choices_are_stored_as_a_tuple_without_repeats():
    assert StructuredOutputs(choice=["yes", "no", "yes"]).choice == ("yes", "no")


def test_sampling_parameters_take_a_mapping():
    params = SamplingParams.from_dict({"structured_outputs": {"regex": "a+"}})
    assert params.structured_outputs == StructuredOutputs(regex="a+")
    assert hash(params) == hash(SamplingParams(structured_outputs=StructuredOutputs(regex="a+")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs exactly one of json, json_object, regex, choice, grammar; got none"),
        ({"regex": "a", "grammar": "start: a"}, "exactly one of .*; got regex and grammar"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"regex": ""}, "regex must be a text of 1 to 4096 characters, got 0 characters"),
        ({"regex": "a" * (MAX_REGEX_CHARACTERS + 1)}, "regex must be a text of 1 to 4096"),
        ({"regex": 7}, "regex must be a text of 1 to 4096 characters, got 7"),
        ({"regex": "a\0"}, "regex contains a NUL"),
        ({"grammar": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "grammar must be a text of 1 to 65536"),
        ({"choice": "yes"}, "choice must be a list of texts, got 'yes'"),
        ({"choice": []}, "choice must have 1 to 1024 texts, got 0"),
        ({"choice": [str(number) for number in range(MAX_CHOICES + 1)]}, "choice must have 1 to 1024 texts, got 1025"),
        ({"choice": ["a", ""]}, "a choice must be a text of 1 to 4096"),
        ({"choice": ["a" + "\ud800"]}, "half a surrogate pair"),
        ({"choice": [f"{number:04000}" for number in range(20)]}, "have 80000 characters; at most 65536 together"),
        ({"json": "{"}, "the JSON schema is not JSON"),
        ({"json": "[" * 100_000}, "the JSON schema is not JSON"),
        ({"json": "[]"}, r"a JSON schema must be an object, got \[\]"),
        ({"json": 7}, "a JSON schema must be an object, got 7"),
        ({"json": {"const": math.nan}}, "the JSON schema cannot be written as JSON"),
        ({"json": {"const": {1}}}, "the JSON schema cannot be written as JSON"),
        ({"json": {"const": "\ud800"}}, "the JSON schema cannot be written as JSON"),
        ({"json": nested(70)}, "nested deeper than 64 levels"),
        ({"json": {"title": "x" * MAX_SCHEMA_BYTES}}, "the JSON schema has 131084 bytes; at most 131072"),
        ({"json": " " * (MAX_SCHEMA_BYTES + 1)}, "the JSON schema has 131073 characters"),
    ],
)
def test_what_cannot_be_a_form_is_refused_with_value_and_limit(settings, message):
    with pytest.raises(InvalidSampling, match=message):
        StructuredOutputs(**settings)


def test_unknown_fields_and_other_types_are_named():
    with pytest.raises(
        InvalidSampling, match="unknown fields of structured_outputs schema; known are json, json_object"
    ):
        SamplingParams(structured_outputs={"schema": {}})
    with pytest.raises(InvalidSampling, match="structured_outputs must be StructuredOutputs, got 'json'"):
        SamplingParams(structured_outputs="json")
