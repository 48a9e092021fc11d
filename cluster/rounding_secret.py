"""The secret of rounding where it is to be reproducible: in tests and simulations. Loads no torch."""

from __future__ import annotations

import hashlib


def reproducible_secret(seed: int, job_seed: int, site: str) -> bytes:
    """32 bytes for one site's runs of a job, which everybody can compute: `[reproducible]` of site.toml has the seed."""
    place = f"{seed} {job_seed} {site}"
    return hashlib.sha256(b"atoll/rounding/reproducible/1\0" + place.encode()).digest()
