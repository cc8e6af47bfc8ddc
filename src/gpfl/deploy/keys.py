"""Keys and certificates of a deployment. The package `cryptography` is imported here alone; it comes with gpfl[flower]."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpfl.errors import GpflError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

SIGNATURE_BYTES = 64
CA_DAYS, SERVER_DAYS = 3650, 365
CLOCK_SKEW = datetime.timedelta(hours=1)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, from the start. Raise if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise GpflError(f"{path} exists, and keys are not overwritten: move it away first") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)


# Signatures of the coordinator.


def make_signing_key(folder: Path) -> None:
    """Write the coordinator's signing key and its public part."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    write_private(folder / "signing.key", key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    (folder / "signing.pub").write_bytes(public)


def sign(content: bytes, key: Path) -> bytes:
    """Return content with the signature of a private key in front."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    private = load_pem_private_key(_read(key), None)
    if not isinstance(private, Ed25519PrivateKey):
        raise GpflError(f"{key} is not a signing key of gpfl: restore it")
    signature: bytes = private.sign(content)
    return signature + content


def verify(signed: bytes, public: Path) -> bytes:
    """Return the content that `sign` signed. Raise if the signature is not that of the key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = load_pem_public_key(_read(public))
    signature, content = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
    if not isinstance(key, Ed25519PublicKey):
        raise GpflError(f"{public} is not a signing key of gpfl: restore it")
    try:
        key.verify(signature, content)
    except InvalidSignature:
        raise GpflError(f"the signature is not that of {public}") from None
    return content


# Node keys, by which the SuperLink knows sites.


def make_node_key(folder: Path) -> None:
    """Write a site's node key and its public part, in the formats that Flower reads."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    write_private(folder / "node.key", key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public + b"\n")


# Certificates.


def make_ca(folder: Path, name: str) -> None:
    """Write the key and the certificate of a certificate authority for one deployment."""
    key = _make_key()
    write_private(folder / "ca.key", _key_bytes(key))
    (folder / "ca.crt").write_bytes(_certificate(f"gpfl {name}", key, f"gpfl {name}", key, CA_DAYS, ()))


def make_server_certificate(folder: Path, names: Sequence[str], days: int = SERVER_DAYS) -> None:
    """Write a new key and certificate of the server, signed by the CA of the folder, in place of the old ones.

    Args:
        folder: Folder of certificates.
        names: Host names and IP addresses under which sites reach the server.
        days: Days for which it is valid; a negative number makes one that has expired.

    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import NameOID

    ca = x509.load_pem_x509_certificate(_read(folder / "ca.crt"))
    signer = load_pem_private_key(_read(folder / "ca.key"), None)
    assert isinstance(signer, EllipticCurvePrivateKey)
    issuer = str(ca.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    key = _make_key()
    content = _certificate(names[0], key, issuer, signer, days, names)
    for file in ("server.key", "server.crt"):
        (folder / file).unlink(missing_ok=True)
    write_private(folder / "server.key", _key_bytes(key))
    (folder / "server.crt").write_bytes(content)


def expiry(certificate: Path) -> datetime.datetime:
    """Return when a certificate expires."""
    from cryptography import x509

    end: datetime.datetime = x509.load_pem_x509_certificate(_read(certificate)).not_valid_after_utc
    return end


def _certificate(
    name: str, key: "EllipticCurvePrivateKey", issuer: str, signer: "EllipticCurvePrivateKey", days: int, names: Sequence[str]
) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def common_name(text: str) -> "x509.Name":
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])

    start = datetime.datetime.now(datetime.UTC) - CLOCK_SKEW
    start += datetime.timedelta(days=min(0, days) * 2)
    is_ca = not names
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
        False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(common_name(name))
        .issuer_name(common_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=abs(days)))
        .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=is_ca, crl_sign=is_ca, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    content: bytes = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return content


def _general_name(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _make_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_bytes(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    content: bytes = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise GpflError(f"cannot read {path} ({error.strerror}): restore it") from None


# Mask keys of secure sums.


def make_mask_key(path: Path) -> None:
    """Write a site's private mask key."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.generate()
    write_private(path, key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))


def public_mask_key(path: Path) -> bytes:
    """Return the public part of a private mask key."""
    content: bytes = _read_mask_key(path).public_key().public_bytes_raw()
    return content


def shared_secret(path: Path, public: bytes) -> bytes:
    """Return the secret of a private mask key and another site's public one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        secret: bytes = _read_mask_key(path).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise GpflError("the mask key of another site is not one") from None
    return secret


def keystream(secret: bytes, context: bytes, length: int) -> bytes:
    """Return bytes that only the owners of a secret can know, by HKDF-SHA256 and ChaCha20; others for each context."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"gpfl secure sum " + context).derive(secret)
    stream: bytes = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(length))
    return stream


def _read_mask_key(path: Path) -> "X25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(_read(path), None)
    if not isinstance(key, X25519PrivateKey):
        raise GpflError(f"{path} is not a mask key of gpfl: restore it")
    return key
