"""A run at a site of several processes: each of them holds one of these, and they do every request together.

As `RunSession`, but the model is spread by a layout: parameters come in slice by slice, and the update's tensors go out
in turns into the one file that all processes map. What a round leaves for the next one is not kept here, so
`require_spreadable` refuses the jobs that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from atoll.aggregation.encode import Encoder
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.rounding import SECRET_BYTES, Rounding, rounding_key
from atoll.aggregation.strategy import Strategy, resolve
from atoll.cluster.app import App
from atoll.cluster.batches import Work, plan_work
from atoll.cluster.local_loop import Outcome, train_locally
from atoll.cluster.messages import Evaluate, Evaluated, Prepare, Prepared, Train, Trained
from atoll.cluster.optimizer_state import LocalOptimizer
from atoll.cluster.parallel.judging import judge
from atoll.cluster.parallel.layouts import Layout
from atoll.cluster.parallel.pipeline import Stages
from atoll.cluster.parallel.streams import average_buffers, load_slices, whole_tensors, writes
from atoll.cluster.parallel.votes import GivingUp, agree
from atoll.cluster.seeds import training_seed
from atoll.cluster.update_file import create_update
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import AtollError, Malformed, NotAllowed
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import open_model
from atoll.wire.tensors import views

OnStep = Callable[[int, int], None]
