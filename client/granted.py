"""Which of a site's transfers a grant is for, and whose it was when it is taken back."""

from __future__ import annotations

import logging

from atoll.client.base_models import BaseModels
from atoll.client.deliveries import Deliveries
from atoll.client.neighbours import Neighbours
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import from_detail

_log = logging.getLogger(__name__)


class Granted:
    """Hands grants on."""

    def __init__(self, deliveries: Deliveries, base_models: BaseModels, neighbours: Neighbours) -> None:
        self._deliveries, self._base_models, self._neighbours = deliveries, base_models, neighbours

    def granted(self, grant: pb.Grant) -> None:
        """Begin a transfer that the server has room for."""
        if grant.direction == pb.UP:
            self._deliveries.granted(grant)
        elif grant.direction == pb.DOWN and grant.key.task:
            self._neighbours.granted(grant)
        elif grant.direction == pb.DOWN:
            self._base_models.granted(grant)

    def withdrawn(self, withdrawn: pb.GrantWithdrawn) -> None:
        """Stop a transfer that the server takes back, or will not grant."""
        reason = from_detail(withdrawn.reason)
        _log.warning("the server takes a transfer back: %s", reason)
        if not withdrawn.grant:  # no grant was given: what was asked for is not to be had
            self._base_models.refused(reason)
        elif not (self._deliveries.withdrawn(withdrawn.grant) or self._neighbours.withdrawn(withdrawn.grant)):
            self._base_models.withdrawn(withdrawn.grant)
