"""A worker's part of a session: an update of a run, written once more as masked levels."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from samples.bench import MakeBench

from atoll.cluster.messages import Mask, MaskKey, Trained
from atoll.cluster.worker_process import WorkerDied, WorkerProcess
from atoll.privacy.secagg.masks import Mask as KeyedMask
from atoll.privacy.secagg.masks import add_masks
from atoll.wire.errors import BadUpdate, LocalError, NotAllowed
