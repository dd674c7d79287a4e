import itertools
import struct
import subprocess
import sys

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.cache import KeyChain
from kvmosaic.cache.keys import decode_tokens, encode_tokens
from kvmosaic.errors import InvalidConfig, InvalidTokenId

ALGORITHMS = ["sha256", "xxh3_128"]
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def identity(
    fingerprint="model", salt="", start=0, seen=(), token_ids=(1, 2, 3), algorithm="sha256", tenant="", adapter=""
):
    chain = KeyChain(fingerprint, salt, algorithm, tenant=tenant, adapter=adapter)
    return chain.run(chain.root(start, seen), token_ids)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_identity_has_the_same_key_and_any_difference_another_one(algorithm):
    a, b = KeyChain("a").root(0), KeyChain("b").root(0)
    variants = [
        {},
        {"fingerprint": "other"},
        {"salt": "tenant"},
        {"tenant": "tenant"},
        {"tenant": "tenant", "salt": "tenant"},
        {"adapter": "tenant"},
        {"adapter": "other"},
        {"start": 1},
        {"start": -1},
        {"token_ids": (1, 2)},
        {"token_ids": (1, 2, 3, 0)},
        {"token_ids": (3, 2, 1)},
        {"seen": [(a, 0)]},
        {"seen": [(b, 0)]},
        {"seen": [(a, 1)]},
        {"seen": [(a, -1)]},
        {"seen": [(a, 0), (b, 0)]},
        {"seen": [(a, 0), (b, 5)]},
        {"seen": [(a, 5), (b, 0)]},
        {"seen": [(a, 0), (a, 0)]},
    ]
    keys = [identity(**variant, algorithm=algorithm) for variant in variants]
    assert len(set(keys)) == len(keys)
    assert keys == [identity(**variant, algorithm=algorithm) for variant in variants]


def test_what_is_seen_in_part_has_a_key_by_its_numbers():
    chain = KeyChain("model")
    root = chain.root(0)
    parts = [(), ((),), ((1,),), ((2,),), ((1, 2),), ((1,), (2,)), ((), (1,)), ((1,), ()), ((0.5,),)]
    assert len({root, *(chain.part_of(root, *numbers) for numbers in parts)}) == len(parts) + 1


def test_moving_the_border_between_fingerprint_and_salt_changes_the_key():
    assert identity(fingerprint="ab", salt="c") != identity(fingerprint="a", salt="bc")
    assert identity(fingerprint="abc", salt="") != identity(fingerprint="", salt="abc")


def test_moving_the_border_between_tenant_and_salt_changes_the_key():
    borders = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("c", "ab")]
    assert len({identity(tenant=tenant, salt=salt) for tenant, salt in borders}) == len(borders)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_moving_the_border_between_blocks_changes_the_key(algorithm):
    chain = KeyChain("model", "", algorithm)
    root = chain.root(0)
    cuts = [[[1, 2, 3, 4]], [[1, 2], [3, 4]], [[1], [2, 3, 4]], [[1, 2, 3], [4]], [[1, 2, 3, 4], []]]
    keys = set()
    for blocks in cuts:
        key = root
        for block in blocks:
            key = chain.extend(key, block)
        keys.add(key)
    assert len(keys) == len(cuts)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_is_never_mistaken_for_a_block_or_a_root(algorithm):
    chain = KeyChain("model", "", algorithm)
    root = chain.root(0)
    assert len({root, chain.run(root, [1, 2]), chain.extend(root, [1, 2]), chain.next_after(root)}) == 4
    assert chain.run(root, []) != root


def test_the_order_in_which_runs_were_seen_does_not_matter_but_their_number_does():
    chain = KeyChain("model")
    a, b = chain.run(chain.root(0), [1]), chain.run(chain.root(0), [2])
    roots = {chain.root(9, order) for order in itertools.permutations([(a, 3), (b, 4), (b, 5)])}
    assert len(roots) == 1
    assert chain.root(9, [(a, 0), (b, 0)]) not in {chain.root(9, [(a, 0)]), chain.root(9, [(a, 0), (b, 0), (b, 0)])}


@given(tokens, tokens)
def test_different_tokens_have_different_keys_and_encodings(first, second):
    chain = KeyChain("model")
    root = chain.root(0)
    assert (chain.run(root, first) == chain.run(root, second)) == (first == second)
    assert (chain.extend(root, first) == chain.extend(root, second)) == (first == second)
    assert list(decode_tokens(encode_tokens(first))) == first


def test_keys_are_the_same_in_another_process():
    code = (
        "from kvmosaic.cache import KeyChain; c = KeyChain('m', 's', 'sha256');"
        "print(c.extend(c.root(7, [(c.root(0), -2)]), [1, 2**32 - 1]).hex())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    chain = KeyChain("m", "s", "sha256")
    assert printed == chain.extend(chain.root(7, [(chain.root(0), -2)]), [1, 2**32 - 1]).hex()


def test_key_bytes_are_pinned_so_that_stored_chunks_are_found_again_after_an_update():
    chain = KeyChain("model", "salt")
    root = chain.root(3, [(chain.root(0), -1)])
    assert root.hex()[:16] == "2b89726dfd7a65d8"
    assert chain.run(root, [1, 2, 3]).hex()[:16] == "1f619ba8d1cdc5b1"
    assert chain.extend(root, [1, 2, 3]).hex()[:16] == "9056da558c8cc541"


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, "a", None])
def test_what_is_not_a_token_id_is_named(wrong):
    with pytest.raises(InvalidTokenId, match="is not a token id; use whole numbers from 0 to"):
        encode_tokens([1, wrong])


def test_the_key_of_a_chunk_is_made_by_the_chosen_hash_and_what_later_keys_say_of_it_by_sha256():
    tokens = encode_tokens([1, 2, 3])
    chain, fast = KeyChain("model", "salt"), KeyChain("model", "salt", "xxh3_128")
    root = chain.root(3)
    assert chain.chunk(root, tokens) == chain.run_encoded(root, tokens) == fast.run_encoded(root, tokens)
    written = b"kvm-run." + struct.pack("<II", len(root), len(tokens)) + root + tokens
    assert fast.chunk(root, tokens) == xxhash.xxh3_128_digest(written)
    assert fast.root(3) == root


def test_an_unknown_hash_is_refused():
    with pytest.raises(InvalidConfig, match="choose 'sha256' or 'xxh3_128'"):
        KeyChain("model", "", "md5")
