"""Keys of a federation on this host: the SuperLink's certificate, and a pair of keys for each SuperNode."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm

from fedfill.errors import FedfillError
from fedfill.privacy.masking import Parties, read_private, read_public

HOST = "127.0.0.1"


def make_certificate(folder: Path) -> None:
    """A certificate for this host, and the authority that vouches for it, unless they are there."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if all((folder / name).exists() for name in ("ca.crt", "server.crt", "server.key")):
        return
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
        builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key.public_key())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1)).serial_number(x509.random_serial_number())
        return builder.not_valid_after(now + datetime.timedelta(days=3650))

    # the authority signs once and its key is forgotten: nothing else can ever be signed with it
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    identity = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = certificate("fedfill rehearsal CA", "fedfill rehearsal CA", authority)
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    root = root.add_extension(usage, critical=True).add_extension(identity, critical=False)
    leaf = certificate("SuperLink", "fedfill rehearsal CA", server)
    hosts = [x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")]
    leaf = leaf.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identity)
    leaf = leaf.add_extension(issuer, critical=False)
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    _write_secret(folder / "server.key", server.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (folder / "server.crt").write_bytes(leaf.sign(authority, hashes.SHA384()).public_bytes(pem))
    (folder / "ca.crt").write_bytes(root.sign(authority, hashes.SHA384()).public_bytes(pem))


def make_node_key(path: Path) -> None:
    """A SuperNode's pair of keys, ``.key`` and ``.pub``, unless they are there."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if path.with_suffix(".pub").exists():
        return
    key = ec.generate_private_key(ec.SECP384R1())
    ssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _write_secret(path.with_suffix(".key"), key.private_bytes(serialization.Encoding.PEM, ssh, plain))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)  # last: where it is, the other is whole


def read_parties(key: str, peers: str, clients: int) -> Parties:
    """A host's own key, and the public keys of all hosts, from files on its disk that did not come from the server."""
    own, folder = Path(key).expanduser(), Path(peers).expanduser()
    try:
        private = read_private(own.read_bytes())
        known = {i: read_public((folder / f"node{i}.pub").read_bytes()) for i in range(clients)}
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FedfillError(
            f"peers: can't read the keys of this deployment's {clients} hosts ({error}); allowed: key, this host's own as "
            "ssh-keygen -t ecdsa -b 384 writes it, and a folder with node0.pub, node1.pub and so on"
        ) from error
    holders: dict[tuple[int, int], int] = {}
    for i, public in known.items():
        numbers = public.public_numbers()
        if (first := holders.setdefault((numbers.x, numbers.y), i)) != i:
            raise FedfillError(
                f"peers: found one key in node{first}.pub and node{i}.pub, whose holder would count as two hosts; allowed: a key of "
                "its own for each host"
            )
    return Parties(private, known)


def _write_secret(path: Path, data: bytes) -> None:
    """Write a file that its owner alone can ever read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
