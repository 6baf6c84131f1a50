"""The one JSON text of a value, and the short hash of that text which serves as its id everywhere."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def canonical_json(value: Any) -> str:
    """The JSON text of `value` with sorted keys and no spaces. Ids are hashes of this text."""
    return _encode(value)


def stable_id(value: Any, length: int = 12) -> str:
    """First `length` hex digits of SHA-256 over the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


OMIT_DEFAULT = {"omit_default": True}
"""Metadata of a field that is not written where it has its default: files from before there was such a field stay as they are.
A field that is written under another name than its own has that name as `key`.
"""
