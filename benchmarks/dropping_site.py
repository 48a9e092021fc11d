"""An agent that drops out of every session of secure aggregation once its shares are out: dropping_site.py HOME."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from atoll.client import secure_session
from atoll.client.main import run_agent
from atoll.wire.errors import Unavailable


class Dropping(secure_session.SecureSession):
    def take(self, step: Any, agreed: Any) -> Any:
        if step.WhichOneof("step") == "shares":
            return self.leave(step, Unavailable("this site drops out, as the benchmark wants it"))
        return super().take(step, agreed)


if __name__ == "__main__":
    import atoll.client.secure_tasks as tasks

    tasks.SecureSession = Dropping  # type: ignore[misc]
    run_agent(Path(sys.argv[1]))
