"""Masks between pairs of parties: of all masked vectors the sum can be read, and of fewer nothing (Bonawitz et al., CCS 2017).

Each party makes a fresh X25519 key (RFC 7748) for one sum and signs it with its lasting key, ECDSA on P-384. Two parties then
share a secret that nobody else has. HKDF-SHA256 makes a key of it, and ChaCha20 a vector of whole numbers modulo 2^64: the
party with the smaller number adds it, the other one subtracts it. The secrets of all pairs depend on who takes part and with
which keys, so that no two sums have a mask in common, and parties that were told of different circles don't cancel.

No share of a secret is ever given to others, so nobody can open a sum without those who dropped out. The others begin anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from torch import Tensor

from fedfill.tree import Record, Weights

PURPOSE = b"fedfill key for one sum, version 1\n"
"""Before all that is signed: a signature for this is one for nothing else, and Flower signs times of day."""


@dataclass(frozen=True)
class Occasion(Record):
    """What one sum is of, as every party knows it for itself.

    Attributes:
        experiment: Its digest.
        handler: What is called.
        round: As the wire counts it.
        question: SHA-256 of the message that is answered.
    """

    experiment: str
    handler: str
    round: int
    question: str


@dataclass(frozen=True)
class SumKey(Record):
    """One party's key for one sum.

    Attributes:
        client: Its number.
        public: X25519 public key, 64 hexadecimal digits.
        state: A keyed hash of all that its answer is made of: the same for the same answer, and telling nothing else.
        signature: Of the party's lasting key on all that and on the occasion, in hexadecimal digits.
    """

    client: int
    public: str
    state: str
    signature: str


@dataclass(frozen=True)
class Parties:
    """A party's lasting key, and those of all parties, which it was given by their people and not by the server.

    Attributes:
        own: Signs.
        all: By client, itself among them.
    """

    own: EllipticCurvePrivateKey
    all: Mapping[int, EllipticCurvePublicKey]


def read_private(data: bytes) -> EllipticCurvePrivateKey:
    """A lasting key from an OpenSSH file without a password, such as a SuperNode's; only curve P-384 is one."""
    key = load_ssh_private_key(data, password=None)
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP384R1):
        raise ValueError("it is no ECDSA key on the curve P-384")
    return key


def read_public(data: bytes) -> EllipticCurvePublicKey:
    """A lasting public key from an OpenSSH file; only curve P-384 is one."""
    key = load_ssh_public_key(data)
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
        raise ValueError("it is no ECDSA key on the curve P-384")
    return key


def make_key(occasion: Occasion, client: int, state: str, own: EllipticCurvePrivateKey) -> tuple[SumKey, bytes]:
    """A fresh key for one sum, signed.

    Args:
        occasion: What it is for.
        client: Whose.
        state: As in `SumKey`.
        own: Signs it.

    Returns:
        What others are told, and the secret key, which is for one use.
    """
    secret = X25519PrivateKey.generate()
    public = secret.public_key().public_bytes_raw().hex()
    signature = own.sign(_signed(occasion, client, public, state), ECDSA(SHA384())).hex()
    return SumKey(client, public, state, signature), secret.private_bytes_raw()


def verify(key: SumKey, occasion: Occasion, parties: Mapping[int, EllipticCurvePublicKey]) -> None:
    """Refuse a key that its party did not sign for this occasion.

    Args:
        key: From elsewhere.
        occasion: As this party knows it.
        parties: Everybody's lasting public key.

    Raises:
        ValueError: Where the client is unknown, or the signature is not its own.
    """
    if key.client not in parties:
        raise ValueError(f"there is no public key of client {key.client}")
    try:
        signed = _signed(occasion, key.client, key.public, key.state)
        parties[key.client].verify(bytes.fromhex(key.signature), signed, ECDSA(SHA384()))
    except (InvalidSignature, ValueError) as wrong:
        raise ValueError(f"the key for this sum that came as client {key.client}'s is not signed by it") from wrong


def checked(
    circle: Sequence[SumKey], own: SumKey, occasion: Occasion, parties: Mapping[int, EllipticCurvePublicKey]
) -> None:
    """Refuse a circle that is not what it says: a party twice, a key that is not its party's, one's own that is another.

    Args:
        circle: All who take part, in ascending order of client.
        own: This party's own key, as it made it.
        occasion: As this party knows it.
        parties: Everybody's lasting public key.

    Raises:
        ValueError: With what is wrong.
    """
    clients = [key.client for key in circle]
    if clients != sorted(set(clients)):
        raise ValueError("the circle of a sum names its parties in ascending order, each once")
    if own not in circle:
        raise ValueError("this client's own key is not in the circle of the sum")
    for key in circle:
        verify(key, occasion, parties)


def mask(secret: bytes, client: int, circle: Sequence[SumKey], occasion: Occasion, numbers: int) -> Tensor:
    """What one party adds to its vector: uniform for everybody who lacks one pair's secret, and with the others' it is 0.

    Args:
        secret: Of `make_key`.
        client: Whose.
        circle: All who take part, in ascending order; checked before.
        occasion: What the sum is of.
        numbers: Length of the vector.

    Returns:
        ``[numbers]`` int64, to be added modulo 2^64, as int64 does.

    Raises:
        ValueError: Where there is no other party, or its public key makes no secret.
    """
    others = [key for key in circle if key.client != client]
    if not others:
        raise ValueError("a sum of one party alone has no mask")
    own, transcript = X25519PrivateKey.from_private_bytes(secret), _hash(occasion, circle)
    total = np.zeros(numbers, dtype=np.uint64)
    for key in others:
        shared = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key.public)))
        pair = sorted((client, key.client))
        info = f"fedfill mask {pair[0]} {pair[1]}".encode()
        stream = HKDF(SHA256(), 32, salt=transcript, info=info).derive(shared)
        cipher = Cipher(algorithms.ChaCha20(stream, bytes(16)), mode=None).encryptor()
        one = np.frombuffer(cipher.update(bytes(8 * numbers)), dtype="<u8")
        total = total + one if client == pair[0] else total - one  # modulo 2^64
    return torch.from_numpy(total.view(np.int64))


def masked(tensors: Weights, mask: Tensor) -> Weights:
    """Whole numbers plus a mask, modulo 2^64.

    Args:
        tensors: int64, in any shapes; in the order of their names they take the mask's numbers one after another.
        mask: As many, int64.

    Returns:
        New tensors.

    Raises:
        ValueError: Where a tensor is not int64, or the mask has another length.
    """
    wrong = [name for name, x in tensors.items() if x.dtype != torch.int64]
    if wrong or mask.numel() != sum(x.numel() for x in tensors.values()):
        raise ValueError(f"masks are for whole numbers of 64 bits, as many as there are ({', '.join(wrong)})")
    found, done = {}, 0
    for name in sorted(tensors):
        x = tensors[name]
        found[name] = x + mask[done : done + x.numel()].reshape(x.shape).to(x.device)
        done += x.numel()
    return {name: found[name] for name in tensors}


def _signed(occasion: Occasion, client: int, public: str, state: str) -> bytes:
    what = (occasion.experiment, occasion.handler, occasion.round, occasion.question, client, public, state)
    return PURPOSE + repr(what).encode()


def _hash(occasion: Occasion, circle: Sequence[SumKey]) -> bytes:
    digest = hashlib.sha256()
    for key in circle:
        part = hashlib.sha256(_signed(occasion, key.client, key.public, key.state))
        digest.update(part.digest())
    return digest.digest()
