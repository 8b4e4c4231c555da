"""Masks: they cancel in the sum of all and in nothing less, and nobody can put a key in another's place."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfill.privacy import masking
from fedfill.privacy.masking import Occasion, SumKey, checked, make_key, mask, masked

OCCASION = Occasion("digest", "sums", 3, "question")
LASTING = {i: ec.generate_private_key(ec.SECP384R1()) for i in (0, 2, 5, 9)}
PUBLIC = {i: key.public_key() for i, key in LASTING.items()}


@functools.cache
def made(i: int, again: int = 0) -> tuple[SumKey, bytes]:
    return make_key(OCCASION, i, f"state {i}", LASTING[i])


def circle(*clients: int) -> list[SumKey]:
    return [made(i)[0] for i in clients]


def of(i: int, keys: list[SumKey], numbers: int = 50) -> Tensor:
    return mask(made(i)[1], i, keys, OCCASION, numbers)


@settings(max_examples=15, deadline=None)
@given(st.sets(st.sampled_from([0, 2, 5, 9]), min_size=2), st.integers(0, 2**32))
def test_masks_of_a_circle_cancel_and_of_a_part_of_it_they_do_not(clients: set[int], seed: int) -> None:
    keys = circle(*sorted(clients))
    numbers = torch.Generator().manual_seed(seed)
    parts = {
        i: {"b": torch.randint(-(2**50), 2**50, (2, 5), generator=numbers), "a": torch.arange(40)} for i in clients
    }
    sent = {i: masked(part, of(i, keys)) for i, part in parts.items()}
    assert all((sent[i][name] != parts[i][name]).all() for i in clients for name in ("a", "b"))
    for name in ("a", "b"):
        assert torch.equal(sum(x[name] for x in sent.values()), sum(x[name] for x in parts.values()))
        but_one = sorted(clients)[1:]
        some, exact = (sum(x[i][name] for i in but_one) for x in (sent, parts))
        assert (some != exact).all()


def test_a_mask_by_hand() -> None:
    """Two parties, step by step: the shared secret, a key of it under the circle's hash, and the stream."""
    keys = circle(2, 9)
    shared = X25519PrivateKey.from_private_bytes(made(2)[1]).exchange(
        X25519PublicKey.from_public_bytes(bytes.fromhex(made(9)[0].public))
    )
    salt = masking._hash(OCCASION, keys)
    key = HKDF(SHA256(), 32, salt=salt, info=b"fedfill mask 2 9").derive(shared)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(24))
    words = [int.from_bytes(stream[k : k + 8], "little") for k in (0, 8, 16)]
    assert [x % 2**64 for x in of(2, keys, 3).tolist()] == words
    assert [x % 2**64 for x in of(9, keys, 3).tolist()] == [-word % 2**64 for word in words]


def test_no_mask_serves_two_circles_or_two_occasions() -> None:
    """Two sums under one mask would show their difference; and who was told of another circle does not cancel."""
    found = [of(0, keys) for keys in (circle(0, 2), circle(0, 5), circle(0, 2, 5), circle(0, 2, 5, 9))]
    found += [mask(made(0)[1], 0, circle(0, 2), replace(OCCASION, **other), 50) for other in OTHERS]
    found.append(mask(made(0)[1], 0, [made(0)[0], replace(made(2)[0], state="another")], OCCASION, 50))
    for k, one in enumerate(found):
        assert all((one != other).all() for other in found[:k])
    assert ((of(0, circle(0, 2, 5)) + of(2, circle(0, 2)) + of(5, circle(0, 2, 5))) != 0).all()


OTHERS: list[dict[str, str | int]] = [
    {"experiment": "another"}, {"handler": "others"}, {"round": 4}, {"question": "another"},
]  # fmt: skip


def test_a_key_is_its_partys_for_this_occasion_alone() -> None:
    keys = circle(0, 2, 5)
    checked(keys, keys[1], OCCASION, PUBLIC)
    forged, _ = make_key(OCCASION, 5, "state 5", ec.generate_private_key(ec.SECP384R1()))  # a server in the middle
    wrong = [
        ([*keys[:2], forged], "not signed"),
        ([*keys[:2], replace(keys[2], public=forged.public)], "not signed"),
        ([*keys[:2], replace(keys[2], state="another")], "not signed"),
        ([*keys[:2], replace(made(9)[0], client=5)], "not signed"),
        ([*keys[:2], replace(keys[2], signature="zz")], "not signed"),
        ([*keys, replace(keys[2], client=7)], "no public key of client 7"),
        ([*keys, keys[2]], "ascending"),
        (keys[::-1], "ascending"),
        ([keys[0], keys[2]], "own key"),
    ]
    for bad, words in wrong:
        with pytest.raises(ValueError, match=words):
            checked(bad, keys[1], OCCASION, PUBLIC)
    for other in OTHERS:
        with pytest.raises(ValueError, match="not signed"):
            checked(keys, keys[1], replace(OCCASION, **other), PUBLIC)


def test_what_has_no_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="alone"):
        of(0, circle(0))
    for tensors in ({"a": torch.zeros(50)}, {"a": torch.zeros(50, dtype=torch.int32)}, {"a": torch.arange(49)}):
        with pytest.raises(ValueError, match="64 bits"):
            masked(tensors, of(0, circle(0, 2)))


def test_keys_are_read_as_ssh_keygen_writes_them_and_only_on_that_curve() -> None:
    def files(key: ec.EllipticCurvePrivateKey) -> tuple[bytes, bytes]:
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), public

    private, public = files(LASTING[0])
    assert masking.read_private(private).public_key() == masking.read_public(public) == PUBLIC[0]
    for read, data in zip(
        (masking.read_private, masking.read_public), files(ec.generate_private_key(ec.SECP256R1())), strict=True
    ):
        with pytest.raises(ValueError, match="P-384"):
            read(data)
