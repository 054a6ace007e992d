"""The token of feeds across hosts: the Ray cluster's token if there is one, else the user's own.

A feeder gets a cluster's token in its environment, which only its user can read.
"""

from __future__ import annotations

import os

from stoker.transport.secret import make_token_file, read_token, token_path

IN_ENVIRONMENT = "STOKER_FEED_TOKEN"


def find_token() -> bytes:
    """Return the token. Raises TokenError if there is none."""
    given = os.environ.get(IN_ENVIRONMENT)
    return bytes.fromhex(given) if given else read_token(token_path())


def find_or_make_token() -> bytes:
    """Return the token; if there is none, write a new one to the user's file."""
    return find_token() if IN_ENVIRONMENT in os.environ else make_token_file(token_path())
