"""Certificates for tests, made as docs/sharing.md says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stoker.transport.secret import Certificates

DOCS = Path(__file__).parents[1] / "docs" / "sharing.md"


def certificates(folder: Path) -> Certificates:
    """Make an authority and a certificate of it."""
    commands = DOCS.read_text().partition("```bash\nopenssl")[2].partition("```")[0]
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    subprocess.run(
        ["bash", "-ec", "openssl" + commands], cwd=folder, check=True, capture_output=True
    )
    names = "certificate.pem", "key.pem", "authority.pem"
    return Certificates(*(folder / name for name in names))
