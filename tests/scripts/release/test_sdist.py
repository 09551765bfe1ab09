"""Where the source distribution of a release is, as pip says it of different indexes."""

from __future__ import annotations

import hashlib
import io
import subprocess
from types import SimpleNamespace

import pytest

from scripts.release import sdist

URL = "https://somewhere/packages/vllm-0.32.0.tar.gz"
DIGEST = hashlib.sha256(b"an archive").hexdigest()


@pytest.mark.parametrize("fragment", [f"#sha256={DIGEST}", ""])
def test_it_is_found_with_its_digest_or_without(
    fragment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = f"Found link {URL}{fragment} (from https://somewhere/simple/vllm/), version: 0.32.0"
    others = told.replace("0.32.0", "0.32.01"), told.replace(".tar.gz", ".tar.gz.asc")
    said = SimpleNamespace(stdout="\n  ".join([*others, told]))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    assert sdist._locate("0.32.0") == (URL, DIGEST if fragment else "")
    with pytest.raises(sdist.NotFetched, match=r"names no source distribution of vLLM 0\.33\.0"):
        sdist._locate("0.33.0")


@pytest.mark.parametrize(("digest", "taken"), [(DIGEST, True), ("", True), ("0" * 64, False)])
def test_other_bytes_than_those_of_the_digest_are_not_taken(
    digest: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SimpleNamespace(open=lambda *_, **__: io.BytesIO(b"an archive"))
    monkeypatch.setattr(sdist, "opener", lambda: opened)
    if taken:
        assert sdist._download(URL, digest) == b"an archive"
    else:
        with pytest.raises(OSError, match="10 bytes that are not those of its index"):
            sdist._download(URL, digest)
